"""The default precision of a device, and hints on slow combinations of sizes and precision."""

import torch

from outpace.records.machine import Machine
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.precisions import WIDE, Precision

# CPU features with which bf16 matmuls are faster than fp32, and on which vendor's CPUs. With
# avx512_bf16, bf16 takes 0.2 times as long as fp32 on AMD CPUs, but 1.3 to 1.7 times as long on an
# Intel Xeon without AMX (docs/development/log.md).
_FAST_BF16 = (("amx_bf16", ""), ("avx512_bf16", "AMD"))


def default_precision(
    device: torch.device, machine: Machine, keeps_masters: bool = False
) -> Precision:
    """Return bf16 if the device computes faster in it than in fp32, otherwise fp32.

    On a GPU, return bf16-master if the run supports fp32 master weights (`keeps_masters`). It has
    bf16 weights and a bf16 residual stream: half the activations and no casts of weights, with an
    equally good loss (benchmarks/bf16_master.py).
    """
    if device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return "fp32"
        return "bf16-master" if keeps_masters else "bf16"
    if device.type == "cpu" and any(
        feature in machine.cpu_features and maker in machine.cpu for feature, maker in _FAST_BF16
    ):
        return "bf16"
    return "fp32"


def float8_hints(plan: Plan) -> list[str]:
    """Return a hint if float8 is not compiled: scaling then takes separate passes over memory.

    On one H200, a float8 step took 5.5 times as long as a bf16 step (Llama-3.2-1B, 2026-11-27), and
    0.92 times as long when compiled block by block.
    """
    if plan.precision != "fp8" or plan.compile:
        return []
    return [
        "fp8 without compilation takes several times as long as bf16. Use --compile, or "
        "--precision bf16"
    ]


def shape_hints(plan: Plan, spec: ModelSpec | None, seq_len: int) -> list[str]:
    """Return hints on sizes that are not multiples of 8, unless the precision computes in fp32.

    Tensor cores need multiples of 8 in 16-bit types (NVIDIA, "Train With Mixed Precision", §4.2).
    """
    if plan.precision in WIDE:
        return []
    sizes = {"micro-batch × sequence": plan.micro_batch * seq_len, "sequence": seq_len}
    if spec is not None:
        sizes |= {"vocabulary": spec.vocab, "hidden": spec.hidden, "ffn": spec.ffn}
        sizes["head_dim"] = spec.head_dim
    return [
        f"{name} {size} is not a multiple of 8, so its matmuls are slower in {plan.precision}: "
        f"{-(-size // 8) * 8} would be better"
        for name, size in sizes.items()
        if size % 8
    ] + (
        [
            f"micro-batch {plan.micro_batch} is not a multiple of 8, which some kernels need in "
            f"{plan.precision}: {-(-plan.micro_batch // 8) * 8} may be better"
        ]
        if plan.micro_batch % 8
        else []
    )
