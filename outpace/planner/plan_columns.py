"""Plans as columns, to estimate the time and memory of many plans at once.

Every array has one entry per plan. Named values, such as the strategy, are stored as indices into
the tuples of this module.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from outpace.planner.model.adapters import AdapterSettings, is_known
from outpace.records.optimizers import OptimizerName
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Checkpointing, Offload, Plan, Strategy
from outpace.records.precisions import PRECISION_TRAITS, Precision
from outpace.records.strategies import FULLY_SHARDED, TRAITS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Objects = NDArray[np.object_]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
SCHEDULE_NAMES: tuple[str, ...] = ("none", *SCHEDULES)
MODES: tuple[Checkpointing, ...] = get_args(Checkpointing)
OFFLOADS: tuple[Offload, ...] = get_args(Offload)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
_SHARD_ITEMS = np.array([PRECISION_TRAITS[name].shard_bytes for name in PRECISIONS], float)


@dataclass(frozen=True)
class PlanBatch:
    """Many plans as arrays with one entry per plan.

    `zero` is 0 if dp_shard is 1. `modes` has one column per entry of MODES, the fraction of blocks
    in that mode. `etp` is the tensor-parallel degree within each expert. `passes` is the number of
    accumulation steps: each data-parallel rank trains micro_batch × microbatches × passes samples
    per step. `adapters` has the AdapterSettings of plans that train only adapters, else None.
    """

    strategy: Ints
    dp_replicate: Ints
    dp_shard: Ints
    zero: Ints
    tp: Ints
    cp: Ints
    pp: Ints
    ep: Ints
    etp: Ints
    schedule: Ints
    stages_per_rank: Ints
    even_stages: Bools
    sequence_parallel: Bools
    async_tp: Bools
    micro_batch: Ints
    microbatches: Ints
    passes: Ints
    modes: Floats
    offload_activations: Ints
    offload_parameters: Ints
    offload_optimizer: Ints
    precision: Ints
    optimizer: Ints
    chunked_loss: Bools
    compile: Bools
    in_backward: Bools
    bucket_bytes: Ints
    servers: Ints
    adapters: Objects

    def __len__(self) -> int:
        return len(self.strategy)

    def select(self, chosen: Any) -> Self:
        """Return the plans selected by a mask, a slice or a list of indices."""
        return type(self)(
            **{field.name: getattr(self, field.name)[chosen] for field in fields(self)}
        )

    @property
    def common_adapters(self) -> AdapterSettings | None:
        """Return the adapter settings that all plans share, or None without adapters.

        Raises ValueError if plans have different settings.
        """
        found = set(self.adapters.tolist())
        if len(found) > 1:
            raise ValueError(f"plans of one batch have different adapters: {found}")
        return found.pop() if found else None

    def unknown_with_adapters(self) -> Iterator[tuple[str, Bools]]:
        """Yield each setting with which adapters cannot be estimated, and a mask of its plans."""
        columns: dict[str, tuple[Any, Sequence[Any]]] = {
            "strategy": (self.strategy, STRATEGIES),
            "offload_activations": (self.offload_activations, OFFLOADS),
            "offload_parameters": (self.offload_parameters, OFFLOADS),
            "offload_optimizer": (self.offload_optimizer, OFFLOADS),
            "optimizer_in_backward": (self.in_backward, (False, True)),
            "precision": (self.precision, PRECISIONS),
            "optimizer": (self.optimizer, OPTIMIZERS),
        }
        for name, (codes, values) in columns.items():
            for code, value in enumerate(values):
                if not is_known(name, value):
                    yield f"{name} {value}", codes == code

    @property
    def data_parallel(self) -> Ints:
        """Return the data-parallel degree."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> Ints:
        """Return the world size without parameter servers."""
        return self.data_parallel * self.tp * self.cp * self.pp

    @property
    def shards(self) -> Ints:
        """Return the number of shards of each parameter; in 3d, cp ranks hold shards too."""
        product = self.strategy == STRATEGIES.index("3d")
        return self.dp_shard * np.where(product & (self.zero > 0), self.cp, 1)

    def schedule_in(self, *names: str) -> Bools:
        """Return a mask of the plans with one of these schedules."""
        return _is_among(SCHEDULE_NAMES, names)[self.schedule]

    def splits_backward(self) -> Bools:
        """Return a mask of the plans whose schedule defers weight gradients."""
        return self.schedule_in(*(n for n, one in SCHEDULES.items() if one.splits_backward))

    def strategy_in(self, *names: Strategy) -> Bools:
        """Return a mask of the plans with one of these strategies."""
        return _is_among(STRATEGIES, names)[self.strategy]

    def holds_masters(self) -> Bools:
        """Return a mask of the plans that use sharded fp32 parameters as master weights.

        These plans have the precision bf16-master and shard their parameters.
        """
        product = self.strategy_in("3d") & (self.dp_replicate * self.dp_shard * self.cp > 1)
        split = product | self.strategy_in(*FULLY_SHARDED)
        return split & self.precision_in("bf16-master")

    def with_kept_states(self) -> Self:
        """Return the plans with the precision that determines their optimizer states.

        Plans whose sharded fp32 parameters serve as master weights keep no separate ones, so their
        precision bf16-master is replaced by bf16.
        """
        plain = PRECISIONS.index("bf16")
        return replace(self, precision=np.where(self.holds_masters(), plain, self.precision))

    def shard_bytes(self) -> tuple[Floats, Floats]:
        """Return the bytes per element of gathered parameters and of reduced gradients, by plan."""
        gathered, reduced = _SHARD_ITEMS[self.precision].T
        return gathered, reduced

    def precision_in(self, *names: Precision) -> Bools:
        """Return a mask of the plans with one of these precisions."""
        return _is_among(PRECISIONS, names)[self.precision]


def join_batches(parts: Sequence[PlanBatch]) -> PlanBatch:
    """Concatenate several batches of plans."""
    names = [field.name for field in fields(PlanBatch)]
    return PlanBatch(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})


def distinct_rows(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return the first row with each distinct combination of values, and each row's combination.

    Values are not negative. A single number stands for a combination where 63 bits suffice, since
    numbers sort faster than rows.
    """
    spans = [int(column.max(initial=0)) + 1 for column in columns]
    if math.prod(spans) < 1 << 63:
        keys, axis = np.ravel_multi_index(tuple(columns), tuple(spans)), None
    else:
        keys, axis = np.stack(columns, axis=1), 0
    _, first, place = np.unique(keys, return_index=True, return_inverse=True, axis=axis)
    return first, place.reshape(-1)


@lru_cache
def _is_among(values: tuple[str, ...], names: tuple[str, ...]) -> Bools:
    found = np.array([value in names for value in values])
    found.setflags(write=False)
    return found


def of_plans(plans: Sequence[Plan], global_batch: int, layers: int) -> PlanBatch:
    """Convert plans to columns.

    Raises BadInputError if a plan does not divide the global batch.
    """
    rows = [_plan_to_row(plan, global_batch, layers) for plan in plans]
    arrays: dict[str, Any] = {
        field.name: np.array([row[field.name] for row in rows]) for field in fields(PlanBatch)
    }
    return PlanBatch(**arrays)


def _plan_to_row(plan: Plan, global_batch: int, layers: int) -> dict[str, Any]:
    modes = plan.modes(layers)
    zero = plan.zero if plan.strategy == "3d" else TRAITS[plan.strategy].zero
    named = plan.schedule if plan.schedule in SCHEDULE_NAMES else "none"
    return {
        "strategy": STRATEGIES.index(plan.strategy),
        **{
            name: getattr(plan, name)
            for name in (
                "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "stages_per_rank",
                "sequence_parallel", "async_tp", "micro_batch", "compile", "servers",
            )
        },
        "etp": plan.expert_tp,
        "even_stages": plan.stage_split == "even",
        "zero": zero if plan.dp_shard > 1 else 0,
        "schedule": SCHEDULE_NAMES.index(named),
        "microbatches": plan.pp_microbatches,
        "passes": plan.accumulation(global_batch),
        "modes": [sum(mode == one for mode in modes) / len(modes) for one in MODES],
        "offload_activations": OFFLOADS.index(plan.offload_activations),
        "offload_parameters": OFFLOADS.index(plan.offload_parameters),
        "offload_optimizer": OFFLOADS.index(plan.offload_optimizer),
        "precision": PRECISIONS.index(plan.precision),
        "optimizer": OPTIMIZERS.index(plan.optimizer),
        "chunked_loss": plan.loss == "chunked",
        "in_backward": plan.optimizer_in_backward,
        "bucket_bytes": plan.bucket_mib * 2**20,
        "adapters": AdapterSettings.from_plan(plan),
    }  # fmt: skip
