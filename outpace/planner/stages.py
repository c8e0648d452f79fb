"""How many layers each stage of a pipeline gets."""

from collections.abc import Iterator

from outpace.planner.flops import block_weights, head_weights
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec


def layers_per_stage(spec: ModelSpec, stages: int) -> tuple[int, ...]:
    """Layers of each stage, such that the slowest stage is as fast as can be.

    The head is weighed by the multiply-adds of its products against those of a block; looking up
    an embedding has none. Raises BadInputError for fewer layers than stages.
    """
    if spec.layers < stages:
        raise BadInputError(
            f"a pipeline of {stages} stages needs as many layers, but the model has {spec.layers}"
        )
    return balance(spec.layers, stages, head_weights(spec) / block_weights(spec))


def balance(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Equal layers over stages, each at least one; the last stage also has the head.

    `head` is its cost in layers. The costliest stage costs as little as possible, then the next.
    Of stages that could have one layer more the later ones do, since the earlier ones keep more
    activations (Narayanan et al., PipeDream, SOSP 2019, §3.3).
    """
    return min(
        _spreads(layers, stages),
        key=lambda counts: sorted((*counts[:-1], counts[-1] + head), reverse=True),
    )


def _spreads(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every number of layers for the last stage; the others share what is left evenly."""
    if stages == 1:
        yield (layers,)
        return
    for last in range(1, layers - stages + 2):
        each, more = divmod(layers - last, stages - 1)
        yield (*[each] * (stages - 1 - more), *[each + 1] * more, last)
