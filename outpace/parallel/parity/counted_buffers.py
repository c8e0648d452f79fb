"""Detection of values in which forwards count or average samples, to be read between steps.

Examples are a router's load, a histogram, and the usage of a codebook. Such values may be buffers,
or numbers and tensors in plain attributes, lists and dicts. Each data-parallel rank updates its own
copy from its own samples. Later steps and checkpoints use rank 0's buffers.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from outpace.nn.fingerprint import fingerprint
from outpace.parallel.batches import copy_batch, cut, samples_in, take_first
from outpace.parallel.layout import Batch, StepHooks
from outpace.parallel.parity.comparison import largest, relative
from outpace.parallel.parity.module_state import ModuleState, is_numeric
from outpace.parallel.parity.moved_parameters import keep_values
from outpace.parallel.parity.plain_copy import model_of
from outpace.parallel.plain import without_dropout
from outpace.parallel.rank_objects import gather_objects
from outpace.records.errors import first_names

_FEWEST = (2, 4)  # samples; normalisation may need more
_MOST_SENT = 4_096  # values of a buffer


def batchnorm_state(model: nn.Module) -> Collection[int]:
    """Return the `id`s of the buffers of all BatchNorm layers.

    In training, no output depends on these running statistics.
    """
    return {
        id(buffer)
        for part in model.modules()
        if isinstance(part, _NormBase) and type(part).__module__.startswith(("torch.nn", "outpace"))
        for buffer in part.buffers(recurse=False)
    }


def find_counted_buffers(
    plain: nn.Module,
    hooks: StepHooks,
    drops: bool,
    batch: Batch,
    names: Collection[str] | None = None,
    attributes: Collection[str] | None = (),
    backward: bool = False,
) -> list[str] | None:
    """Return the names of buffers that depend on which samples a forward gets.

    On several ranks, such buffers would cover only a rank's samples. To find them, a few samples
    and their halves run with the same initial buffers and random numbers, so a count of calls or a
    random mask does not differ between them. `names` restricts the search. Left out are buffers of
    batch normalisations, and values that no checkpoint contains and that each forward sets again,
    such as caches. Returns None if these forwards fail.

    The result also has the names, as in `kept_attributes`, of plain attributes whose numbers or
    tensors depend on the samples. `attributes` restricts these; None means all. A list or dict must
    keep its length and keys, so a log of losses does not count. `backward`: also run the backward,
    because its hooks may count samples.
    """
    model = model_of(plain)
    known, saved = batchnorm_state(model), model.state_dict(keep_vars=True)
    names = [
        name
        for name, buffer in model.named_buffers()
        if id(buffer) not in known and (names is None or name in names)
    ]
    if not names and attributes is not None and not attributes:
        return []
    samples = samples_in(batch)
    asked = plain, hooks, drops, names, attributes, backward
    for few in sorted({*_FEWEST, samples // 2 * 2} & {*range(1, samples + 1)}):
        both = take_first(batch, few)
        with suppress(Exception):  # such as normalisation over too few samples
            after, *after_halves = (_values_after([part], *asked) for part in (both, *cut(both, 2)))
            found = [n for n in after if any(one.get(n) != after[n] for one in after_halves)]
            if found and not saved.keys() >= {*found}:
                twice = _values_after([both, both], *asked)
                found = [
                    n for n in found if n in saved or _only_numbers_change(after[n], twice.get(n))
                ]
            return found
    return None


def _values_after(
    batches: Sequence[Batch],
    plain: nn.Module,
    hooks: StepHooks,
    drops: bool,
    names: Sequence[str],
    attributes: Collection[str] | None,
    backward: bool,
) -> dict[str, Any]:
    """Run forwards; return the values of buffers and attributes after them; undo all changes."""
    model, device = model_of(plain), next(plain.parameters()).device
    dropping = without_dropout(plain) if drops else nullcontext()
    state = ModuleState(plain)
    with keep_values(model.named_parameters()), state.preserve(device), dropping:
        for batch in batches:
            with torch.enable_grad(), hooks.cast():  # some count only where gradients are computed
                loss_sum, *_ = plain(copy_batch(batch))
            if backward:
                loss_sum.backward()
        buffers = dict(model.named_buffers())
        found: dict[str, Any] = {name: fingerprint(buffers[name]) for name in names}
        if attributes is None or attributes:
            found |= {
                name: value
                for name, value in state.attributes(with_buffers=False).items()
                if _has_numbers(value) and (attributes is None or name in attributes)
            }
        return found


def _only_numbers_change(value: Any, later: Any) -> bool:
    alike = type(value) is int or _without_numbers(value) == _without_numbers(later)
    return bool(value != later and alike)


def _without_numbers(value: Any) -> Any:
    if is_numeric(value):
        return None
    return tuple(map(_without_numbers, value)) if type(value) is tuple else value


def _has_numbers(value: Any) -> bool:
    return is_numeric(value) or (type(value) is tuple and any(map(_has_numbers, value)))


def compare_ranks_buffers(mine: Mapping[str, Tensor | None]) -> float:
    """Return the largest relative difference between ranks in the same buffer. Collective.

    Only the first values of each buffer are compared. The difference is relative to the largest
    absolute value among them.
    """
    values = gather_objects(
        {n: b.flatten()[:_MOST_SENT].cpu() for n, b in mine.items() if b is not None}
    )
    first = next((one for one in values if one), {})
    apart = 0.0
    for other in values:
        for name in first.keys() & other.keys():
            scale = max(largest(first[name]), largest(other[name]))
            apart = max(apart, relative(other[name], first[name], scale) or 0.0)
    return apart


def explain_counted_buffers(names: Sequence[str], apart: float, shares: int) -> str:
    """Return a message about buffers that depend only on the samples of one rank.

    `apart` is the relative difference between ranks, 0 if unknown. `shares` is the number of
    data-parallel ranks.
    """
    differ = f", and in the first batch ranks differ by {100 * apart:.3g} %" if apart else ""
    kept = "The next step and checkpoints use rank 0's values"
    return _explain_counts(names, ("a buffer", "buffers"), f"{differ}. {kept}", shares)


def explain_counted_attributes(names: Sequence[str], shares: int) -> str:
    """Return a message about plain attributes that depend only on the samples of one rank."""
    kept = f", and no checkpoint contains {'them' if len(names) > 1 else 'it'}"
    return _explain_counts(names, ("a plain attribute", "plain attributes"), kept, shares)


def _explain_counts(names: Sequence[str], kinds: tuple[str, str], kept: str, shares: int) -> str:
    several = len(names) > 1
    kind = "" if any(name.endswith(")") for name in names) else f" ({kinds[several]})"
    return (
        f"a step counts or averages samples in {first_names(names)}{kind}. Each rank does so with "
        f"its own samples{kept}, so {'they' if several else 'it'} would cover 1/{shares} of each "
        f"batch. {CURE_OF_COUNTS}"
    )


CURE_OF_COUNTS = (
    "To cover all samples, sum what a forward adds over the ranks before adding it (if "
    "torch.distributed.is_initialized(): torch.distributed.all_reduce(counts)), and divide "
    "averages by the number of ranks. For a running maximum, pass "
    "op=torch.distributed.ReduceOp.MAX. Or do this in your loop, with what a step has added"
)
