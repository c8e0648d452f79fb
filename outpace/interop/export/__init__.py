"""Export of plans as configurations of other trainers, with one module per format.

What a format cannot express becomes a sentence in `ExportedPlan.notes`, and a comment in formats
that have comments.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from outpace.interop.export import (
    accelerate,
    deepspeed,
    fsdp,
    megatron,
    nanotron,
    outpace_plan,
    torchtitan,
)
from outpace.interop.export.request import ExportedPlan, ExportRequest
from outpace.records.errors import BadInputError, suggest
from outpace.records.model import ModelSpec
from outpace.records.outline import Outline
from outpace.records.plan import Plan

__all__ = ["FORMATS", "ExportRequest", "ExportedPlan", "export_plan"]

FORMATS: Mapping[str, Callable[[ExportRequest], ExportedPlan]] = MappingProxyType(
    {
        "deepspeed": deepspeed.write,
        "accelerate": accelerate.write,
        "torchtitan": torchtitan.write,
        "megatron": megatron.write,
        "nanotron": nanotron.write,
        "fsdp": fsdp.write,
        "outpace": outpace_plan.write,
    }
)


def export_plan(
    name: str,
    plan: Plan,
    model: ModelSpec | Outline,
    *,
    global_batch: int,
    seq_len: int,
    reference: str | None = None,
) -> ExportedPlan:
    """Convert a plan to the configuration of the trainer `name`, one of FORMATS.

    `reference` is the user's name for the model. Raises BadInputError for an unknown format, a
    global batch that does not match the plan, fewer layers than stages, checkpointing for a
    different number of layers, and an outline if the format needs a spec.
    """
    write = FORMATS.get(name)
    if write is None:
        raise BadInputError(
            f"unknown format {name!r}.{suggest(name, FORMATS)} The formats are "
            f"{', '.join(FORMATS)}."
        )
    return write(ExportRequest(plan, model, global_batch, seq_len, reference))
