"""Comparison of values that must agree between ranks in a user's loop, such as samples and weights.

If a loop clips gradients only on rank 0, or scales weights by a number that each rank computes, the
replicas silently diverge. A comparison reads all weights and gradients of each rank, so it happens
only in the 1st, 2nd, 3rd, 5th, 9th, … call of forward_backward, and after the first 1,024 calls at
least every 1,024 calls. Nothing is sent in other calls.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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
_REPLACED = -1  # number of writes to a gradient that another tensor has replaced

_CAUSE = (
    "Your loop changes it on some ranks only (clipping, decay or noise on rank 0 alone), or by "
    "numbers that each rank computes or draws by itself. Make the same change on all ranks, and "
    "clip with clip_grad_norm of what parallelize returned."
)
Prints = Mapping[tuple[Any, ...], float | None]  # by name, stage, and the shard's position
_OFF = (
    'If ranks run on different hardware, whose rounding differs, use parallelize(…, check="off").'
)


@dataclass(frozen=True)
class RankRecord:
    """A record of a rank's loop between two calls of forward_backward, for the other ranks.

    `share` is this rank's data-parallel rank. `given` has fingerprints of the first batch that was
    given to `share`, and `samples` those of the batch of this call. `steps` counts optimizer steps.
    `gradients` and `early_weights` have fingerprints from before the first step, `weights` from
    this call. Shards differ by rank, so for shards `gradient_writes` and `weight_writes` count
    writes instead. These counts miss writes through `.data`, so `changes` also has the numbers of
    gradient shards and weight shards, out of `shards`, that the loop has changed. `settings` has
    the numeric settings of optimizers' groups, such as the learning rate.
    """

    share: int | None
    given: Sequence[int | None] = ()
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
        self._warned = False
        self._reset()

    def _reset(self) -> None:
        self._given: Sequence[int | None] | None = None
        self._steps = 0
        self._settings: dict[tuple[Any, ...], float | None] = {}
        self._gradients: Prints = {}
        self._early_weights: Prints = {}
        self._gradient_writes: dict[tuple[Any, ...], int | None] = {}
        # for each shard: its gradient's ID, the gradient's version, and the shard's version
        self._versions: dict[str, tuple[int, int, int]] = {}
        self._shards: tuple[list[int | None], list[int | None]] = [], []  # gradients, weights
        self._changed_gradients = 0

    @property
    def _is_due(self) -> bool:
        """Return whether the next call compares ranks."""
        done = self._calls
        return done & (done - 1) == 0 or done % _AT_LEAST_EVERY == 0

    def note_given(self, batch: Batch) -> None:
        """Record a global batch that was given to `share`."""
        if self._is_due and self._given is None and self._plan.data_parallel > 1:
            self._given = _prints_of_batch(batch)

    def begin_call(self, batch: Batch) -> None:
        """Compare with other ranks if a comparison is due. Collective.

        `batch` is this rank's share. Raises BadInputError on all ranks if they differ.
        """
        if self._is_due:
            self._compare(batch)
        self._calls += 1
        self._reset()

    def end_call(self) -> None:
        """Prepare for the next call: if it compares, record fingerprints and versions of shards.

        A tensor's version counts the writes to the tensor.
        """
        self._layout.watch_communication(self._is_due)
        if self._is_due:
            self._shards = self._prints_of_shards(True), self._prints_of_shards(False)
            for name, parameter in self._layout.named_parameters():
                if is_spread(parameter):
                    gradient = parameter.grad
                    versions = _version(gradient), _version(parameter)
                    self._versions[name] = (id(gradient), *versions)

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
        self._gradients = self._prints(lambda parameter: parameter.grad)
        for name, parameter in self._layout.named_parameters():
            if name in self._versions:
                held, version, _weights = self._versions[name]
                is_same = id(parameter.grad) == held
                written = _version(parameter.grad) - version if is_same else _REPLACED
                self._gradient_writes[name, self._stage] = written
        self._changed_gradients = _count_changes(self._shards[0], self._prints_of_shards(True))
        if self._plan.strategy == "zero1":  # its step replaces other ranks' weights
            self._early_weights = self._prints(lambda parameter: parameter)

    def after_step(self, *_: Any) -> None:
        """Record fingerprints of weight shards after an optimizer's step."""
        if self._is_due and self._calls:
            self._layout.end_optimizer_step()
            self._shards = self._shards[0], self._prints_of_shards(False)

    def _compare(self, batch: Batch) -> None:
        same = self._plan.world_size > self._plan.data_parallel
        record = RankRecord(
            self._share,
            self._given or (),
            _prints_of_batch(batch) if same else (),
            self._steps,
            self._gradients,
            self._early_weights,
            self._prints(lambda parameter: parameter) if self._calls else {},
            self._gradient_writes,
            self._count_weight_writes(),
            (
                self._changed_gradients,
                _count_changes(self._shards[1], self._prints_of_shards(False)),
            ),
            len(self._shards[1]),
            self._settings,
        )
        told = gather_objects(record)
        wrong = _find_difference(told, self._plan)
        if wrong is not None:
            error = BadInputError(wrong)
            error.on_all_ranks = True
            raise error
        if not self._warned and _all_differ([one.given for one in told]):
            self._warned = True
            if torch.distributed.get_rank() == 0:
                warn_user(_GIVEN)

    def _count_weight_writes(self) -> Prints:
        named = dict(self._layout.named_parameters())
        return {
            (name, self._stage): _version(named[name]) - version
            for name, (*_, version) in self._versions.items()
            if name in named
        }

    def _prints_of_shards(self, gradients: bool) -> list[int | None]:
        """Return fingerprints of this rank's shards of weights, or of their gradients."""
        held = [p for _, p in self._layout.named_parameters() if is_spread(p)]
        tensors = [p.grad if gradients else p for p in held]
        return [None if one is None else fingerprint(local(one)) for one in tensors]

    def _prints(self, of: Callable[[nn.Parameter], Tensor | None]) -> Prints:
        """Return fingerprints of the tensors that `of` returns, if other ranks have them too."""
        prints: dict[tuple[Any, ...], int | None] = {}
        for name, parameter in self._layout.named_parameters():
            tensor = of(parameter)
            if tensor is None:
                continue
            place = _place_of_copy(tensor)
            if place is not None:
                prints[name, self._stage, *place] = fingerprint(local(tensor))
        return prints


def _place_of_copy(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the position of this rank's part in a tensor; None if no other rank has that part."""
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


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor._version


def _count_changes(before: Sequence[int | None], now: Sequence[int | None]) -> int:
    """Return how many fingerprints differ; 0 if there are none from before."""
    return sum(one != other for one, other in zip(before, now, strict=True)) if before else 0


def _prints_of_batch(batch: Batch) -> list[int | None]:
    """Return fingerprints of a batch's tensors, arrays and texts."""
    prints: list[int | None] = []
    for leaf in tree_leaves(copy_batch(batch, tensors=False)):
        if isinstance(leaf, Tensor):
            prints.append(fingerprint(leaf))
        elif isinstance(leaf, np.ndarray):
            prints.append(None if leaf.dtype.hasobject else zlib.crc32(leaf.tobytes()))
        elif isinstance(leaf, str):
            prints.append(zlib.crc32(leaf.encode()))
    return prints


def _all_differ(given: Sequence[Sequence[int | None]]) -> bool:
    """Return whether every value in the batches given to `share` differs between ranks."""
    lengths = {len(one) for one in given}
    if len(lengths) != 1 or 0 in lengths:
        return False
    each = zip(*given, strict=True)
    return all(None not in values and len(set(values)) > 1 for values in each)


def _find_difference(told: Sequence[RankRecord], plan: Plan) -> str | None:
    """Return a message about the first difference between ranks; None if there is none.

    `told` has one record per rank, in the order of ranks.
    """
    return _find_other_samples(told, plan) or _find_other_steps(told) or _find_other_values(told)


def _find_other_samples(told: Sequence[RankRecord], plan: Plan) -> str | None:
    for rank, one in enumerate(told):
        first = next(number for number, other in enumerate(told) if other.share == one.share)
        if len(told[first].samples) == len(one.samples) and told[first].samples != one.samples:
            return (
                f"ranks {first} and {rank} have been given different samples, but under strategy "
                f"{plan.strategy} they compute the same ones. Give forward_backward the same batch "
                "on both (a sampler's rank is plan.data_rank(rank)), with the same random "
                "augmentation."
            )
    return None


def _find_other_steps(told: Sequence[RankRecord]) -> str | None:
    steps = [one.steps for one in told]
    if len(set(steps)) == 1:
        apart = _names_apart([one.settings for one in told])
        if not apart:
            return None
        return (
            f"the optimizer's {first_names(apart)} differs between ranks when it steps. Your loop "
            "computes it from numbers of each rank, such as the loss of its own samples. Use the "
            "result of forward_backward or evaluate, which is the same on all ranks."
        )
    rank = next(number for number, count in enumerate(steps) if count != steps[0])
    return (
        f"since the last forward_backward, rank 0 has called an optimizer's step {steps[0]} times, "
        f"but rank {rank} {steps[rank]} times. Call it on all ranks, or on none."
    )


def _find_other_values(told: Sequence[RankRecord]) -> str | None:
    looks: tuple[tuple[str, str, list[Prints]], ...] = (
        ("gradient", "when the optimizer steps", [one.gradients for one in told]),
        ("value", "between steps", [one.early_weights for one in told]),
        ("value", "between steps", [one.weights for one in told]),
    )
    for what, when, prints in looks:
        found = _names_apart(prints)
        if found:
            return (
                f"the {what} of {first_names(found)} differs between ranks that should have the "
                f"same one {when}. {_CAUSE} {_OFF}"
            )
    for number, what in enumerate(("gradient", "value")):
        found = _names_apart(
            [(one.weight_writes if number else one.gradient_writes) for one in told]
        )
        changes = [(one.changes[number], one.shards) for one in told]
        if min(changes)[0] == 0 and any(2 * count > shards for count, shards in changes):
            found = found or ["most parameters"]
        if found:
            return (
                f"the {what} of {first_names(found)} changed more often on some ranks than on "
                f"others between steps. {_CAUSE}"
            )
    return None


def _names_apart(prints: Iterable[Prints]) -> list[str]:
    """Return the names whose fingerprints differ between the ranks that have them."""
    known: dict[tuple[Any, ...], float | None] = {}
    apart = {
        key[0]
        for some in prints
        for key, value in some.items()
        if known.setdefault(key, value) != value
    }
    return sorted(apart)


_GIVEN = (
    "the batches that ranks gave to share differ in all of their values, but share takes each "
    "rank's part of one global batch, which all ranks have read alike. If each rank has read its "
    "own samples (DistributedSampler), shuffles in its own order, or has called share before, some "
    "samples are lost: pass a rank's own samples to forward_backward as they are, and seed the "
    "order alike on all ranks. If the samples are the same and only their random augmentation "
    "differs, ignore this warning"
)
