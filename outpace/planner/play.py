"""A pipeline's schedule played action by action: when each rank works, and for how long it waits.

Each rank takes its actions in its order. An action begins as soon as the rank is free and what it
needs is there: a forward needs the stage before it, a backward the stage after it and its own
forward. Where stages are equal this gives the closed forms of the papers, and where they are not,
what the closed forms cannot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES

# Forward; whole backward; its part for the inputs' gradients; its part for the weights'.
Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """What a rank does at once: `kind` of a micro-batch on a stage, all counted from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.microbatch} on stage {self.stage}"

    @property
    def needs(self) -> tuple["Action", ...]:
        """What another rank has to have done. Of the whole backward its inputs' part is enough."""
        if self.kind == "F":
            return (self._replace(stage=self.stage - 1),) if self.stage else ()
        if self.kind == "W":
            return (self._replace(kind="I"),)
        return (self._replace(kind="I", stage=self.stage + 1), self._replace(kind="F"))


Order = Sequence[Action]


@dataclass(frozen=True)
class StageTime:
    """Seconds of a micro-batch on a stage. A backward is its inputs' part and its weights'."""

    forward_s: float
    inputs_s: float
    weights_s: float

    def of(self, kind: Kind) -> float:
        """Seconds of an action."""
        return {
            "F": self.forward_s,
            "B": self.inputs_s + self.weights_s,
            "I": self.inputs_s,
            "W": self.weights_s,
        }[kind]


class Span(NamedTuple):
    """An action and when it was done, from the beginning of the step."""

    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What each rank does, and when."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan_s(self) -> float:
        """From the first action's beginning to the last one's end."""
        return max((spans[-1].end_s for spans in self.ranks if spans), default=0.0)

    def busy_s(self, rank: int) -> float:
        """Seconds in which a rank works."""
        return sum(span.end_s - span.begin_s for span in self.ranks[rank])

    @property
    def idle_share(self) -> float:
        """The part of all ranks' time in which they wait."""
        whole = self.makespan_s * len(self.ranks)
        return 1 - sum(map(self.busy_s, range(len(self.ranks)))) / whole if whole else 0.0


def play(
    orders: Sequence[Order], seconds: Callable[[Action], float], transfer_s: float = 0.0
) -> Timeline:
    """Let each rank take its actions in its order.

    `seconds` of each action; `transfer_s` is what it takes a tensor to get to another rank, in
    which both may go on. Raises BadInputError for orders in which ranks wait for each other.
    """
    placed = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    ended: dict[Action, tuple[float, int]] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    waiting = sum(map(len, orders))
    last_stage = max(placed, default=0)
    while waiting:
        before = waiting
        for rank, order in enumerate(orders):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                needed = [need for need in action.needs if need.stage <= last_stage]
                if any(need not in ended for need in needed):
                    break
                arrivals = (
                    end_s + (transfer_s if other != rank else 0.0)
                    for end_s, other in map(ended.__getitem__, needed)
                )
                free_s = spans[rank][-1].end_s if spans[rank] else 0.0
                begin_s = max([free_s, *arrivals])
                end_s = begin_s + seconds(action)
                spans[rank].append(Span(action, begin_s, end_s))
                ended[action] = (end_s, rank)
                if action.kind == "B":  # the inputs' part is a part of it
                    ended[action._replace(kind="I")] = (end_s, rank)
                waiting -= 1
        if waiting == before:
            raise BadInputError(_stuck(orders, spans))
    return Timeline(tuple(map(tuple, spans)))


def _stuck(orders: Sequence[Order], spans: Sequence[Sequence[Span]]) -> str:
    stopped = [
        f"rank {rank} at {order[len(done)]}"
        for rank, (order, done) in enumerate(zip(orders, spans, strict=True))
        if len(done) < len(order)
    ]
    return f"the ranks of this schedule wait for each other: {', '.join(stopped)}"


def play_stages(
    orders: Sequence[Order], times: Sequence[StageTime], transfer_s: float = 0.0
) -> Timeline:
    """As `play`, every micro-batch taking a stage's time."""
    return play(orders, lambda action: times[action.stage].of(action.kind), transfer_s)


def gpipe_orders(ranks: int, microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965, §2.3)."""
    return [
        [Action(kind, stage, number) for kind in ("F", "B") for number in range(microbatches)]
        for stage in range(ranks)
    ]


def one_f_one_b_orders(ranks: int, microbatches: int) -> list[list[Action]]:
    """Forwards until the first backward is there, then one of each in turn.

    Narayanan et al., PipeDream, SOSP 2019, §3.2; flushed as in arXiv 2104.04473, §2.2.1.
    """
    orders = []
    for stage in range(ranks):
        ahead = min(microbatches, ranks - stage)
        order = [Action("F", stage, number) for number in range(ahead)]
        for number in range(microbatches):
            order.append(Action("B", stage, number))
            if ahead + number < microbatches:
                order.append(Action("F", stage, ahead + number))
        orders.append(order)
    return orders


def most_in_flight(order: Order) -> int:
    """The most micro-batches of whose forwards a rank keeps intermediate results at one time."""
    kept = most = 0
    for action in order:
        kept += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, kept)
    return most


def idle_share_formula(strategy: str, ranks: int, microbatches: int) -> float | None:
    """The idle share of equal stages by the papers' closed forms; None where there is none.

    mp: one of n ranks works. gpipe and 1f1b: (n − 1)/(m + n − 1), Huang et al., §2.3 and
    arXiv 2104.04473, §2.2.1. With v stages a rank: (n − 1)/(v·m + n − 1), ibid., §2.2.2, and
    Lamy-Poirier, arXiv 2211.05953, §3.
    """
    if strategy == "mp":
        return (ranks - 1) / ranks
    if strategy not in ("gpipe", "1f1b", "interleaved", "loopedbfs"):
        return None
    passes = microbatches * SCHEDULES[strategy].stages_per_rank
    return (ranks - 1) / (passes + ranks - 1)
