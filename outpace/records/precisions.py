"""Table of precisions: the dtypes of computation, storage and communication.

The planner, layouts and exports take precision-specific facts from here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Precision = Literal[
    "fp64", "fp32", "tf32", "bf16", "bf16-master", "bf16-pure", "fp16", "fp16-master", "fp16-pure",
    "fp8",
]  # fmt: skip
# Precisions for training, and NVIDIA Apex's levels (nvidia.github.io/apex/amp.html, "opt_level").
AskedPrecision = Literal[
    "fp32", "tf32", "bf16", "bf16-master", "bf16-pure", "fp16", "fp16-master", "fp16-pure", "fp8",
    "O0", "O1", "O2", "O3",
]  # fmt: skip
LowDtype = Literal["bf16", "fp16"]

LEVELS: Mapping[str, Precision] = {
    "O0": "fp32",
    "O1": "fp16",
    "O2": "fp16-master",
    "O3": "fp16-pure",
}
MEANS: Mapping[str, str] = {
    "O0": "everything in fp32",
    "O1": "weights in fp32, matmuls in fp16 by autocast, a dynamic loss scale",
    "O2": "weights and gradients in fp16, fp32 master weights in the optimizer, a dynamic loss "
    "scale (norms are fp16 here, with fp32 inside)",
    "O3": "weights and gradients in fp16, no loss scale; AdamW's moments in bf16, which has the "
    "range that fp16 lacks",
}


class ShardDtypes(NamedTuple):
    """Dtypes in which sharded parameters are gathered, and their gradients reduced."""

    gathered: LowDtype
    reduced: Literal["fp32"]


@dataclass(frozen=True)
class PrecisionTraits:
    """Traits of a precision.

    `matmuls`: the dtype of matmuls on a device that supports it; under fp8, everything except
    matmuls of blocks uses `low`. `low`: the 16-bit dtype in which the forward pass computes, None
    if it computes in the dtype of the weights. `weights`: the dtype in which weights are stored.
    `masters`: the optimizer updates fp32 master weights and rounds them to the model's weights.
    `scaled`: the loss is multiplied by a dynamic scale. `shards`: see SHARD_DTYPES.
    `where_offloaded`: the precision that replaces this one as the default for plans that offload
    weights or optimizer states, because master weights cannot be offloaded.
    """

    matmuls: Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
    low: LowDtype | None = None
    weights: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    masters: bool = False
    scaled: bool = False
    shards: ShardDtypes | None = None
    where_offloaded: Precision | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes per element of the weights."""
        return {"fp64": 8, "fp32": 4}.get(self.weights, 2)

    @property
    def shard_bytes(self) -> tuple[int, int]:
        """Bytes per element sent to gather sharded parameters, and to reduce their gradients.

        Estimates of time, memory and network traffic all use this definition.
        """
        return (self.weight_bytes,) * 2 if self.shards is None else (2, 4)

    @property
    def operand_bytes(self) -> int:
        """Bytes per element of the matmul operands that the forward pass saves."""
        return self.weight_bytes if self.low is None else 2


PRECISION_TRAITS: Mapping[Precision, PrecisionTraits] = {
    "fp64": PrecisionTraits("fp32", weights="fp64"),  # the catalog has no rates of fp64
    "fp32": PrecisionTraits("fp32"),
    "tf32": PrecisionTraits("tf32"),  # the operands are fp32; tensor cores round them
    "bf16": PrecisionTraits("bf16", "bf16", shards=ShardDtypes("bf16", "fp32")),
    # Without autocast: the shards are the master weights, and no other copy is kept.
    "bf16-master": PrecisionTraits(
        "bf16", "bf16", "bf16", masters=True, shards=ShardDtypes("bf16", "fp32"),
        where_offloaded="bf16",
    ),
    "bf16-pure": PrecisionTraits("bf16", "bf16", "bf16"),
    "fp16": PrecisionTraits("fp16", "fp16", scaled=True, shards=ShardDtypes("fp16", "fp32")),
    "fp16-master": PrecisionTraits("fp16", "fp16", "fp16", masters=True, scaled=True),
    "fp16-pure": PrecisionTraits("fp16", "fp16", "fp16"),
    "fp8": PrecisionTraits("fp8", "bf16", shards=ShardDtypes("bf16", "fp32")),
}  # fmt: skip


def precisions_that(has: Callable[[PrecisionTraits], bool]) -> tuple[Precision, ...]:
    """Return the precisions whose traits satisfy `has`, in the order of PRECISION_TRAITS."""
    return tuple(name for name, traits in PRECISION_TRAITS.items() if has(traits))


# The dtype of the weights of precisions that keep them in 16 bits.
WEIGHTS: Mapping[Precision, LowDtype] = {
    name: traits.low
    for name, traits in PRECISION_TRAITS.items()
    if traits.low is not None and traits.weight_bytes == 2
}
MASTERS = precisions_that(lambda traits: traits.masters)
# Precisions with only 16-bit weights, where rounding to nearest would lose small updates.
PURE = tuple(name for name in WEIGHTS if name not in MASTERS)
# Precisions with more than 16 bits throughout.
WIDE = precisions_that(lambda traits: traits.low is None)
# Precisions whose fp32 weights are rounded to 16 bits when the forward pass reads them.
AUTOCAST = precisions_that(lambda traits: traits.low is not None and traits.weights == "fp32")
COMPUTES_IN_BF16 = precisions_that(lambda traits: traits.low == "bf16")
COMPUTES_IN_FP16 = precisions_that(lambda traits: traits.low == "fp16")
SCALED = precisions_that(lambda traits: traits.scaled)
# Dtypes under `fully_shard` (ZeRO-2, ZeRO-3, HSDP, 3d, one rank's offloaded parameters) that differ
# from the weights' dtype: parameters are gathered in the dtype that matmuls read, and gradients,
# computed in that dtype, are summed over ranks and micro-batches in fp32 (torch's
# MixedPrecisionPolicy). A unit with integer weights (nf4) sends everything as it is stored.
SHARD_DTYPES: Mapping[Precision, ShardDtypes] = {
    name: traits.shards for name, traits in PRECISION_TRAITS.items() if traits.shards is not None
}
WHERE_OFFLOADED: Mapping[Precision, Precision] = {
    name: traits.where_offloaded
    for name, traits in PRECISION_TRAITS.items()
    if traits.where_offloaded is not None
}
