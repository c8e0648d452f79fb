"""Simulation of a pipeline schedule, action by action, with each rank's busy and idle times.

Each rank executes its actions in order. An action starts as soon as its rank is free and its inputs
are available: a forward needs the previous stage's forward, a backward needs the next stage's
backward and its own forward. For equal stages, the result equals the closed forms in the
literature; the simulation also covers unequal stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES, Kind


class Action(NamedTuple):
    """One action of a rank: an operation on a micro-batch in a stage, both numbered from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.microbatch} on stage {self.stage}"


Order = Sequence[Action]


@dataclass(frozen=True)
class StageTime:
    """Seconds per micro-batch on a stage, with separate times for input and weight gradients."""

    forward_s: float
    inputs_s: float
    weights_s: float

    def seconds(self, kind: Kind) -> float:
        """Return the seconds of one kind of action."""
        return {
            "F": self.forward_s,
            "B": self.inputs_s + self.weights_s,
            "I": self.inputs_s,
            "W": self.weights_s,
        }[kind]


class Span(NamedTuple):
    """An action with its start and end in seconds from the beginning of the step."""

    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Actions of each rank with their start and end times."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan_s(self) -> float:
        """Return the seconds from the start of the first action to the end of the last."""
        return max((spans[-1].end_s for spans in self.ranks if spans), default=0.0)

    def busy_s(self, rank: int) -> float:
        """Return the seconds during which a rank is busy."""
        return sum(span.end_s - span.begin_s for span in self.ranks[rank])

    @property
    def idle_share(self) -> float:
        """Return the fraction of time in which ranks are idle, over all ranks."""
        whole = self.makespan_s * len(self.ranks)
        return 1 - sum(map(self.busy_s, range(len(self.ranks)))) / whole if whole else 0.0


@dataclass(frozen=True)
class Wiring:
    """Actions of all ranks in topological order, built once for fast repeated simulation.

    For each action, `taken_by` is its rank, and `after` lists the positions of other ranks' actions
    that it waits for.
    """

    ranks: int
    actions: tuple[Action, ...]
    taken_by: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]

    def run(
        self, seconds: Callable[[Action], float], transfer_s: float
    ) -> tuple[list[float], list[float]]:
        """Return the start and end times of all actions; see `simulate` for the arguments."""
        took = list(map(seconds, self.actions))
        free_s = [0.0] * self.ranks
        begins: list[float] = []
        ends: list[float] = []
        for rank, after, took_s in zip(self.taken_by, self.after, took, strict=True):
            begin_s = free_s[rank]
            for other in after:
                arrival_s = ends[other] + transfer_s
                if arrival_s > begin_s:
                    begin_s = arrival_s
            begins.append(begin_s)
            free_s[rank] = begin_s + took_s
            ends.append(begin_s + took_s)
        return begins, ends

    def makespan_s(self, times: Sequence[StageTime], transfer_s: float = 0.0) -> float:
        """Return the seconds from the first start to the last end; see `simulate_stages`."""
        kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
        cost = {kind: [time.seconds(kind) for time in times] for kind in kinds}
        _, ends = self.run(lambda action: cost[action[0]][action[1]], transfer_s)
        return max(ends, default=0.0)


def wire(orders: Sequence[Order]) -> Wiring:
    """Sort all actions topologically, keeping each rank's order.

    Raises BadInputError if ranks wait for each other.
    """
    return _TopologicalSorter(orders).wiring()


class _TopologicalSorter:
    """Builder of a topological order, which runs each rank until it must wait for another.

    Results that actions can wait for are numbered, so that looking them up in large schedules is
    fast. A forward's result has an even number, and the gradients of its inputs have the next odd
    number.
    """

    def __init__(self, orders: Sequence[Order]) -> None:
        self._todo = orders
        self._last = max((a.stage for order in orders for a in order), default=0)
        self._row = 2 * max((a.microbatch + 1 for order in orders for a in order), default=0)
        self._places = [-1] * (
            self._row * (self._last + 1)
        )  # number of completed results, in the sequence
        self._waiting: dict[int, list[int]] = {}  # ranks by the result that they wait for
        self._done = [0] * len(orders)
        self._actions: list[Action] = []
        self._taken_by: list[int] = []
        self._after: list[tuple[int, ...]] = []

    def wiring(self) -> Wiring:
        """Return all actions in topological order. Raises BadInputError if they deadlock."""
        ready = list(range(len(self._todo)))
        while ready:
            rank = ready.pop()
            todo = self._todo[rank]
            while self._done[rank] < len(todo) and self._run_if_ready(
                rank, todo[self._done[rank]], ready
            ):
                self._done[rank] += 1
        if len(self._actions) < sum(map(len, self._todo)):
            raise BadInputError(self._describe_deadlock())
        return Wiring(
            ranks=len(self._todo),
            actions=tuple(self._actions),
            taken_by=tuple(self._taken_by),
            after=tuple(self._after),
        )

    def _run_if_ready(self, rank: int, action: Action, ready: list[int]) -> bool:
        """Run the action if its inputs are ready, and wake waiting ranks. Return whether it ran."""
        after: tuple[int, ...] = ()
        for need in self._required_results(action):
            place = self._places[need]
            if place < 0:
                self._waiting.setdefault(need, []).append(rank)
                return False
            if self._taken_by[place] != rank:  # a rank's own actions have ended
                after += (place,)
        for done in self._produced_results(action):
            self._places[done] = len(self._actions)
            if done in self._waiting:
                ready += self._waiting.pop(done)
        self._actions.append(action)
        self._taken_by.append(rank)
        self._after.append(after)
        return True

    def _required_results(self, action: Action) -> tuple[int, ...]:
        kind, stage, microbatch = action
        forward = stage * self._row + 2 * microbatch
        if kind == "F":
            return (forward - self._row,) if stage else ()
        if kind == "W":
            return (forward + 1,)
        return (forward, forward + self._row + 1) if stage < self._last else (forward,)

    def _produced_results(self, action: Action) -> tuple[int, ...]:
        kind, stage, microbatch = action
        return () if kind == "W" else (stage * self._row + 2 * microbatch + (kind != "F"),)

    def _describe_deadlock(self) -> str:
        stopped = [
            f"rank {rank} at {todo[done]}"
            for rank, (todo, done) in enumerate(zip(self._todo, self._done, strict=True))
            if done < len(todo)
        ]
        return f"the ranks of this schedule wait for each other: {', '.join(stopped)}"


def simulate(
    orders: Sequence[Order], seconds: Callable[[Action], float], transfer_s: float = 0.0
) -> Timeline:
    """Simulate all ranks, each executing its actions in order.

    `seconds` returns the duration of an action. `transfer_s` is the time to send a tensor to
    another rank, during which both ranks may continue. Raises BadInputError if ranks wait for each
    other.
    """
    wiring = wire(orders)
    begins, ends = wiring.run(seconds, transfer_s)
    spans: list[list[Span]] = [[] for _ in orders]
    for rank, action, begin_s, end_s in zip(
        wiring.taken_by, wiring.actions, begins, ends, strict=True
    ):
        spans[rank].append(Span(action, begin_s, end_s))
    return Timeline(tuple(map(tuple, spans)))


def simulate_stages(
    orders: Sequence[Order], times: Sequence[StageTime], transfer_s: float = 0.0
) -> Timeline:
    """Simulate like `simulate`, with the same durations for all micro-batches of a stage."""
    return simulate(orders, lambda action: times[action.stage].seconds(action.kind), transfer_s)


def makespan_s(
    orders: Sequence[Order], times: Sequence[StageTime], transfer_s: float = 0.0
) -> float:
    """Return the total seconds of `simulate_stages` without building the timeline.

    To simulate a schedule repeatedly, use the graph from `schedules.schedule_graph`.
    """
    return wire(orders).makespan_s(times, transfer_s)


def idle_share_formula(
    strategy: str, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> float | None:
    """Return the idle share for equal stages in closed form, or None if there is no formula.

    With n ranks, m micro-batches and v stages per rank, the formulas are:

    - mp: (n − 1)/n, because one rank works at a time.
    - gpipe and 1f1b: (n − 1)/(m + n − 1) (Huang et al., §2.3; arXiv 2104.04473, §2.2.1).
    - interleaved and loopedbfs: (n − 1)/(v·m + n − 1) (ibid., §2.2.2; Lamy-Poirier, arXiv
      2211.05953, §3). With fewer micro-batches than ranks, ranks also wait between stages, and
      there is no formula.

    If `stages_per_rank` is None, v is the schedule's default.
    """
    if strategy == "mp":
        return (ranks - 1) / ranks
    if strategy not in ("gpipe", "1f1b", "interleaved", "loopedbfs"):
        return None
    each = stages_per_rank or SCHEDULES[strategy].stages_per_rank
    if each > 1 and microbatches < ranks:
        return None
    return (ranks - 1) / (each * microbatches + ranks - 1)
