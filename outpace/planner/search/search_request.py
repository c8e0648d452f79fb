"""A request to search for plans: what the user requires, and what may vary."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outpace.planner.model.adapters import AdapterSettings
from outpace.planner.plan_columns import Bools, PlanBatch
from outpace.records.optimizers import OptimizerName
from outpace.records.outline import Outline
from outpace.records.plan import Offload, Strategy
from outpace.records.precisions import Precision

# Fields for offloading of activations, parameters and optimizer state.
OFFLOADED = ("offload_activations", "offload_parameters", "offload_optimizer")
OFFLOAD_PLACES: tuple[tuple[Offload, Offload, Offload], ...] = (
    ("none", "none", "none"), ("none", "none", "cpu"), ("none", "cpu", "cpu"),
    ("cpu", "none", "none"), ("cpu", "cpu", "cpu"), ("none", "none", "disk"),
    ("none", "disk", "disk"),
)  # fmt: skip
# Settings that may be varied, the simplest value first. Precision and optimizer change training's
# results, the others only how they are computed. Optimizers are AdamW and its smaller variants.
VARIED: Mapping[str, tuple[Any, ...]] = {
    "precision": ("bf16", "bf16-master", "fp16", "fp32", "fp8"),
    "optimizer": ("adamw-fused", "adamw-bf16", "adamw-8bit", "adamw-4bit"),
    "compile": (False, True),
    "stage_split": ("cost", "even"),
    "sequence_parallel": (True, False),
    "async_tp": (False, True),
    "optimizer_in_backward": (False, True),
}


class PlanFilter(Protocol):
    """Restriction of a search; implemented by `planner.search.acceptance.Acceptance`."""

    @property
    def name(self) -> str: ...
    def accepts_layouts(self, columns: PlanBatch) -> Bools: ...
    def accepts_options(self, columns: PlanBatch) -> Bools: ...
    def describe_obstacle(self, columns: PlanBatch, place: int) -> str: ...


@dataclass(frozen=True)
class SearchRequest:
    """Requirements of a search for plans, and settings that it may vary.

    - `keep`: settings that the user requires, by the names of a plan's settings.
    - `vary`: further values of the settings in VARIED to try, with the fastest optimizer first.
    - `precision`: used unless `keep` or `vary` has others. Plans that offload weights or optimizer
      state use `offloaded_precision`, if given.
    - `trained`: only plans that outpace can train.
    - `naive`: include the strategies dp, ps, ring and mp.
    - `without`: strategies to exclude.
    - `offloads`: plans may offload, unless `keep` says otherwise.
    - `accepts`: the plans that the trainer can express; None means all.
    """

    outline: Outline
    seq_len: int
    global_batch: int
    world: int
    per_node: int
    precision: Precision
    offloaded_precision: Precision | None = None
    optimizer: OptimizerName | None = None
    most_tp: int | None = None
    keep: Mapping[str, Any] = field(default_factory=dict)
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    trained: bool = False
    naive: bool = True
    without: Collection[Strategy] = ()
    on_host: bool = False  # the devices are CPUs, so there is no other host memory
    alike: bool = True  # all layers are equal, so every pipeline is possible
    offloads: bool = True
    accepts: PlanFilter | None = None

    @property
    def adapters(self) -> AdapterSettings | None:
        """Return the adapters that all plans train, or None if they train all weights."""
        return AdapterSettings.from_values(self.keep)

    @property
    def may_offload_to_host(self) -> bool:
        """Return whether both plans with and without offloading to host memory are allowed."""
        places = offload_places(self)
        return OFFLOAD_PLACES[0] in places and any("cpu" in one for one in places)


def offload_places(wanted: SearchRequest) -> list[tuple[Offload, Offload, Offload]]:
    """Return the possible places of activations, parameters and optimizer state, simplest first."""
    offloads = wanted.offloads and wanted.adapters is None
    return [
        three
        for three in (OFFLOAD_PLACES if offloads else OFFLOAD_PLACES[:1])
        if all(
            wanted.keep.get(name, place) == place
            for name, place in zip(OFFLOADED, three, strict=True)
        )
        and not (wanted.on_host and "cpu" in three)
    ]
