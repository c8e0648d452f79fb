"""Layers of each pipeline stage, and ranks that represent groups of equal ranks."""

from collections.abc import Iterator, Sequence

from outpace.planner.model.flops import block_weights, head_weights
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan

_UNEVEN = 8  # maximum number of ranks to evaluate


def layers_per_stage(spec: ModelSpec, stages: int) -> tuple[int, ...]:
    """Divide a model's layers over stages so that the slowest stage is as fast as possible.

    Returns the number of layers of each stage. The head counts as the ratio of its
    multiply-adds to a block's; an embedding lookup costs nothing. Raises BadInputError if there
    are fewer layers than stages.
    """
    if spec.layers < stages:
        raise BadInputError(
            f"a pipeline of {stages} stages needs at least that many layers, but the model has "
            f"{spec.layers}"
        )
    return balance(spec.layers, stages, head_weights(spec) / block_weights(spec))


def balance(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Distribute equal layers over stages, at least one each, with the head on the last stage.

    `head` is the head's cost in layers. The cost of the most expensive stage is minimised, then the
    next most expensive, and so on. Later stages get the extra layers, because earlier stages keep
    more activations (Narayanan et al., PipeDream, SOSP 2019, §3.3).
    """
    return min(
        _distributions_by_last_stage(layers, stages),
        key=lambda counts: sorted((*counts[:-1], counts[-1] + head), reverse=True),
    )


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Distribute layers evenly over stages, with the remainder on the first stages."""
    each, more = divmod(layers, stages)
    return tuple(each + (place < more) for place in range(stages))


def _distributions_by_last_stage(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each number of layers in the last stage, an even distribution of the others."""
    if stages == 1:
        yield (layers,)
        return
    for last in range(1, layers - stages + 2):
        each, more = divmod(layers - last, stages - 1)
        yield (*[each] * (stages - 1 - more), *[each + 1] * more, last)


def spread_by_cost(costs: Sequence[float], stages: int) -> list[range]:
    """Distribute unequal blocks over stages in order, minimising the cost of the slowest stage.

    Among optimal cuts, the last stage starts as early as possible, then the one before it, and so
    on. Later stages thus get more blocks, because earlier stages keep more activations.
    """
    count = len(costs)
    # best[s][n]: the cost of the most expensive of s stages over the first n blocks, and the first
    # block of the last of them.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(1, stages + 1):
        best.append(
            {
                end: min(
                    (max(before, sum(costs[begin:end])), begin)
                    for begin, (before, _) in best[-1].items()
                    if begin < end
                )
                for end in range(stage, count - (stages - stage) + 1)
            }
        )
    found: list[range] = []
    end = count
    for stage in range(stages, 0, -1):
        begin = best[stage][end][1]
        found.insert(0, range(begin, end))
        end = begin
    return found


def representatives(plan: Plan) -> list[int]:
    """Return one rank of each group of ranks that do the same work; the fullest rank is among them.

    These are the first rank of each pipeline stage and, if there are any, one parameter server. In
    zero1, ranks own different parameters, so the first few ranks are included.
    """
    across = plan.world_size - plan.servers
    chosen = set(range(0, across, max(1, across // plan.pp)))
    if plan.strategy == "zero1":
        chosen |= set(range(min(across, _UNEVEN)))
    if plan.servers:
        chosen.add(across)
    return sorted(chosen)
