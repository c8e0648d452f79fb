"""AdamW over fp32 master weights, as one kernel for all parameters of a group.

torch's fused AdamW needs gradients in the masters' dtype. A step over 16-bit weights then takes
several passes over memory: gradients are cast to fp32 and multiplied by the clipping factor, AdamW
runs, and the weights are rounded from the masters. This kernel reads and writes each value once,
and so moves 28 bytes per parameter (with its moments) instead of 46. On an H200, torch's kernels
for this part of a step of GPT-2 took 1.9 of 29.7 ms, in 51 launches.

The arithmetic is that of torch (Loshchilov & Hutter, ICLR 2019, algorithm 2, in fp32). The kernel
is written in Triton: a table on the device has the addresses of all tensors, and each program
updates one block of one tensor.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.records.errors import error_summary

BLOCK = 2048  # elements per program
ALIGNED_BYTES = 16  # alignment of addresses, so that loads are vectorised
State = dict[str, Any]


class Addresses(NamedTuple):
    """Memory addresses of parameters and of their gradients."""

    weights: tuple[int, ...]
    gradients: tuple[int, ...]


@dataclass
class _Table:
    """Tables in device memory that tell each program of the Triton kernel what to update.

    They contain the addresses of all tensors and, for each program, its tensor and the first
    element of its block.
    """

    addresses: Addresses  # gradients move each step; weights move when their memory is replaced
    gradient_table: Tensor  # (tensors,) int64
    fixed_table: Tensor  # (5 × tensors,) int64: weights, masters, both moments, steps
    sizes: Tensor  # (tensors,) int64: elements
    owners: Tensor  # (programs,) int32: the tensor of each program
    starts: Tensor  # (programs,) int64: the first element of each program's block


class FusedMasterAdamW:
    """A Triton kernel that updates fp32 master weights by AdamW and rounds them to the weights."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], _Table] = {}
        self._runs: bool | None = None  # whether Triton can build the kernel here; None until tried

    def forget(self) -> None:
        """Drop the cached addresses. Call this after optimizer states have moved in memory."""
        self._tables.clear()

    def step(
        self,
        group: dict[str, Any],
        parameters: Sequence[nn.Parameter],
        states: Sequence[State],
        factor: Tensor | None,
        addresses: Addresses,
    ) -> bool:
        """Step a group's parameters with the kernel; return False if the kernel cannot be built.

        `addresses` are those of the parameters and their gradients. `states` have "master",
        "exp_avg", "exp_avg_sq" and "step". `factor`, one fp32 value on the device, multiplies the
        gradients. If Triton cannot build the kernel (for example, without a C compiler), this warns
        once and changes nothing.
        """
        if self._runs is False:
            return False
        try:
            self._launch(group, parameters, states, factor, addresses)
        except Exception as error:
            if self._runs:
                raise
            self._runs = False
            warnings.warn(
                f"Triton cannot build the optimizer's kernel ({error_summary(error)}), so torch's "
                "own kernels are used.",
                stacklevel=2,
            )
            return False
        self._runs = True
        torch._foreach_add_([state["step"] for state in states], 1)
        return True

    def _launch(
        self,
        group: dict[str, Any],
        parameters: Sequence[nn.Parameter],
        states: Sequence[State],
        factor: Tensor | None,
        addresses: Addresses,
    ) -> None:
        table, gradient = self._current_table(parameters, states, addresses), parameters[0].grad
        assert gradient is not None
        beta1, beta2 = group["betas"]
        _load_kernel()[(len(table.owners),)](
            table.gradient_table,
            table.fixed_table,
            table.sizes,
            table.owners,
            table.starts,
            table.gradient_table if factor is None else factor,
            len(parameters),
            group["lr"],
            group["lr"] * group["weight_decay"],
            beta1,
            1 - beta1,
            math.log(beta1),
            beta2,
            1 - beta2,
            math.log(beta2),
            group["eps"],
            HAS_FACTOR=factor is not None,
            GRADIENT=_triton_dtype(gradient.dtype),
            WEIGHT=_triton_dtype(parameters[0].dtype),
            BLOCK=BLOCK,
            num_warps=8,
        )

    def _current_table(
        self, parameters: Sequence[nn.Parameter], states: Sequence[State], addresses: Addresses
    ) -> _Table:
        key = tuple(map(id, parameters))
        table = self._tables.get(key)
        if table is None or table.addresses.weights != addresses.weights:
            table = self._tables[key] = _make_table(parameters, states, addresses)
        elif table.addresses.gradients != addresses.gradients:
            table.addresses = addresses
            table.gradient_table = _copy_to_device(addresses.gradients, parameters[0].device)
        return table


def gradient_addresses(
    group: dict[str, Any], parameters: Sequence[nn.Parameter]
) -> Addresses | None:
    """Return the addresses of parameters and gradients; None if the kernel does not support them.

    The kernel supports plain, aligned, dense CUDA tensors in groups with AdamW's option `fused`.
    """
    if not group.get("fused") or group.get("amsgrad") or group.get("maximize"):
        return None
    if parameters[0].device.type != "cuda" or not has_triton():
        return None
    if any(type(parameter) is not nn.Parameter for parameter in parameters):
        return None
    return addresses_of(parameters)


def addresses_of(parameters: Sequence[nn.Parameter]) -> Addresses | None:
    """Return the addresses of parameters and gradients; None if any is not aligned and dense."""
    weights = aligned_addresses(parameters)
    gradients = aligned_addresses([p.grad for p in parameters if p.grad is not None])
    return None if weights is None or gradients is None else Addresses(weights, gradients)


def aligned_addresses(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Return the addresses of contiguous, 16-byte aligned tensors of one dtype; None for others."""
    if len({one.dtype for one in tensors}) != 1:
        return None
    addresses = tuple(one.data_ptr() for one in tensors)
    fine = all(one.is_contiguous() for one in tensors)
    return addresses if fine and not any(at % ALIGNED_BYTES for at in addresses) else None


@cache
def has_triton() -> bool:
    """Return whether Triton is installed, as it is with torch's CUDA builds."""
    return find_spec("triton") is not None


def _make_table(
    parameters: Sequence[nn.Parameter], states: Sequence[State], addresses: Addresses
) -> _Table:
    device = parameters[0].device
    # a step without the kernel may leave step counts on the host, where the kernel cannot read them
    for state in states:
        state["step"] = state["step"].to(device)
    names = ("master", "exp_avg", "exp_avg_sq", "step")
    fixed = [*addresses.weights]
    for name in names:
        fixed += [state[name].data_ptr() for state in states]
    sizes = [parameter.numel() for parameter in parameters]
    blocks = [(owner, start) for owner, size in enumerate(sizes) for start in range(0, size, BLOCK)]
    owners, starts = zip(*blocks, strict=True)
    return _Table(
        addresses,
        _copy_to_device(addresses.gradients, device),
        _copy_to_device(fixed, device),
        _copy_to_device(sizes, device),
        _copy_to_device(owners, device).int(),
        _copy_to_device(starts, device),
    )


def _copy_to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy integers to a device asynchronously, so that the host does not wait."""
    on_host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[
        dtype
    ]


@cache
def _load_kernel() -> Any:
    from outpace.optim.fused_master_kernel import step_kernel

    return step_kernel
