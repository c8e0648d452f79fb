"""Search for the cheapest changes that make a plan fit into a memory limit."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from outpace.planner.fit.cost import Cost, Predict
from outpace.records.errors import BadInputError
from outpace.records.memory import Kind
from outpace.records.plan import Plan
from outpace.records.strategies import strategies_that

# Values of TrainSettings by name, as a user would set them.
Change = Mapping[str, Any]
# Changes that trade memory for time or rounding, by kind.
_CHECKPOINTING: tuple[Change, ...] = (
    {"checkpointing": "selective"},
    {"checkpointing": "attention"},
    {"checkpointing": "full", "checkpoint_every": 2},
    {"checkpointing": "full"},
)
_OPTIMIZERS = ("adamw-bf16", "adamw-8bit", "adafactor", "adamw-4bit")
_REPLICAS = ("dp", "ddp", "ring", "horovod", "zero1", "zero2")
_SHARDS = strategies_that(lambda traits: traits.zero > 0 and traits.axes == ("dp_shard",))
# The kinds of memory that a setting affects; unlisted settings affect all kinds.
_OF_STEP: tuple[Kind, ...] = ("activations", "temporary", "inputs", "weight copies")
_MAKES_SMALLER: Mapping[str, tuple[Kind, ...]] = {
    "micro_batch": _OF_STEP,
    "checkpointing": _OF_STEP,
    "loss": _OF_STEP,
    "optimizer": ("optimizer state", "temporary"),
    "offload_optimizer": ("optimizer state", "temporary"),
}
_ERROR = 1.15  # factor on predicted savings, for the error of predictions
# Maximum number of pairs to try, the most promising first.
_PAIRS = 8


@dataclass(frozen=True)
class Proposal:
    """Settings to change, with the predicted memory and time.

    A `slowdown` of 0.1 means 10 % more time. `exact`: apart from rounding, training computes the
    same numbers.
    """

    settings: Change
    peak_memory_bytes: int
    slowdown: float | None
    exact: bool


@dataclass(frozen=True)
class _TriedChange:
    settings: Change
    cost: Cost


def kinds_of_change(plan: Plan, *, low_precision: bool, separate_host: bool) -> list[list[Change]]:
    """Return possible changes by kind, each ordered from the smallest change to the largest.

    `low_precision`: the device supports bf16. `separate_host`: device and host have separate
    memory.
    """
    halves = [n for n in range(plan.micro_batch - 1, 0, -1) if plan.micro_batch % n == 0]
    if plan.optimizer_in_backward:  # needs one micro-batch per step
        halves = []
    # A pipeline keeps its number of micro-batches, and accumulates over more passes.
    parts = plan.pp_microbatches
    under_way = {"pp_microbatches": parts} if parts > 1 else {}
    # The user has chosen which blocks recompute.
    chosen = plan.checkpoint_layers or plan.checkpoint_every > 1
    kinds: list[Iterable[Change]] = [
        ({"micro_batch": n, **under_way} for n in halves),
        [] if chosen else _CHECKPOINTING,
        [{"loss": "chunked"}] if plan.loss != "chunked" else [],
        ({"optimizer": name} for name in _OPTIMIZERS if name != plan.optimizer),
        (
            {"offload_optimizer": place}
            for place in (("cpu", "disk") if separate_host else ("disk",))
        ),
        [{"precision": "bf16"}] if low_precision and plan.precision == "fp32" else [],
    ]
    if plan.strategy in _REPLICAS and plan.world_size > 1:
        later = _SHARDS[_SHARDS.index(plan.strategy) + 1 :] if plan.strategy in _SHARDS else _SHARDS
        kinds.append({"strategy": name} for name in later)
    return [list(kind) for kind in kinds]


def change_plan(plan: Plan, change: Change) -> Plan:
    """Return the plan with changed settings.

    Raises BadInputError if the changed plan is impossible.
    """
    values = {**plan.model_dump(), **change}
    if "checkpointing" in change:
        values["checkpoint_layers"] = ()
        values["checkpoint_every"] = change.get("checkpoint_every", 1)
    if change.get("strategy") in _SHARDS:
        values.update(dp_replicate=1, dp_shard=plan.data_parallel)
    return Plan.parse(values, "proposal")


def propose(
    plan: Plan,
    limit_bytes: int,
    predict: Predict,
    kinds: Iterable[Sequence[Change]],
    count: int = 3,
    enough: Callable[[], bool] = lambda: False,
) -> list[Proposal]:
    """Return up to `count` of the fastest changes with which a plan fits into `limit_bytes`.

    The first changes are one of each kind. If these are too few, further changes of the same kinds
    follow, then combinations of two kinds. `predict` is called about log2(n) times for a kind with
    n changes, and for a few pairs. The search stops when `enough` returns true.
    """
    now = predict(plan)
    base = _TriedChange({}, now)
    need = now.peak_memory_bytes - limit_bytes

    def attempt(change: Change) -> _TriedChange | None:
        try:
            other = change_plan(plan, change)
            if enough() or other == plan:
                return None
            return _TriedChange(change, predict(other))
        except BadInputError:
            return None

    fitting: list[_TriedChange] = []
    helping: list[_TriedChange] = []
    further: list[Change] = []
    for kind in kinds:
        if kind and most_saved(kind[-1], now) >= need:
            fits, most = _smallest_fitting_change(kind, attempt, limit_bytes)
        else:
            fits, most = None, next(filter(None, map(attempt, reversed(kind))), None)
        if fits is not None:
            fitting.append(fits)
            further += kind[kind.index(fits.settings) + 1 :][:1]
        elif most is not None and most.cost.peak_memory_bytes < now.peak_memory_bytes:
            helping.append(most)
    for change in further[: max(0, count - len(fitting))]:
        tried = attempt(change)
        fitting += [tried] if tried and tried.cost.peak_memory_bytes <= limit_bytes else []
    if len(fitting) < count:
        fitting += _combine_changes(base, helping, limit_bytes, attempt, count - len(fitting))
    fitting.sort(key=_time_sort_key)
    return [_make_proposal(tried, base) for tried in fitting[:count]]


def _smallest_fitting_change(
    kind: Sequence[Change], attempt: Callable[[Change], _TriedChange | None], limit_bytes: int
) -> tuple[_TriedChange | None, _TriedChange | None]:
    """Bisect for the smallest change of a kind with which the plan fits into `limit_bytes`.

    Returns that change and the largest change tried that does not fit, None for either if absent.
    """
    low, high = 0, len(kind)
    fits = most = None
    while low < high:
        middle = (low + high) // 2
        tried = attempt(kind[middle])
        if tried is not None and tried.cost.peak_memory_bytes <= limit_bytes:
            fits, high = tried, middle
        else:
            most, low = tried or most, middle + 1
    return fits, most


def most_saved(change: Change, now: Cost) -> float:
    """Return an upper bound on the bytes of peak memory that a change of settings can save."""
    if not now.by_kind:
        return now.peak_memory_bytes
    names = {name for name in change if name in _MAKES_SMALLER}
    kinds = {kind for name in names for kind in _MAKES_SMALLER[name]}
    if not names:
        return now.peak_memory_bytes
    return _ERROR * sum(now.by_kind.get(kind, 0) for kind in kinds)


def _combine_changes(
    base: _TriedChange,
    helping: list[_TriedChange],
    limit_bytes: int,
    attempt: Callable[[Change], _TriedChange | None],
    count: int,
) -> list[_TriedChange]:
    """Combine two changes of different kinds, neither of which suffices alone."""

    def seconds_of_both(pair: tuple[_TriedChange, _TriedChange]) -> float:
        one, other = pair
        return _time_sort_key(one) + _time_sort_key(other)

    def saves_enough(pair: tuple[_TriedChange, _TriedChange]) -> bool:
        peaks = [tried.cost.peak_memory_bytes for tried in pair]
        return sum(peaks) - base.cost.peak_memory_bytes <= limit_bytes

    pairs = sorted(combinations(helping, 2), key=seconds_of_both)
    pairs.sort(key=saves_enough, reverse=True)  # assumes that savings add up
    found: list[_TriedChange] = []
    for one, other in pairs[:_PAIRS]:
        tried = attempt({**one.settings, **other.settings})
        if tried is not None and tried.cost.peak_memory_bytes <= limit_bytes:
            found.append(tried)
        if len(found) == count:
            break
    return found


def _time_sort_key(tried: _TriedChange) -> float:
    return math.inf if tried.cost.step_s is None else tried.cost.step_s


def _make_proposal(tried: _TriedChange, base: _TriedChange) -> Proposal:
    took_s, base_s = tried.cost.step_s, base.cost.step_s
    return Proposal(
        tried.settings,
        tried.cost.peak_memory_bytes,
        None if took_s is None or base_s is None else took_s / base_s - 1,
        exact=not {"optimizer", "precision"} & set(tried.settings),
    )
