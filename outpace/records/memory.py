"""MemoryAccount: the contents of a rank's memory during a step, traced or measured."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from outpace.records.base import Record

Kind = Literal[
    "weights", "weight copies", "unsharded", "gradients", "optimizer state", "activations",
    "workspaces", "communication", "inputs", "offloaded", "temporary",
]  # fmt: skip
# What each kind holds, in the order of display.
KIND_MEANINGS: Mapping[Kind, str] = MappingProxyType(
    {
        "weights": "this rank's, as kept between steps",
        "weight copies": "in the precision of matmuls",
        "unsharded": "weights gathered from other ranks",
        "optimizer state": "",
        "gradients": "",
        "activations": "saved by forward passes for backward passes",
        "communication": "buffers of collectives",
        "inputs": "",
        "workspaces": "of matrix libraries",
        "temporary": "allocated and freed within a pass",
        "offloaded": "in host memory or on disk, not included in the sum",
    }
)
KINDS = tuple(KIND_MEANINGS)
# Kinds whose names alone do not say what they hold.
_UNCLEAR: tuple[Kind, ...] = ("weight copies", "unsharded", "temporary")
Part = Literal["prepare", "data", "forward", "backward", "communication", "optimizer", "other"]
Source = Literal["traced", "measured", "estimated"]


class Moment(Record):
    """A moment in a training step, and the bytes in memory at that moment, by kind."""

    step: NonNegativeInt
    part: Part
    module: str
    operator: str
    by_kind: dict[Kind, NonNegativeInt]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all kinds except offloaded ones."""
        return sum(size for kind, size in self.by_kind.items() if kind != "offloaded")

    @property
    def location(self) -> str:
        """Return the position in the step: "backward of blocks.11.mlp"."""
        return f"{self.part} of {self.module}" if self.module else self.part


class MemoryAccount(Record):
    """One rank's memory over the first two steps; the first starts without optimizer state.

    `peak` is the moment with the most bytes in live tensors, and `activations_by_module` are the
    activations at that moment. `timeline` has the moments of the second step. For a model that
    outpace does not train, the planner's formula estimates the peak, but not its position in the
    step.

    Measured accounts: `allocated_bytes` is the allocator's maximum, including kernels' workspaces;
    `resident_bytes` is the growth of the process. `reserved_bytes` is what CUDA's allocator holds
    for tensors. `unseen_bytes` is memory outside of tensors (contexts, libraries), and
    `library_bytes` the planner's formula for it. None means unknown.

    `flops` counts the FLOPs of matmuls in one step of this rank, including recomputation, and
    `bytes_moved` the bytes that its operators read and write.
    """

    source: Source
    device: str
    rank: NonNegativeInt
    world_size: PositiveInt
    peak: Moment
    timeline: tuple[Moment, ...]
    activations_by_module: dict[str, NonNegativeInt]
    allocated_bytes: NonNegativeInt | None = None
    resident_bytes: NonNegativeInt | None = None
    reserved_bytes: NonNegativeInt | None = None
    unseen_bytes: NonNegativeInt | None = None
    library_bytes: NonNegativeInt | None = None
    flops: NonNegativeInt = 0
    bytes_moved: NonNegativeInt = 0

    @property
    def peak_memory_bytes(self) -> int:
        """Return the bytes in live tensors at the peak."""
        return self.peak.nbytes

    @property
    def needed_bytes(self) -> int:
        """Return the bytes that the allocator reserves or, if unknown, those of live tensors."""
        return self.reserved_bytes or self.peak_memory_bytes

    @property
    def device_bytes(self) -> int:
        """Return the device memory in use: `needed_bytes`, and the estimate for libraries."""
        return self.needed_bytes + (self.library_bytes or 0)


class MemoryUse(Record):
    """A rank's memory in a run, as traced and as measured; None for what was not done (yet).

    `measured.peak` covers one step; bytes of the allocator or process cover the whole run.
    """

    has_checksum: ClassVar[bool] = True

    traced: MemoryAccount | None = None
    measured: MemoryAccount | None = None


def explain_kinds(shown: Collection[str]) -> str:
    """Explain the kinds of memory in a chart that have unclear names; "" if there are none."""
    meanings = (f"{kind}: {KIND_MEANINGS[kind]}" for kind in _UNCLEAR if kind in shown)
    return "; ".join(meanings)
