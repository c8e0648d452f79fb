"""Action tables of pipeline schedules: what every rank does, and in which order.

They equal torch's (torch.distributed.pipelining 2.13; tests compare them), but are built without
torch and for any number of ranks, for simulation. There are n ranks, m micro-batches, and v stages
per rank; all are numbered from 0. Tables contain no times.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache

from outpace.planner.pipeline.simulator import Action, Wiring, wire
from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES, Kind, refusal

# A function that returns a rank's actions, from its number and the numbers of ranks, micro-batches
# and stages per rank.
_Maker = Callable[[int, int, int, int], list[Action]]


def orders(
    schedule: str, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> list[list[Action]]:
    """Return each rank's actions in order.

    If `stages_per_rank` is None, it is the schedule's default. Raises BadInputError if the schedule
    does not allow these numbers.
    """
    each = _check_stages_per_rank(schedule, ranks, microbatches, stages_per_rank)
    return [_MAKERS[schedule](rank, ranks, microbatches, each) for rank in range(ranks)]


def order(
    schedule: str, rank: int, ranks: int, microbatches: int, stages_per_rank: int
) -> list[Action]:
    """Return one rank's actions in order, without the checks of `orders`."""
    return _MAKERS[schedule](rank, ranks, microbatches, stages_per_rank)


@lru_cache(maxsize=8)  # the largest, for 64 ranks and 512 micro-batches, takes about 30 MB
def schedule_graph(
    schedule: str, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Wiring:
    """Return a schedule's actions in topological order, for repeated simulation."""
    return wire(orders(schedule, ranks, microbatches, stages_per_rank))


def _check_stages_per_rank(schedule: str, ranks: int, microbatches: int, asked: int | None) -> int:
    """Return the requested number of stages per rank, or the schedule's default.

    Raises BadInputError if the schedule does not allow these numbers.
    """
    if schedule not in SCHEDULES:
        raise BadInputError(f"{schedule} is not a pipeline schedule. Use {', '.join(SCHEDULES)}")
    if ranks < 1 or microbatches < 1:
        raise BadInputError(
            f"{schedule} needs at least one rank and one micro-batch, but got {ranks} and "
            f"{microbatches}"
        )
    laid_out = SCHEDULES[schedule]
    number = laid_out.stages_per_rank if asked is None else asked
    loops = laid_out.placement == "loop" and laid_out.stages_per_rank > 1
    if number < 1 or (not loops and number != laid_out.stages_per_rank):
        allowed = (
            "at least 1"
            if loops
            else f"exactly {laid_out.stages_per_rank}. Use interleaved or loopedbfs for more"
        )
        raise BadInputError(f"{schedule} with {number} stages on a rank: it needs {allowed}")
    why_not = refusal(schedule, pp=ranks, microbatches=microbatches)
    if why_not is not None:
        raise BadInputError(why_not)
    return number


def _order_gpipe(rank: int, ranks: int, microbatches: int, per_rank: int) -> list[Action]:
    """Order all forwards, then all backwards (Huang et al., arXiv 1811.06965, §2.3)."""
    return [Action(kind, rank, number) for kind in ("F", "B") for number in range(microbatches)]


def _order_1f1b(rank: int, ranks: int, microbatches: int, per_rank: int) -> list[Action]:
    """Order forwards until the first backward is ready, then alternate backwards and forwards.

    See Narayanan et al., PipeDream, SOSP 2019, §3.2; with flushes as in arXiv 2104.04473, §2.2.1.
    """
    numbers = [(rank, number) for number in range(microbatches)]
    return _alternate_passes(numbers, numbers, ahead=min(microbatches, ranks - rank) - 1)


def _order_interleaved(rank: int, ranks: int, microbatches: int, per_rank: int) -> list[Action]:
    """Order 1f1b in rounds, in each of which every stage runs one micro-batch per rank.

    See Narayanan et al., arXiv 2104.04473, §2.2.2. If the number of ranks does not divide the
    number of micro-batches, rounds have more micro-batches.
    """
    forwards, backwards = _order_rounds(rank, ranks, microbatches, per_rank)
    # Forwards before the first backward: the round without its last stage, and two more (there and
    # back) for each later rank.
    ahead = _first_round_forwards(ranks, microbatches, per_rank) + 2 * (ranks - 1 - rank)
    return _alternate_passes(forwards, backwards, min(ahead, len(forwards)))


def _order_zero_bubble(rank: int, ranks: int, microbatches: int, per_rank: int) -> list[Action]:
    """Order like `interleaved`, with one weight gradient delayed for each preceding rank.

    This is ZB-H1 of Qi et al., arXiv 2401.10241, §2. The previous rank waits only for the gradients
    of a stage's inputs, so a rank is one forward ahead of the next rank instead of two.
    """
    forwards, backwards = _order_rounds(rank, ranks, microbatches, per_rank)
    ahead = _first_round_forwards(ranks, microbatches, per_rank) + ranks - 1 - rank
    return _alternate_passes(forwards, backwards, min(ahead, len(forwards)), delay=rank)


def _order_breadth_first(rank: int, ranks: int, microbatches: int, per_rank: int) -> list[Action]:
    """Order the forwards of all micro-batches stage by stage, then the backwards in reverse.

    See Lamy-Poirier, arXiv 2211.05953, §3.
    """
    stages = range(rank, ranks * per_rank, ranks)
    forwards = [Action("F", stage, number) for stage in stages for number in range(microbatches)]
    return [*forwards, *(Action("B", stage, number) for _, stage, number in reversed(forwards))]


_Places = list[tuple[int, int]]  # (stage, micro-batch)


def _round_size(ranks: int, microbatches: int) -> int:
    """Return the number of micro-batches per round.

    This is `ranks`, or more if that makes all rounds equally long.
    """
    return microbatches // max(1, microbatches // ranks)


def _first_round_forwards(ranks: int, microbatches: int, per_rank: int) -> int:
    """Return the number of forwards in a rank's first round, without those on its last stage."""
    return (per_rank - 1) * _round_size(ranks, microbatches)


def _order_rounds(
    rank: int, ranks: int, microbatches: int, per_rank: int
) -> tuple[_Places, _Places]:
    """Return a rank's forwards and backwards, round by round and stage by stage within a round."""
    size = _round_size(ranks, microbatches)
    stages = range(rank, ranks * per_rank, ranks)

    def list_rounds(stages: range) -> _Places:
        firsts = range(0, microbatches, size)
        return [(s, first + place) for first in firsts for s in stages for place in range(size)]

    return list_rounds(stages), list_rounds(stages[::-1])


def _alternate_passes(
    forwards: _Places, backwards: _Places, ahead: int, delay: int | None = None
) -> list[Action]:
    """Return `ahead` forwards, then forwards and backwards in turn, then the last backwards.

    With a `delay`, backwards compute only input gradients, and each weight gradient follows `delay`
    backwards later.
    """
    kind: Kind = "B" if delay is None else "I"
    order = [Action("F", *place) for place in forwards[:ahead]]
    for turn, place in enumerate(backwards):
        if ahead + turn < len(forwards):
            order.append(Action("F", *forwards[ahead + turn]))
        order.append(Action(kind, *place))
        if delay is not None and turn >= delay:
            order.append(Action("W", *backwards[turn - delay]))
    late = backwards[-delay:] if delay else []
    return order + [Action("W", *place) for place in late]


class _OrderWriter:
    """Builder of the action order of a rank with two stages: 0 is the earlier, 1 the later.

    An action is a letter and a stage. "F0" is stage 0's next forward, "B0" its next backward, and
    "I0" a backward that computes only input gradients. "W0" computes the weight gradients of stage
    0's oldest pending "I0", and "W" those of the oldest pending "I" of either stage.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.order: list[Action] = []
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._begun: Counter[tuple[bool, int]] = Counter()  # forwards and backwards of a stage
        self._put_off: list[Action] = []

    def write(self, turn: str, times: int = 1) -> None:
        """Append the actions of `turn`, such as "F0 I1 W1", `times` times."""
        words = turn.split()
        for _ in range(times):
            for word in words:
                self._append_action(word)

    def _append_action(self, word: str) -> None:
        kind: Kind = word[0]  # type: ignore[assignment]
        if kind == "W":
            stages = [self._stages[int(place)] for place in word[1:]] or self._stages
            oldest = next(late for late in self._put_off if late.stage in stages)
            self._put_off.remove(oldest)
            self.order.append(oldest._replace(kind="W"))
            return
        stage = self._stages[int(word[1])]
        action = Action(kind, stage, self._begun[kind == "F", stage])
        self._begun[kind == "F", stage] += 1
        self.order.append(action)
        if kind == "I":
            self._put_off.append(action)


def _order_zero_bubble_v(rank: int, ranks: int, microbatches: int, per_rank: int) -> list[Action]:
    """Order stages in a V: the last stage is on rank 0, which can start its backward immediately.

    See Qi et al., arXiv 2401.10241, §6. The pattern is for at least 2 · ranks − 1 micro-batches;
    with fewer, actions of missing micro-batches are left out.
    """
    count = max(2 * ranks - 1, microbatches)
    behind = ranks - 1 - rank
    writer = _OrderWriter(rank, ranks)
    # The first micro-batch goes down the V and back before it reaches this rank's later stage.
    writer.write("F0", 2 * behind + 1)
    writer.write("F1 F0", rank)
    writer.write("F1 I1 W1", behind + 1)
    writer.write("F0 I0 W0 F1 I1 W1", count - ranks - behind)
    writer.write("I0 W0 F1 I1 W1", behind)
    # No forwards are left, so weight gradients fill the time until input gradients come back.
    writer.write("I0 I1", rank)
    writer.write("I0 W0", behind + 1)
    writer.write("W1", rank)
    writer.write("W0", rank)
    return [action for action in writer.order if action.microbatch < microbatches]


def _order_dual_pipe_v(rank: int, ranks: int, microbatches: int, per_rank: int) -> list[Action]:
    """Order DualPipe (DeepSeek-AI, arXiv 2412.19437, §3.2.1), cut in half into a V.

    The steps are steps 1 to 8 of github.com/deepseek-ai/DualPipe. They pair a forward of one stage
    with a backward of the other; torch runs the two one after the other.
    """
    behind = ranks - 1 - rank
    main = microbatches - ranks - behind
    writer = _OrderWriter(rank, ranks)
    writer.write("F0", 2 * behind)
    writer.write("F0 F1", rank + 1)
    writer.write("I1 W F1", behind)
    writer.write("F0 B1 F1 B0", main)
    writer.write("B1 F1 B0", behind)
    # Backwards without a paired forward, alternating between both stages; the later half is split.
    kinds = "B" * (rank + 1) + "I" * (rank + 1)
    writer.write(" ".join(map("".join, zip(kinds, "10" * (rank + 1), strict=True))))
    writer.write("W I0", behind)
    writer.write("W", rank + 1)
    return writer.order


_MAKERS: Mapping[str, _Maker] = {
    "mp": _order_gpipe,
    "gpipe": _order_gpipe,
    "1f1b": _order_1f1b,
    "interleaved": _order_interleaved,
    "loopedbfs": _order_breadth_first,
    "zb": _order_zero_bubble,
    "zbv": _order_zero_bubble_v,
    "dualpipev": _order_dual_pipe_v,
}
