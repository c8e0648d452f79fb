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
from outpace.optim.compiled import CompiledStep
from outpace.optim.each import step_each
from outpace.optim.rounding import Noise, drawn, rounded
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
    `compiled`: step by kernels that torch.compile makes of the same operations. Sums of products
    may be rounded once rather than twice there; what is drawn is alike, and what shares a scale.
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
        compiled: bool = False,
    ) -> None:
        self._kept: Kept = kept
        self._compiled = CompiledStep(step_moments) if compiled else None
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
        weight, gradient = local(parameter), local(parameter.grad)  # type: ignore[arg-type]
        moments = tuple(self._moment(state, name) for name in MOMENTS)
        rounds = {"exp_avg": moments[0][0], "exp_avg_sq": moments[1][0], "weight": weight}
        noise = tuple(
            self._noise.of(parameter, group["number"], what)
            if held.dtype == torch.bfloat16
            else None
            for what, held in rounds.items()
        )
        numbers = _numbers(state["step"], group)
        dense = (weight, gradient, *(one for moment in moments for one in moment[:2]))
        if self._compiled is not None and all(one is None or one.is_contiguous() for one in dense):
            self._step_compiled(weight, gradient, moments, noise, numbers, group)
        else:
            step_moments(weight, gradient, moments, noise, numbers, group["betas"], group["eps"])

    def _step_compiled(
        self,
        weight: Tensor,
        gradient: Tensor,
        moments: tuple["Moment", ...],
        noise: tuple[torch.Generator | None, ...],
        numbers: tuple[Tensor, Tensor, Tensor],
        group: dict[str, Any],
    ) -> None:
        """As `step_moments`, a row of each tensor being a block of values that share a scale."""
        assert self._compiled is not None
        scale = moments[0][1]
        length = 1 if scale is None else weight.numel() // scale.numel()
        random = tuple(
            None if one is None else drawn(weight.shape, one, weight.device).view(-1, length)
            for one in noise
        )
        rows = tuple(
            (held.view(weight.numel() // length, -1), None if s is None else s.view(-1, 1), table)
            for held, s, table in moments
        )
        kind = (length, weight.dtype, gradient.dtype, weight.device, group["betas"], group["eps"])
        self._compiled(
            kind, weight.view(-1, length), gradient.view(-1, length), rows, random, numbers,
            group["betas"], group["eps"],
        )  # fmt: skip

    def _moment(self, state: dict[str, Tensor], name: str) -> "Moment":
        held = local(state[name])
        if f"{name}_scale" not in state:
            return held, None, None
        return held, local(state[f"{name}_scale"]), self._table(name, held.device)

    def _table(self, moment: str, device: torch.device) -> Table:
        signed = MOMENTS[moment]
        if (signed, device) not in self._tables:
            bits: Literal[4, 8] = 8 if self._kept == "8bit" else 4
            self._tables[signed, device] = Table(bits, signed, device)
        return self._tables[signed, device]


# A moment as it is kept, the scales of its blocks and what its codes stand for, where it has such.
Moment = tuple[Tensor, Tensor | None, Table | None]
# Random numbers, or what draws them, for a moment or weight of bf16.
Randomness = torch.Generator | Tensor | None


def step_moments(
    weight: Tensor,
    gradient: Tensor,
    moments: tuple[Moment, ...],
    noise: tuple[Randomness, ...],
    numbers: tuple[Tensor, Tensor, Tensor],
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update a weight and its two moments, in place.

    Loshchilov and Hutter, ICLR 2019, algorithm 2. `noise`: of both moments and of the weight.
    `numbers`: see `_numbers`.
    """
    rate, root_of_share, kept = numbers
    gradient = gradient.float()
    mean = _read(*moments[0]).lerp_(gradient, 1 - betas[0])
    square = _read(*moments[1]).lerp_(gradient.square(), 1 - betas[1])
    for moment, value, random in zip(moments, (mean, square), noise[:2], strict=True):
        _write(*moment, value, random)
    root = square.sqrt_().div_(root_of_share).add_(eps)
    change = mean.div_(root).mul_(rate)
    wide = weight.float()  # the weight itself, where it is fp32
    wide.mul_(kept).sub_(change)
    random = noise[2]
    if random is not None:
        weight.copy_(rounded(wide, random))
    elif wide is not weight:
        weight.copy_(wide)


def _numbers(step: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """lr / (1 − β₁ᵗ), √(1 − β₂ᵗ), and what decay leaves of a weight; fp32 on the CPU."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    kept = torch.full_like(step, 1 - lr * group["weight_decay"])
    return lr / (1 - beta1**step), (1 - beta2**step).sqrt(), kept


def _read(held: Tensor, scale: Tensor | None, table: Table | None) -> Tensor:
    """A moment in fp32, in memory of its own."""
    if scale is None or table is None:
        return held.to(torch.float32, copy=True)
    blocks = table.read(held).unflatten(-1, (scale.shape[-1], -1))
    return torch.flatten(blocks.mul_(scale.unsqueeze(-1)), -2)


def _write(
    held: Tensor, scale: Tensor | None, table: Table | None, value: Tensor, random: Randomness
) -> None:
    if random is not None:
        held.copy_(rounded(value, random))
    elif scale is None or table is None:
        held.copy_(value)
    else:
        blocks = value.unflatten(-1, (scale.shape[-1], -1))
        scale.copy_(blocks.abs().amax(-1).clamp_(min=1e-12))
        shares = (blocks / scale.unsqueeze(-1)).flatten(-2)
        held.copy_(table.codes(shares))


def _columns_over(parameter: Tensor) -> int:
    """Over how many ranks a parameter's rows are cut into pieces."""
    if not is_spread(parameter):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placed, size in sizes if splits(placed, parameter.ndim - 1))
