"""Comparison of values that must agree between ranks in a user's loop, such as samples and weights.

If a loop clips gradients only on rank 0, or scales weights by a number that each rank computes, the
replicas silently diverge. A comparison reads all weights and gradients of each rank, so it happens
only in the 1st, 2nd, 3rd, 5th, 9th, … call of forward_backward, and after the first 1,024 calls at
least every 1,024 calls. Nothing is sent in other calls.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from outpace.nn.dtensor import is_spread, local
from outpace.nn.fingerprint import fingerprint
from outpace.nn.user_warning import warn_user
from outpace.parallel.batches import copy_batch
from outpace.parallel.layout import Batch, Layout
from outpace.parallel.rank_objects import gather_objects
from outpace.records.errors import BadInputError, first_names
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks

_AT_LEAST_EVERY = 1_024  # calls
_MOST_GIVEN = 4  # batches given to `share` before a call, such as a part and its copy
_REPLACED = -1  # number of writes to a gradient that another tensor has replaced
_ENOUGH_SHARDS = 5  # on a rank; a clamp may leave all of fewer shards as they are
_ROUNDING = 1e-5  # relative difference of weights that other kernels may cause
_SAMPLE = 1 << 10  # values of a tensor that ranks compare

_CAUSE = (
    "Your loop changes it on some ranks only (clipping, decay or noise on rank 0 alone), or by "
    "numbers that each rank computes or draws by itself. Make the same change on all ranks, and "
    "clip with clip_grad_norm of what parallelize returned."
)
Prints = Mapping[tuple[Any, ...], float | None]  # by name, stage, and the shard's position
_OFF = (
    "If you intend this, or if ranks round differently (other hardware, or other kernels that "
    'max-autotune has chosen), use parallelize(…, check="off").'
)


@dataclass(frozen=True)
class RankRecord:
    """A record of a rank's training loop between two calls of forward_backward.

    Ranks compare these records with each other.

    - `share`: this rank's data-parallel rank.
    - `given`: fingerprints of each global batch that the loop passed to `ParallelModule.share`.
    - `samples`: fingerprints of the batch of this call.
    - `steps`: the number of optimizer steps.
    - `gradients`, `early_weights`: fingerprints from before the first optimizer step.
    - `weights`: fingerprints from this call.
    - `gradient_writes`, `weight_writes`: numbers of writes. Shards differ by rank, so their writes
      are compared instead of their fingerprints.
    - `changes`: the numbers of gradient shards and of weight shards that the loop has changed.
      Writes through `.data` are not counted as writes, but appear here.
    - `shards`: the number of this rank's shards that are trained and not empty.
    - `settings`: numeric settings of optimizers' groups, such as the learning rate.
    """

    share: int | None
    given: Sequence[Sequence[int | None]] = ()
    samples: Sequence[int | None] = ()
    steps: int = 0
    gradients: Prints = field(default_factory=dict)
    early_weights: Prints = field(default_factory=dict)
    weights: Prints = field(default_factory=dict)
    gradient_writes: Prints = field(default_factory=dict)
    weight_writes: Prints = field(default_factory=dict)
    changes: tuple[int, int] = (0, 0)
    shards: int = 0
    settings: Prints = field(default_factory=dict)


class RankAgreement:
    """A record of this rank's loop, compared with those of other ranks from time to time."""

    def __init__(self, layout: Layout, plan: Plan, ranks: Ranks) -> None:
        self._layout, self._plan = layout, plan
        self._share = plan.data_rank(ranks.rank)
        self._stage = ranks.rank // (ranks.world_size // plan.pp)
        self._calls = 0
        self._warned = self._warned_of_rounding = False
        self._tp_rank = ranks.rank % plan.tp
        # fingerprints of frozen weights, and the version of each weight that has been read
        self._frozen: dict[str, tuple[TensorWeakRef, int, int | None]] = {}
        self._start_record()

    def _start_record(self) -> None:
        self._given: list[Sequence[int | None]] = []
        self._steps = 0
        self._settings: dict[tuple[Any, ...], float | None] = {}
        self._gradients: Prints = {}
        self._early_weights: Prints = {}
        self._gradient_writes: dict[tuple[Any, ...], int | None] = {}
        # for each shard: its gradient, the gradient's version, and the shard's version
        self._versions: dict[str, tuple[TensorWeakRef | None, int, int]] = {}
        self._shards: tuple[Mapping[str, int | None], ...] = {}, {}  # gradients, weights
        self._changed_gradients = 0

    @property
    def _is_due(self) -> bool:
        done = self._calls
        return done & (done - 1) == 0 or done % _AT_LEAST_EVERY == 0

    def note_given(self, batch: Batch) -> None:
        """Record a global batch that the loop passed to `ParallelModule.share`."""
        if self._is_due and len(self._given) < _MOST_GIVEN and self._plan.data_parallel > 1:
            self._given.append(_fingerprint_batch(batch))

    def begin_call(self, batch: Batch) -> None:
        """Compare with other ranks if a comparison is due. Collective.

        `batch` is this rank's share. Raises BadInputError on all ranks if they differ.
        """
        if self._is_due:
            self._compare_ranks(batch)
        self._calls += 1
        self._start_record()

    def end_call(self) -> None:
        """Prepare for the next call: if it compares, record fingerprints and versions of shards.

        A tensor's version counts the writes to the tensor.
        """
        self._layout.watch_communication(self._is_due)
        if self._is_due:
            self._shards = self._fingerprint_shards(True), self._fingerprint_shards(False)
            for name, parameter in self._layout.named_parameters():
                if is_spread(parameter):
                    gradient = parameter.grad
                    versions = _write_count(gradient), _write_count(parameter)
                    held = None if gradient is None else TensorWeakRef(gradient)
                    self._versions[name] = (held, *versions)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record an optimizer's settings, and before the first step the gradients."""
        if not self._is_due or not self._calls:
            return
        self._layout.begin_optimizer_step()
        self._steps += 1
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, int | float):
                    self._settings[name, self._stage, self._steps, number] = value
        if self._steps > 1:
            return
        self._gradients = self._fingerprint_gradients()
        for name, parameter in self._layout.named_parameters():
            if name in self._versions:
                held, version, _weights = self._versions[name]
                is_same = parameter.grad is (None if held is None else held())
                written = _write_count(parameter.grad) - version if is_same else _REPLACED
                self._gradient_writes[name, self._stage] = written
        self._changed_gradients = _count_changed_prints(
            self._shards[0], self._fingerprint_shards(True)
        )
        if self._plan.strategy == "zero1":  # its step replaces other ranks' weights
            self._early_weights = self._fingerprint_weights()

    def after_step(self, *_: Any) -> None:
        """Record fingerprints of weight shards after an optimizer's step."""
        if self._is_due and self._calls:
            self._layout.end_optimizer_step()
            self._shards = self._shards[0], self._fingerprint_shards(False)

    def _compare_ranks(self, batch: Batch) -> None:
        same = self._plan.world_size > self._plan.data_parallel
        record = RankRecord(
            self._share,
            self._given,
            _fingerprint_batch(batch) if same else (),
            self._steps,
            self._gradients,
            self._early_weights,
            self._fingerprint_weights() if self._calls else {},
            self._gradient_writes,
            self._count_weight_writes(),
            (
                self._changed_gradients,
                _count_changed_prints(self._shards[1], self._fingerprint_shards(False)),
            ),
            len(self._shards[1]),
            self._settings,
        )
        told = gather_objects(record)
        apart = _names_that_differ([one.weights for one in told])
        if apart and self._differ_only_by_rounding(apart):
            told = [replace(one, weights={}) for one in told]
            if not self._warned_of_rounding and torch.distributed.get_rank() == 0:
                warn_user(f"the value of {first_names(apart)} {_ROUNDED}")
            self._warned_of_rounding = True
        wrong = _find_difference(told, self._plan)
        if wrong is not None:
            error = BadInputError(wrong)
            error.on_all_ranks = True
            raise error
        each_batch = zip(*(one.given for one in told), strict=False)
        if not self._warned and any(map(_all_values_differ, each_batch)):
            self._warned = True
            if torch.distributed.get_rank() == 0:
                warn_user(_GIVEN)

    def _count_weight_writes(self) -> Prints:
        named = dict(self._layout.named_parameters())
        return {
            (name, self._stage): _write_count(named[name]) - version
            for name, (*_, version) in self._versions.items()
            if name in named
        }

    def _fingerprint_shards(self, of_gradients: bool) -> dict[str, int | None]:
        prints: dict[str, int | None] = {}
        for name, parameter in self._layout.named_parameters():
            if is_spread(parameter) and parameter.requires_grad and local(parameter).numel():
                held = parameter.grad if of_gradients else parameter
                prints[name] = None if held is None else fingerprint(local(held))
        return prints

    def _fingerprint_gradients(self) -> Prints:
        """Return fingerprints of the gradients that other ranks have too.

        Tensor-parallel ranks compute gradients of whole parameters themselves, and atomic additions
        round differently each time, so only ranks with the same shards are compared.
        """
        return {
            (name, self._stage, self._tp_rank, *place): fingerprint(local(parameter.grad))
            for name, parameter in self._layout.named_parameters()
            if parameter.grad is not None and (place := _shard_position(parameter.grad)) is not None
        }

    def _fingerprint_weights(self) -> Prints:
        return {
            (name, self._stage, *place): self._fingerprint_weight(name, parameter)
            for name, parameter in self._layout.named_parameters()
            if (place := _shard_position(parameter)) is not None
        }

    def _fingerprint_weight(self, name: str, weight: nn.Parameter) -> int | None:
        """Return a weight's fingerprint; if it is frozen, compute it again only after a write."""
        if weight.requires_grad:
            self._frozen.pop(name, None)
            return fingerprint(local(weight))
        held, version, found = self._frozen.get(name, (None, 0, None))
        if held is None or held() is not weight or version != weight._version:
            found = fingerprint(local(weight))
            self._frozen[name] = TensorWeakRef(weight), weight._version, found
        return found

    def _differ_only_by_rounding(self, names: Sequence[str]) -> bool:
        """Return whether ranks' copies of these weights are equal up to rounding. Collective."""
        samples = {
            (name, self._stage, *place): _sample_values(local(parameter))
            for name, parameter in self._layout.named_parameters()
            if name in names and (place := _shard_position(parameter)) is not None
        }
        known: dict[tuple[Any, ...], Sample] = {}
        return all(
            _are_equal_up_to_rounding(known.setdefault(place, one), one)
            for held in gather_objects(samples)
            for place, one in held.items()
        )


def _shard_position(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the position of this rank's shard in a tensor; None if no other rank has a copy."""
    if not is_spread(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    copies = [size for size, one in zip(mesh.shape, placements, strict=True) if one.is_replicate()]
    if max(copies, default=1) == 1 or any(one.is_partial() for one in placements):
        return None
    where = mesh.get_coordinate() or ()
    return tuple(
        place for place, one in zip(where, placements, strict=True) if not one.is_replicate()
    )


def _write_count(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor._version


def _count_changed_prints(before: Mapping[str, int | None], now: Mapping[str, int | None]) -> int:
    return sum(before[name] != now[name] for name in before.keys() & now.keys())


Sample = tuple[Tensor, float, float]  # some values, and the sum and the absolute sum of all


@torch.no_grad()
def _sample_values(tensor: Tensor) -> Sample:
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    if not values.is_floating_point() or values.itemsize == 1:
        values = values.float()
    some = values[:: max(1, len(values) // _SAMPLE)].double().cpu()
    size = torch.linalg.vector_norm(values, 1, dtype=torch.float64)
    return some, float(values.sum(dtype=torch.float64)), float(size)


def _are_equal_up_to_rounding(left: Sample, right: Sample) -> bool:
    (some, total, size), (other, other_total, _) = left, right
    return (
        some.shape == other.shape
        and bool((some - other).norm() <= _ROUNDING * some.norm())
        and abs(total - other_total) <= _ROUNDING * size
    )


def _fingerprint_batch(batch: Batch) -> list[int | None]:
    prints: list[int | None] = []
    for leaf in tree_leaves(copy_batch(batch, tensors=False)):
        if isinstance(leaf, Tensor):
            prints.append(fingerprint(leaf))
        elif isinstance(leaf, np.ndarray):
            prints.append(None if leaf.dtype.hasobject else zlib.crc32(leaf.tobytes()))
        elif isinstance(leaf, str):
            prints.append(zlib.crc32(leaf.encode()))
    return prints


def _all_values_differ(batches: Sequence[Sequence[int | None]]) -> bool:
    lengths = {len(one) for one in batches}
    if len(lengths) != 1 or 0 in lengths:
        return False
    each = zip(*batches, strict=True)
    return all(None not in values and len(set(values)) > 1 for values in each)


def _find_difference(records: Sequence[RankRecord], plan: Plan) -> str | None:
    """Return a message about the first difference between ranks; None if there is none.

    `records` are in the order of ranks.
    """
    return (
        _find_different_samples(records, plan)
        or _find_different_steps(records, plan)
        or _find_different_values(records, plan)
    )


def _group_by_stage(records: Sequence[RankRecord], plan: Plan) -> list[dict[int, RankRecord]]:
    size = len(records) // plan.pp
    return [dict(enumerate(records[n : n + size], n)) for n in range(0, len(records), size)]


def _find_different_samples(records: Sequence[RankRecord], plan: Plan) -> str | None:
    for rank, one in enumerate(records):
        first = next(number for number, other in enumerate(records) if other.share == one.share)
        if (
            len(records[first].samples) == len(one.samples)
            and records[first].samples != one.samples
        ):
            return (
                f"ranks {first} and {rank} have been given different samples, but under strategy "
                f"{plan.strategy} they compute the same ones. Give forward_backward the same batch "
                "on both (a sampler's rank is plan.data_rank(rank)), with the same random "
                "augmentation."
            )
    return None


def _find_different_steps(records: Sequence[RankRecord], plan: Plan) -> str | None:
    for ranks in _group_by_stage(
        records, plan
    ):  # a stage without matrices has no optimizer for them
        first = min(ranks)
        for rank, one in ranks.items():
            if one.steps != ranks[first].steps:
                return (
                    f"since the last forward_backward, rank {first} has called an optimizer's step "
                    f"{_format_times(ranks[first].steps)}, but rank {rank} "
                    f"{_format_times(one.steps)}. Call it on all ranks, or on none."
                )
    apart = _names_that_differ([one.settings for one in records])
    if not apart:
        return None
    return (
        f"the optimizer's {first_names(apart)} differs between ranks when it steps. Your loop "
        "computes it from numbers of each rank, such as the loss of its own samples. Use the "
        f"result of forward_backward or evaluate, which is the same on all ranks. {_OFF}"
    )


def _format_times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _find_different_values(records: Sequence[RankRecord], plan: Plan) -> str | None:
    looks: tuple[tuple[str, str, list[Prints]], ...] = (
        ("gradient", "when the optimizer steps", [one.gradients for one in records]),
        ("value", "between steps", [one.early_weights for one in records]),
        ("value", "between steps", [one.weights for one in records]),
    )
    for what, when, prints in looks:
        found = _names_that_differ(prints)
        if found:
            return (
                f"the {what} of {first_names(found)} differs between ranks that should have the "
                f"same one {when}. {_CAUSE} {_OFF}"
            )
    for number, what in enumerate(("gradient", "value")):
        found = _names_that_differ(
            [(one.weight_writes if number else one.gradient_writes) for one in records]
        )
        if found:
            return (
                f"the {what} of {first_names(found)} changed more often on some ranks than on "
                f"others between steps. {_CAUSE} {_OFF}"
            )
        for ranks in _group_by_stage(records, plan):
            counts = {
                rank: (one.changes[number], one.shards)
                for rank, one in ranks.items()
                if one.shards >= _ENOUGH_SHARDS
            }
            most = [rank for rank, (count, shards) in counts.items() if 2 * count > shards]
            none = [rank for rank, (count, _) in counts.items() if not count]
            if most and none:
                return (
                    f"between steps, the {what} of most shards changed on rank {most[0]}, but none "
                    f"on rank {none[0]}. {_CAUSE} {_OFF}"
                )
    return None


def _names_that_differ(prints: Iterable[Prints]) -> list[str]:
    known: dict[tuple[Any, ...], float | None] = {}
    apart = {
        key[0]
        for some in prints
        for key, value in some.items()
        if _values_differ(known.setdefault(key, value), value)
    }
    return sorted(apart)


def _values_differ(one: float | None, other: float | None) -> bool:
    """Return whether two values differ; NaNs are equal, and None equals every value."""
    if one is None or other is None or (one != one and other != other):
        return False
    return one != other


_ROUNDED = (
    f"differs between ranks that should have the same one, by less than {_ROUNDING:g} of its size. "
    "Training continues. Probably ranks round differently: their hardware differs, or max-autotune "
    "has chosen other kernels on some (compile without it). If your loop changes weights on some "
    "ranks only, make the same change on all ranks"
)


_GIVEN = (
    "the batches that ranks gave to share differ in all of their values, but share takes each "
    "rank's part of one global batch, which all ranks have read alike. If each rank has read its "
    "own samples (DistributedSampler), shuffles in its own order, or has called share before, some "
    "samples are lost: pass a rank's own samples to forward_backward as they are, and seed the "
    "order alike on all ranks. If the samples are the same and only their random augmentation "
    "differs, ignore this warning"
)
