"""Low-rank adapters of frozen weights: LoRA, and QLoRA if the weights are in 4 bits.

Hu et al., "LoRA", arXiv 2106.09685, §4.1: h = W x + (α/r) · B A x, with A (r × in) drawn at random
and B (out × r) initially zero. Dettmers et al., "QLoRA", arXiv 2305.14314, eq. 5.

Adapters are parameters of their matrix's module, `lora_a` and `lora_b`; all other parameters keep
their names.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.nn.block import Linear
from outpace.nn.nf4 import PARTS, NF4Matmul, dequantize, quantize
from outpace.nn.transformer import Transformer, stream
from outpace.records.errors import BadInputError
from outpace.records.plan import LoraTarget, Plan

# Path of each target's matrix within a block.
PLACES: Mapping[LoraTarget, str] = {
    "q": "attention.q",
    "k": "attention.k",
    "v": "attention.v",
    "out": "attention.out",
    "gate": "mlp.gate",
    "up": "mlp.up",
    "down": "mlp.down",
}


class LoraLinear(Linear):
    """A frozen linear layer with the weights of `base`, and a LoRA adapter unless `rank` is 0."""

    lora_a: nn.Parameter | None
    lora_b: nn.Parameter | None

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float) -> None:
        has_bias = base.bias is not None
        super().__init__(base.in_features, base.out_features, bias=has_bias, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = scale, dropout
        zeros = base.weight.detach().new_zeros
        a = nn.Parameter(zeros(rank, base.in_features)) if rank else None
        b = nn.Parameter(zeros(base.out_features, rank)) if rank else None
        self.register_parameter("lora_a", a)
        self.register_parameter("lora_b", b)

    def frozen_output(self, x: Tensor) -> Tensor:
        """Compute W x + b."""
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        if self.lora_a is None or self.lora_b is None:
            return self.frozen_output(x)
        low = F.linear(F.dropout(x, self.dropout, self.training), self.lora_a)
        return self.frozen_output(x) + F.linear(low * self.scale, self.lora_b)

    def base_weight(self) -> Tensor:
        """Return the frozen weight W, (out, in)."""
        return self.weight


class NF4Linear(LoraLinear):
    """A LoraLinear over a 4-bit matrix, whose tensors are parameters, so ZeRO-3 can shard them."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float) -> None:
        super().__init__(base, rank, scale, dropout)
        self.shape, self.dtype = base.weight.shape, base.weight.dtype
        self.register_parameter("weight", None)
        for name, tensor in quantize(base.weight).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def _quantized_tensors(self) -> list[Tensor]:
        return [self.get_parameter(name) for name in PARTS]

    def frozen_output(self, x: Tensor) -> Tensor:
        output: Tensor = NF4Matmul.apply(x, self.shape, *self._quantized_tensors())  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def base_weight(self) -> Tensor:
        """Return W, (out, in), dequantized in the dtype of computation."""
        return dequantize(self._quantized_tensors(), self.shape, self.dtype)


def add_adapters(
    model: Transformer, plan: Plan, seed: int, device: torch.device | None = None
) -> Transformer:
    """Freeze a model and add the plan's adapters in place; do nothing if the plan has none.

    With base nf4, the blocks' matrices are quantized one by one on `device` and stay there, so the
    unquantized model need not fit. Adapters on the meta device get no values here; `first_value`
    returns their initial values. Raises BadInputError for a target that the model does not have.
    """
    if plan.lora_rank is None:
        return model
    model.requires_grad_(False)
    targets = _resolve_targets(model, plan)
    kind = NF4Linear if plan.base == "nf4" else LoraLinear
    for name, target, linear in list(_adaptable_matrices(model)):
        rank = plan.lora_rank if target in targets else 0
        if not rank and plan.base == "fp32":
            continue
        parent, _, leaf = name.rpartition(".")
        placed = linear if device is None else linear.to(device)
        adapted = kind(placed, rank, plan.lora_scale, plan.lora_dropout)
        if adapted.lora_a is not None and not adapted.lora_a.is_meta:
            with torch.no_grad():
                adapted.lora_a.copy_(_draw_a(tuple(adapted.lora_a.shape), seed, f"{name}.lora_a"))
        setattr(model.get_submodule(parent), leaf, adapted)
    return model


def _adaptable_matrices(model: nn.Module) -> Iterator[tuple[str, LoraTarget, nn.Linear]]:
    for name, module in model.named_modules():
        for target, place in PLACES.items():
            if isinstance(module, nn.Linear) and name.endswith(f".{place}"):
                yield name, target, module


def _resolve_targets(model: Transformer, plan: Plan) -> set[LoraTarget]:
    available = {target for _, target, _ in _adaptable_matrices(model)}
    if "all" in plan.lora_targets:
        return available
    for target in plan.lora_targets:
        if target not in available:
            raise BadInputError(
                f"--lora-targets {target}: the model's MLP has no gate. Use any of "
                f"{', '.join(name for name in PLACES if name in available)}, or all."
            )
    return set(plan.lora_targets)


def first_value(
    name: str, shapes: Mapping[str, tuple[int, ...]], rank: int | None, seed: int
) -> Tensor | None:
    """Return the initial value of an adapter's parameter; None for any other parameter.

    `shapes`: the shapes of the transformer's parameters, without adapters.
    """
    module, _, kind = name.rpartition(".")
    if rank is None or kind not in ("lora_a", "lora_b"):
        return None
    out, inner = shapes[f"{module}.weight"]
    return _draw_a((rank, inner), seed, name) if kind == "lora_a" else torch.zeros(out, rank)


def _draw_a(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """Draw matrix A (r, in) of an adapter from U(−1/√in, 1/√in), as in the code of LoRA's paper.

    Each adapter has a random stream of its own, by `name`.
    """
    bound = 1 / math.sqrt(shape[1])
    drawn = torch.empty(shape, dtype=torch.float32, device="cpu")
    return drawn.uniform_(-bound, bound, generator=stream(seed, name))


def adapters(model: nn.Module) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return A (r, in), B (out, r) and the scale of B · A of each adapter, by module name."""
    found: dict[str, tuple[Tensor, Tensor, float]] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear) and module.lora_a is not None:
            assert module.lora_b is not None
            found[name] = (module.lora_a, module.lora_b, module.scale)
    return found


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Return the number of all weights, whatever their format, and of trained weights."""
    in_4_bits = [module for module in model.modules() if isinstance(module, NF4Linear)]
    parts = {id(part) for module in in_4_bits for part in module._quantized_tensors()}
    counted = sum(p.numel() for p in model.parameters() if id(p) not in parts)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return counted + sum(module.shape.numel() for module in in_4_bits), trained
