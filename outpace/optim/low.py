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
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from outpace.nn.spread import as_spread, is_spread, local, splits
from outpace.nn.torchao import torchao_module
from outpace.optim.compiled import CompiledStep
from outpace.optim.rounding import Noise, drawn, rounded
from outpace.optim.stored import OwnDtypes
from outpace.planner.optimizer_bytes import Kept, block

MOMENTS: dict[str, bool] = {"exp_avg": True, "exp_avg_sq": False}  # whether signed
# Values of small parameters that are put together and stepped as one: a host takes as long to
# launch a step of few values as of many. On a CPU as many as its caches hold.
TOGETHER = {"cpu": 1 << 17, "cuda": 1 << 24}
_FEW = 1 << 15  # values that take little memory in any model


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

    Small parameters are put together and stepped as one, with the same numbers.
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
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            for parameter in stepped:
                if not self.state[parameter]:
                    self.state[parameter].update(self.initial_state(parameter, group))
            if not stepped:
                continue
            torch._foreach_add_([self.state[p]["step"] for p in stepped], 1)
            for batch in _batches([self._part(p, group) for p in stepped]):
                self._update(batch, group)

    def _part(self, parameter: nn.Parameter, group: dict[str, Any]) -> "_Part":
        state = self.state[parameter]
        # Whether it requires gradients, which parts together do not, is a reason to compile anew.
        weight = local(parameter).detach()
        gradient = local(parameter.grad)  # type: ignore[arg-type]
        moments = tuple(self._moment(state, name) for name in MOMENTS)
        return _Part(parameter, state["step"], weight, gradient, moments)

    def _random(self, part: "_Part", group: dict[str, Any]) -> tuple["Randomness", ...]:
        """What draws the numbers that a parameter's moments and weight are rounded by."""
        held = {name: moment[0] for name, moment in zip(MOMENTS, part.moments, strict=True)}
        return tuple(
            self._noise.of(part.parameter, group["number"], what)
            if kept.dtype == torch.bfloat16
            else None
            for what, kept in {**held, "weight": part.weight}.items()
        )

    def _update(self, batch: list["_Part"], group: dict[str, Any]) -> None:
        """Step parts of one kind, each with a row for each block of values that share a scale."""
        first = batch[0]
        numbers = _numbers(first.step, group)
        random = [self._random(part, group) for part in batch]
        if not first.is_dense or (len(batch) == 1 and self._compiled is None):
            step_moments(first.weight, first.gradient, first.moments, random[0], numbers,
                         group["betas"], group["eps"])  # fmt: skip
            return
        rows = [part.rows() for part in batch]
        together = len(batch) > 1
        weight, gradient, *held = (
            torch.cat(each) if together else each[0] for each in zip(*rows, strict=True)
        )
        left = iter(held)
        moments = tuple(
            (next(left), None if scale is None else next(left), table)
            for _, scale, table in first.moments
        )
        arguments = (weight, gradient, moments, _drawn(batch, random), numbers)
        if self._compiled is None:
            step_moments(*arguments, group["betas"], group["eps"])
        else:
            kind = (first.kind, group["betas"], group["eps"])
            self._compiled(kind, *arguments, group["betas"], group["eps"])
        if together:
            weights, _, *kept = zip(*rows, strict=True)
            sizes = [len(one) for one in weights]
            for into, made in zip((weights, *kept), (weight, *held), strict=True):
                torch._foreach_copy_(list(into), list(made.split(sizes)))

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


@dataclass(frozen=True)
class _Part:
    """What of a parameter is on this rank; `step` counts its steps."""

    parameter: nn.Parameter
    step: Tensor
    weight: Tensor
    gradient: Tensor
    moments: tuple[Moment, ...]

    @property
    def length(self) -> int:
        """Of values that share a scale."""
        scale = self.moments[0][1]
        return 1 if scale is None else self.weight.numel() // scale.numel()

    @property
    def is_dense(self) -> bool:
        """Whether all of it can be seen as rows."""
        held = [one for moment in self.moments for one in moment[:2] if one is not None]
        return all(one.is_contiguous() for one in (self.weight, self.gradient, *held))

    @property
    def kind(self) -> Hashable:
        """What parts have in common that a compiled function is for."""
        return (self.length, self.weight.dtype, self.gradient.dtype, self.weight.device)

    def rows(self) -> list[Tensor]:
        """Weight, gradient, and each moment with its scales, where it has such: views of rows."""
        count = self.weight.numel() // self.length
        seen = [self.weight.view(count, -1), self.gradient.view(count, -1)]
        for held, scale, _ in self.moments:
            seen += [held.view(count, -1)] + ([] if scale is None else [scale.view(-1, 1)])
        return seen


def _drawn(batch: list[_Part], random: list[tuple[Randomness, ...]]) -> tuple[Tensor | None, ...]:
    """What is drawn for each part by what draws for it, all in rows; None where nothing is."""
    found: list[Tensor | None] = []
    for same in zip(*random, strict=True):
        bits = [
            drawn(part.weight.shape, one, part.weight.device).view(-1, part.length)
            for part, one in zip(batch, same, strict=True)
            if isinstance(one, torch.Generator)
        ]
        found.append(torch.cat(bits) if len(bits) > 1 else bits[0] if bits else None)
    return tuple(found)


def _batches(parts: list[_Part]) -> Iterator[list[_Part]]:
    """Parts that are stepped at once: alike, and of as many steps. A large one is by itself.

    Together they have at most half the values of the largest, whose step takes more memory then,
    or few.
    """
    largest = max(part.weight.numel() for part in parts)
    counts = _counts([part.step for part in parts])
    waiting: dict[Hashable, list[_Part]] = {}
    held: dict[Hashable, int] = {}
    for part, count in zip(parts, counts, strict=True):
        size = part.weight.numel()
        if not size:  # another rank's
            continue
        most = min(TOGETHER.get(part.weight.device.type, 0), max(largest // 2, _FEW))
        if size > most // 2 or not part.is_dense:
            yield [part]
            continue
        kind = (part.kind, count)
        if held.get(kind, 0) + size > most:
            yield waiting.pop(kind)
            held[kind] = 0
        waiting.setdefault(kind, []).append(part)
        held[kind] = held.get(kind, 0) + size
    yield from waiting.values()


def _counts(steps: list[Tensor]) -> list[float]:
    """How many steps each parameter has had. Without memory there are none that differ."""
    if isinstance(steps[0], FakeTensor) or steps[0].is_meta:
        return [0.0] * len(steps)
    counts: list[float] = torch.stack(steps).tolist()
    return counts


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
