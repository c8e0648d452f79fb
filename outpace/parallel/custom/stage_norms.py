"""Norms of gradients over all stages of a pipeline, for loops that call torch's functions.

`torch.nn.utils.clip_grad_norm_` clips by the norm of the gradients that it gets, which in a
pipeline are only those of this rank's stages. While pipelines exist, the function that it calls,
`clip_grad._get_total_norm`, is replaced, and so is the public `get_total_norm`. A loop that
imported `get_total_norm` before `parallelize` keeps torch's function.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad, get_total_norm

from outpace.parallel.layout import SpreadLayout
from outpace.parallel.rank_objects import gather_objects
from outpace.parallel.refusals import LoopPosition
from outpace.records.errors import BadInputError, first_names

_SAME = 1e-5  # tolerated relative difference between norms that ranks compute separately


def measure_all_stages(layout: SpreadLayout, place: LoopPosition) -> None:
    """Make torch's `get_total_norm` and `clip_grad_norm_` cover all stages of a pipeline.

    Each gradient is counted once; see `StageNorms.measure`. Every rank calls this for the same
    pipelines (layouts) in the same order. torch's functions are restored when all layouts are gone.
    """
    norms = _find_stage_norms()
    if norms is None:
        norms = StageNorms(place)
        clip_grad._get_total_norm = utils.get_total_norm = norms.measure
    norms.add(layout)


def _find_stage_norms() -> "StageNorms | None":
    function: Any = clip_grad._get_total_norm
    owner = function.__self__ if inspect.ismethod(function) else None
    return owner if isinstance(owner, StageNorms) else None


@dataclass(frozen=True)
class _PassedNorms:
    """Norms of the gradients that the user's loop on one rank has passed to `get_total_norm`.

    `norms` has the norm of each pipeline's gradients, by the pipeline's number, without gradients
    that are counted on another rank. `left_out` names the parameters whose gradients the loop has
    not passed. `other` is the norm of gradients that belong to no pipeline.
    """

    order: float
    norms: Mapping[int, float] = field(default_factory=dict)
    left_out: Mapping[int, Sequence[str]] = field(default_factory=dict)
    other: float | None = None


class StageNorms:
    """A replacement for torch's `get_total_norm` that covers all stages of pipelines."""

    def __init__(self, place: LoopPosition) -> None:
        self._place = place
        self._layouts: dict[int, ref[SpreadLayout]] = {}
        self._added = 0

    def add(self, layout: SpreadLayout) -> None:
        """Cover the gradients of a pipeline's stages until the layout is deleted."""
        self._layouts[self._added] = ref(layout)
        finalize(layout, self._remove, self._added).atexit = False
        self._added += 1

    def _remove(self, number: int) -> None:
        del self._layouts[number]
        if not self._layouts and _find_stage_norms() is self:
            clip_grad._get_total_norm = utils.get_total_norm = get_total_norm

    def measure(
        self,
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the norm of tensors; for a pipeline's gradients, the norm over all of its stages.

        A single tensor (not in a list) and other modules' gradients get torch's norm. Otherwise,
        this is collective, and raises BadInputError on all ranks if a rank passes only some of its
        gradients, because ranks cannot know what others have selected. A rank without gradients
        passes an empty list.
        """
        alone = _is_one_tensor(tensors)
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        known = {number: layout() for number, layout in self._layouts.items()}
        live = {number: layout for number, layout in known.items() if layout is not None}
        if alone or not _belong_to_pipeline(given, live.values()):
            return get_total_norm(given, norm_type, *args, **kwargs)
        self._place.wait_for_all(
            "computes a norm of gradients"
            if given
            else "computes a norm of an empty list (on a "
            "rank without gradients it stands for those of the pipeline)"
        )
        order = float(norm_type)
        total = _combine_norms(gather_objects(_measure_passed(given, live, order)), order)
        like = given[0] if given else total
        return get_total_norm(total.to(like.device, like.dtype), norm_type, *args, **kwargs)


def _is_one_tensor(tensors: Tensor | Iterable[Tensor]) -> bool:
    """Return whether a loop has passed one tensor, not a list, here or to `clip_grad_norm_`.

    `clip_grad_norm_` wraps a tensor in a list, so the arguments in torch's calling frames are
    inspected.
    """
    if isinstance(tensors, Tensor):
        return True
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals is vars(clip_grad):
        named = frame.f_locals.get("kwargs", {}).get("parameters")
        if isinstance(next(iter(frame.f_locals.get("args", ())), named), Tensor):
            return True
        frame = frame.f_back
    return False


def _belong_to_pipeline(gradients: Sequence[Tensor], layouts: Iterable[SpreadLayout]) -> bool:
    """Return whether any of the gradients belongs to a pipeline.

    An empty list belongs to a pipeline that has no gradients on this rank.
    """
    ids = {id(tensor) for tensor in gradients}
    held = [{id(gradient) for gradient in layout.local_gradients()} for layout in layouts]
    return any(ids & some if ids else not some for some in held)


def _measure_passed(
    gradients: Sequence[Tensor], layouts: Mapping[int, SpreadLayout], order: float
) -> _PassedNorms:
    ids = {id(tensor) for tensor in gradients}
    norms: dict[int, float] = {}
    left_out: dict[int, list[str]] = {}
    for number, layout in layouts.items():
        held = {n: id(p.grad) for n, p in layout.named_parameters() if p.grad is not None}
        left_out[number] = [name for name, one in held.items() if one not in ids]
        if ids.intersection(held.values()):
            counted = [one for one in layout.counted_gradients() if id(one) in ids]
            norms[number] = float(get_total_norm(counted, order))
            ids.difference_update(held.values())
    rest = [tensor for tensor in gradients if id(tensor) in ids]
    return _PassedNorms(
        order, norms, left_out, float(get_total_norm(rest, order)) if rest else None
    )


def _combine_norms(by_rank: Sequence[_PassedNorms], order: float) -> Tensor:
    """Return the norm of the gradients of all ranks together, in float64.

    Raises BadInputError, on all ranks, if the gradients do not cover whole pipelines.
    """
    if any(one.order != order for one in by_rank) or order <= 0:
        seen = ", ".join(f"{one:g}" for one in sorted({one.order for one in by_rank}))
        raise BadInputError(
            f"a norm of order {seen} cannot be computed over the stages of a pipeline. Use one "
            "positive order on all ranks, such as 2 or math.inf."
        )
    meant = {number for one in by_rank for number in one.norms}
    for rank, one in enumerate(by_rank):
        lost = [name for number in sorted(meant) for name in one.left_out.get(number, ())]
        if lost:
            raise BadInputError(
                f"a norm of some gradients of a pipeline is computed, without those of "
                f"{first_names(lost)} on rank {rank}. Each rank has other parameters, so ranks "
                "cannot know whether the same selection is meant. Use clip_grad_norm of what "
                "parallelize returned, or torch.nn.utils.clip_grad_norm_ over all of its "
                "named_parameters(). To clip each parameter by its own norm, pass clip_grad_norm_ "
                "one parameter at a time."
            )
    norms = _to_float64([one for rank in by_rank for one in rank.norms.values()] or [0.0])
    others = _to_float64([one.other for one in by_rank if one.other is not None])
    if len(others):
        lowest, highest = others.aminmax()
        if highest - lowest > _SAME * highest:
            raise BadInputError(
                "a norm of a pipeline's gradients together with other gradients is computed, but "
                f"the other gradients differ by rank (norms from {lowest:.6g} to {highest:.6g}). "
                "Clip them separately."
            )
        norms = torch.cat((norms, highest[None]))
    joined: Tensor = torch.linalg.vector_norm(norms, order)
    return joined


def _to_float64(norms: Sequence[float]) -> Tensor:
    return torch.tensor(norms, dtype=torch.float64)
