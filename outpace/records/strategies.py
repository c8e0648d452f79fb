"""Table of strategies: what each splits, gathers, compresses and supports.

The planner, layouts and messages take strategy-specific facts from here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from outpace.records.pipelines import SCHEDULES

Strategy = Literal[
    "single", "dp", "ps", "ddp", "ring", "horovod", "zero1", "zero2", "zero3", "hsdp",
    "mp", "gpipe", "1f1b", "interleaved", "loopedbfs", "zb", "zbv", "dualpipev", "tp", "cp", "3d",
]  # fmt: skip
Axis = Literal["dp_replicate", "dp_shard", "cp", "tp", "pp"]
Compression = Literal["none", "bf16", "powersgd"]
# Axes in the order in which ranks are laid out; ranks of the last axis are adjacent.
AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Families of strategies, in the order in which plans and reasons list the best of each.
StrategyFamily = Literal[
    "DP (one process)", "parameter server", "ring all-reduce", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3",
    "HSDP", "naive model parallel", "pipeline alone", "tensor parallel alone",
    "context parallel alone", "one device", "product of axes",
]  # fmt: skip
# How the forward is compiled (records.compiled): the whole model as one region, or block by block.
# "sends": block by block, with graph breaks at sends; "split": torch refuses.
Regions = Literal["whole", "blocks", "sends", "split"]


@dataclass(frozen=True)
class StrategyTraits:
    """Traits of a strategy, the same on all of its ranks.

    `module` is the module of outpace.parallel that lays out outpace's models, and `custom_module`
    the one for custom models. `axes`: the axes that the strategy splits. `zero`: the ZeRO stage,
    which is what dp_shard shards (1: optimizer state, 2: also gradients, 3: also parameters; 0:
    nothing). `whole_model`: every rank keeps all parameters. `buckets`: gradients are reduced in
    buckets as soon as they are computed. `gathers`: parameters are gathered before use, so they may
    be stored elsewhere, even with a single process. `compresses`: supported compression of gradient
    buckets. `steps_in_backward`: the optimizer can update a parameter during the backward, because
    its gradient is then complete and shares no memory with a bucket. `shares_buffers`: every rank
    has all of the model's buffers, but only some of the samples. `communicates_within`:
    communication during forward and backward counts towards their time. `one_shape`: all batches
    must have the same shape. `takes_sparse_gradients`: gradients of embeddings may be sparse.
    `offloads_compiled`: activations may be offloaded from compiled blocks
    (tests/parallel/test_offload.py). `compiled`: None if compiling was not tested.
    """

    module: str
    family: StrategyFamily
    axes: tuple[Axis, ...] = ()
    title: str | None = None
    custom_module: str | None = None
    zero: Literal[0, 1, 2, 3] = 0
    whole_model: bool = True
    buckets: bool = False
    gathers: bool = False
    compresses: tuple[Compression, ...] = ()
    steps_in_backward: bool = False
    shares_buffers: bool = False
    communicates_within: bool = False
    one_shape: bool = False
    takes_sparse_gradients: bool = False
    offloads_compiled: bool = False
    compiled: Regions | None = None


def _make_sharded(
    title: Literal["ZeRO-2", "ZeRO-3", "HSDP"], zero: Literal[2, 3], axes: tuple[Axis, ...]
) -> StrategyTraits:
    return StrategyTraits(
        module="sharded", family=title, axes=axes, title=title, zero=zero, whole_model=False,
        gathers=True, steps_in_backward=True, shares_buffers=True, communicates_within=True,
        offloads_compiled=True, compiled="blocks",
    )  # fmt: skip


def _pipeline_traits() -> dict[Strategy, StrategyTraits]:
    """Return the traits of each pipeline schedule; mp is a pipeline with one micro-batch."""
    names: dict[str, Strategy] = {name: name for name in get_args(Strategy)}
    return {
        names[name]: StrategyTraits(
            module="pipeline", family="naive model parallel" if name == "mp" else "pipeline alone",
            axes=("pp",), custom_module="custom.pipeline", whole_model=False,
            title="naive model parallel" if name == "mp" else None, one_shape=True,
            compiled="split" if schedule.splits_backward else "blocks",
        )
        for name, schedule in SCHEDULES.items()
    }  # fmt: skip


TRAITS: Mapping[Strategy, StrategyTraits] = {
    "single": StrategyTraits(
        module="single", family="one device", title="one device", gathers=True,
        steps_in_backward=True, takes_sparse_gradients=True, offloads_compiled=True,
        compiled="whole",
    ),
    # One process with a thread per replica. Compiled, all would call the first replica's forward.
    "dp": StrategyTraits(
        module="dp", family="DP (one process)", axes=("dp_replicate",), title="DP, one process",
        one_shape=True, compiled="whole",
    ),
    "ps": StrategyTraits(
        module="ps", family="parameter server", axes=("dp_replicate",), title="parameter server",
        compiled="whole",
    ),
    "ddp": StrategyTraits(
        module="ddp", family="DDP", axes=("dp_replicate",), title="DDP", buckets=True,
        compresses=("bf16", "powersgd"), shares_buffers=True, takes_sparse_gradients=True,
        offloads_compiled=True, compiled="whole",
    ),
    "ring": StrategyTraits(
        module="ring", family="ring all-reduce", axes=("dp_replicate",), title="ring all-reduce",
        buckets=True, compresses=("bf16",), shares_buffers=True, compiled="blocks",
    ),
    # No compression: github.com/horovod/horovod/issues/4047
    "horovod": StrategyTraits(
        module="horovod", family="ring all-reduce", axes=("dp_replicate",), buckets=True,
        shares_buffers=True,
    ),
    "zero1": StrategyTraits(
        module="zero1", family="ZeRO-1", axes=("dp_shard",), title="ZeRO-1", zero=1, buckets=True,
        compresses=("bf16", "powersgd"), shares_buffers=True, takes_sparse_gradients=True,
        offloads_compiled=True, compiled="whole",
    ),
    "zero2": _make_sharded("ZeRO-2", 2, ("dp_shard",)),
    "zero3": _make_sharded("ZeRO-3", 3, ("dp_shard",)),
    "hsdp": _make_sharded("HSDP", 3, ("dp_replicate", "dp_shard")),
    **_pipeline_traits(),
    "tp": StrategyTraits(
        module="tensor", family="tensor parallel alone", axes=("tp",),
        custom_module="custom.tensor", whole_model=False,
        communicates_within=True, compiled="blocks",
    ),
    "cp": StrategyTraits(
        module="context", family="context parallel alone", axes=("cp",), buckets=True,
        compresses=("bf16", "powersgd"), communicates_within=True,
        one_shape=True, compiled="sends",
    ),
    "3d": StrategyTraits(
        module="nd_parallel", family="product of axes", axes=AXES, whole_model=False,
        gathers=True, communicates_within=True, one_shape=True, compiled="blocks",
    ),
}  # fmt: skip


def strategies_that(has: Callable[[StrategyTraits], bool]) -> tuple[Strategy, ...]:
    """Return the strategies whose traits satisfy `has`, in the order of TRAITS."""
    return tuple(name for name, traits in TRAITS.items() if has(traits))


def idle_strategy_note(strategy: Strategy | None, world_size: int) -> str | None:
    """Return a sentence if a parallel strategy runs on a single process, else None."""
    if world_size > 1 or strategy is None or not TRAITS[strategy].axes:
        return None
    return f"--strategy {strategy} on one process splits nothing"


# Strategies with ZeRO-2 or ZeRO-3 alone; 3d also shards parameters with `fully_shard`.
FULLY_SHARDED = strategies_that(lambda traits: traits.zero >= 2)
