"""A plan as another trainer's configuration: one file per format.

What a format cannot say is never lost: it becomes a sentence in `Emitted.unsaid`, and a comment in
formats that have comments.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from outpace.interop.emit import (
    accelerate,
    deepspeed,
    fsdp,
    megatron,
    nanotron,
    own,
    torchtitan,
)
from outpace.interop.emit.request import Emitted, Request
from outpace.records.errors import BadInputError, nearest
from outpace.records.model import ModelSpec
from outpace.records.outline import Outline
from outpace.records.plan import Plan

__all__ = ["FORMATS", "Emitted", "Request", "emit"]

FORMATS: Mapping[str, Callable[[Request], Emitted]] = MappingProxyType(
    {
        "deepspeed": deepspeed.write,
        "accelerate": accelerate.write,
        "torchtitan": torchtitan.write,
        "megatron": megatron.write,
        "nanotron": nanotron.write,
        "fsdp": fsdp.write,
        "outpace": own.write,
    }
)


def emit(
    name: str,
    plan: Plan,
    model: ModelSpec | Outline,
    *,
    global_batch: int,
    seq_len: int,
    reference: str | None = None,
) -> Emitted:
    """Write a plan for the trainer called `name`, one of FORMATS.

    `reference` is what the user named the model by. Raises BadInputError for another name, a global
    batch that the plan does not divide, fewer layers than stages, a checkpointing of another depth
    than the model's, and an outline where the format has to say more of the model.
    """
    write = FORMATS.get(name)
    if write is None:
        raise BadInputError(
            f"there is no format {name!r}.{nearest(name, FORMATS)} The formats are "
            f"{', '.join(FORMATS)}."
        )
    return write(Request(plan, model, global_batch, seq_len, reference))
