"""AdamW with moments in 16, 8 or 4 bits, over weights of 32 or 16 bits.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, §2: each block of a
moment is divided by its largest magnitude and stored as codes into a table of 256 values. Li et
al., "Memory Efficient Optimizers with 4-bit States", NeurIPS 2023, §4: with 16, where the second
moment's table has no zero, which would be divided by. The tables are torchao's.

torchao's own optimizers are not used. Their states are tensor subclasses that a background save
of a checkpoint cannot copy, their blocks go on from row to row and so depend on how a tensor is
sharded, their rounding draws other numbers on each replica, and each step is compiled, on a CPU
too. Here blocks are parts of rows: codes and scales are plain tensors that are sharded as the
parameter is, with the same values under any sharding by rows.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from outpace.nn.spread import as_spread, is_spread, local, splits
from outpace.nn.torchao import torchao_module
from outpace.optim.each import step_each
from outpace.optim.rounding import Noise, rounded
from outpace.optim.stored import OwnDtypes
from outpace.planner.optimizer_bytes import Kept, block

MOMENTS: dict[str, bool] = {"exp_avg": True, "exp_avg_sq": False}  # whether signed


class Table:
    """The values that codes stand for, sorted, and the codes of values in [−1, 1]."""

    def __init__(self, bits: Literal[4, 8], signed: bool, device: torch.device) -> None:
        made = torchao_module("optim.quant_utils", f"--optimizer adamw-{bits}bit")
        with unset_fake_temporarily():  # values are read on the way
            if bits == 8:
                values = made.create_dynamic_map(signed)
            elif signed:
                values = made.create_dynamic_map(True, 3, 4)
            else:
                values = [number / 16 for number in range(1, 17)]
        self.bits = bits
        self.values = torch.tensor(values, dtype=torch.float32, device=device)
        self._between = (self.values[1:] + self.values[:-1]) / 2

    def codes(self, x: Tensor) -> Tensor:
        """The nearest values' numbers, uint8; of 4 bits two in a byte, neighbours of a row."""
        codes = torch.bucketize(x, self._between, right=True, out_int32=True).to(torch.uint8)
        return codes if self.bits == 8 else codes[..., ::2] << 4 | codes[..., 1::2]

    def read(self, codes: Tensor) -> Tensor:
        """The values of codes, fp32."""
        if self.bits == 4:
            codes = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2)
        # Indexing would widen the codes to 64 bits.
        found = torch.index_select(self.values, 0, codes.reshape(-1).int())
        return found.view(codes.shape)


class LowAdamW(OwnDtypes):
    """AdamW that computes in fp32 and keeps its moments as `kept` says.

    Moments in bf16 and weights in bf16 are rounded stochastically: a second moment changes by
    1 − β₂ of itself in a step, which is less than half of bf16's last bit for β₂ > 0.998, and a
    weight by less still. `noise` is asked for the group's "number", which is the step's.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        kept: Kept,
        noise: Noise,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self._kept: Kept = kept
        self._noise = noise
        self._tables: dict[tuple[bool, torch.device], Table] = {}
        if kept != "bf16":
            torchao_module("optim.quant_utils", f"--optimizer adamw-{kept}")
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "number": 0}
        super().__init__(groups, values)

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        """Zeros."""
        state = {"step": torch.zeros((), dtype=torch.float32)}
        for moment in MOMENTS:
            state |= self._zeros(parameter, moment)
        return state

    def _zeros(self, parameter: nn.Parameter, moment: str) -> dict[str, Tensor]:
        if self._kept == "bf16":
            return {moment: torch.zeros_like(parameter, dtype=torch.bfloat16)}
        here, shape = local(parameter), tuple(parameter.shape)
        length = block(shape, self._kept, split=_columns_over(parameter))
        if length is None:
            return {moment: torch.zeros_like(parameter, dtype=torch.float32)}
        *rows, width = here.shape
        packed = 2 if self._kept == "4bit" else 1
        codes = here.new_zeros((*rows, width // packed), dtype=torch.uint8)
        scale = here.new_zeros((*rows, width // length), dtype=torch.float32)
        return {
            moment: as_spread(codes, (*shape[:-1], shape[-1] // packed), parameter),
            f"{moment}_scale": as_spread(scale, (*shape[:-1], shape[-1] // length), parameter),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        step_each(self, self.initial_state, self._update)

    def _update(
        self, parameter: nn.Parameter, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        """Loshchilov and Hutter, ICLR 2019, algorithm 2."""
        (beta1, beta2), lr, step = group["betas"], group["lr"], state["step"]
        weight, gradient = local(parameter), local(parameter.grad).float()  # type: ignore[arg-type]
        mean = self._read(state, "exp_avg").lerp_(gradient, 1 - beta1)
        square = self._read(state, "exp_avg_sq").lerp_(gradient.square(), 1 - beta2)
        for moment, value in (("exp_avg", mean), ("exp_avg_sq", square)):
            self._write(parameter, state, moment, value, group)
        root = square.sqrt_().div_((1 - beta2**step).sqrt()).add_(group["eps"])
        change = mean.div_(root).mul_(lr / (1 - beta1**step))
        wide = weight.float()  # the weight itself, where it is fp32
        wide.mul_(1 - lr * group["weight_decay"]).sub_(change)
        if weight.dtype == torch.bfloat16:
            weight.copy_(rounded(wide, self._noise.of(parameter, group["number"], "weight")))
        elif wide is not weight:
            weight.copy_(wide)

    def _read(self, state: dict[str, Tensor], moment: str) -> Tensor:
        """A moment in fp32, in memory of its own."""
        held = local(state[moment])
        if f"{moment}_scale" not in state:
            return held.to(torch.float32, copy=True)
        scale = local(state[f"{moment}_scale"])
        blocks = self._table(moment, held.device).read(held).unflatten(-1, (scale.shape[-1], -1))
        return torch.flatten(blocks.mul_(scale.unsqueeze(-1)), -2)

    def _write(
        self,
        parameter: nn.Parameter,
        state: dict[str, Tensor],
        moment: str,
        value: Tensor,
        group: dict[str, Any],
    ) -> None:
        held = local(state[moment])
        if held.dtype == torch.bfloat16:
            held.copy_(rounded(value, self._noise.of(parameter, group["number"], moment)))
        elif held.dtype == torch.float32:
            held.copy_(value)
        else:
            scale = local(state[f"{moment}_scale"])
            blocks = value.unflatten(-1, (scale.shape[-1], -1))
            scale.copy_(blocks.abs().amax(-1).clamp_(min=1e-12))
            shares = (blocks / scale.unsqueeze(-1)).flatten(-2)
            held.copy_(self._table(moment, held.device).codes(shares))

    def _table(self, moment: str, device: torch.device) -> Table:
        signed = MOMENTS[moment]
        if (signed, device) not in self._tables:
            bits: Literal[4, 8] = 8 if self._kept == "8bit" else 4
            self._tables[signed, device] = Table(bits, signed, device)
        return self._tables[signed, device]


def _columns_over(parameter: Tensor) -> int:
    """Over how many ranks a parameter's rows are cut into pieces."""
    if not is_spread(parameter):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placed, size in sizes if splits(placed, parameter.ndim - 1))
