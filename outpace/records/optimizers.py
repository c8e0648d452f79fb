"""Optimizers and precisions by name, with what is known of each before anything runs."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

OptimizerName = Literal[
    "adamw-fused", "adamw-foreach", "adamw-for-loop", "adamw-bf16", "adamw-8bit", "adamw-4bit",
    "adafactor", "muon", "sgd",
]  # fmt: skip
Precision = Literal[
    "fp64", "fp32", "tf32", "bf16", "bf16-master", "bf16-pure", "fp16", "fp16-master", "fp16-pure",
    "fp8",
]  # fmt: skip
# What can be trained in, and NVIDIA Apex's levels (nvidia.github.io/apex/amp.html, "opt_level").
AskedPrecision = Literal[
    "fp32", "tf32", "bf16", "bf16-master", "bf16-pure", "fp16", "fp16-master", "fp16-pure", "fp8",
    "O0", "O1", "O2", "O3",
]  # fmt: skip

LEVELS: Mapping[str, Precision] = {
    "O0": "fp32",
    "O1": "fp16",
    "O2": "fp16-master",
    "O3": "fp16-pure",
}
MEANS: Mapping[str, str] = {
    "O0": "everything in fp32",
    "O1": "weights in fp32, matrix products in fp16 by autocast, a dynamic loss scale",
    "O2": "weights and gradients in fp16, fp32 master weights in the optimizer, a dynamic loss "
    "scale (norms are fp16 here, with fp32 inside)",
    "O3": "weights and gradients in fp16, no loss scale; AdamW's moments in bf16, which has the "
    "range that fp16 lacks",
}

# The same numbers from any number of processes, and nothing drawn: what `verify` can prove.
EXACT: tuple[OptimizerName, ...] = (
    "adamw-fused", "adamw-foreach", "adamw-for-loop", "adafactor", "sgd",
)  # fmt: skip
# Compute in fp32, whatever weights and states are kept in, and round bf16 weights stochastically.
LOW: tuple[OptimizerName, ...] = ("adamw-bf16", "adamw-8bit", "adamw-4bit")
# Whose 16-bit weights are the only ones: small updates would be lost by rounding to nearest.
PURE: tuple[Precision, ...] = ("bf16-pure", "fp16-pure")
# The dtype in which weights are kept, where it is not fp32 (or fp64).
WEIGHTS: Mapping[Precision, Literal["bf16", "fp16"]] = {
    "bf16-master": "bf16",
    "bf16-pure": "bf16",
    "fp16-pure": "fp16",
    "fp16-master": "fp16",
}
# Whose optimizer keeps the weights in fp32 too, steps those, and rounds the others from them.
MASTERS: tuple[Precision, ...] = ("bf16-master", "fp16-master")


class ShardDtypes(NamedTuple):
    """Dtypes that ranks which split parameters send: gathered parameters and reduced gradients."""

    gathered: Literal["bf16", "fp16"]
    reduced: Literal["fp32"]


# Under `fully_shard` (ZeRO-2, ZeRO-3, HSDP, 3d, one rank's offloaded parameters), where these are
# not the dtype of the weights: parameters are gathered as products read them, and gradients, which
# products make in that dtype, are added up over ranks and micro-batches in fp32 (torch's
# MixedPrecisionPolicy). A unit that has weights of integers (nf4) sends all as it is.
SHARD_DTYPES: Mapping[Precision, ShardDtypes] = {
    "bf16": ShardDtypes("bf16", "fp32"),
    # Without autocast; the shards are the masters, and nothing else is kept of weights.
    "bf16-master": ShardDtypes("bf16", "fp32"),
    "fp16": ShardDtypes("fp16", "fp32"),
    "fp8": ShardDtypes("bf16", "fp32"),
}
# What plans that offload weights or states are in where nobody asks for a precision and others are
# in that of the key: master weights do not go with offloading.
WHERE_OFFLOADED: Mapping[Precision, Precision] = {"bf16-master": "bf16"}
# A dynamic loss scale.
SCALED: tuple[Precision, ...] = ("fp16", "fp16-master")


def default_optimizer(precision: Precision) -> OptimizerName:
    """AdamW in the form that a precision needs."""
    return "adamw-bf16" if precision in PURE else "adamw-fused"
