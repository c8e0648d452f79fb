"""Low-rank adapters of a plan, and the matrices of a block that have adapters."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from outpace.records.errors import BadInputError
from outpace.records.outline import Outline
from outpace.records.plan import Base, LoraTarget, Plan, Strategy

# A plan's settings of adapters.
ADAPTER_NAMES = ("lora_rank", "lora_alpha", "lora_targets", "lora_dropout", "base")
# Strategies whose memory with adapters is known (`planner.memory.adapters`).
ADAPTER_STRATEGIES: tuple[Strategy, ...] = ("single", "ddp", "zero3", "hsdp")
# The values of a plan's settings for which the memory and time of adapters are known.
_KNOWN: Mapping[str, Collection[Any]] = {
    "strategy": ADAPTER_STRATEGIES, "tp": (1,), "cp": (1,), "pp": (1,), "ep": (1,),
    "offload_activations": ("none",), "offload_parameters": ("none",),
    "offload_optimizer": ("none",), "optimizer_in_backward": (False,),
}  # fmt: skip
# Other settings that prevent an estimate: Muon's time is known only for whole matrices.
_UNKNOWN: Mapping[str, Collection[Any]] = {"precision": ("fp8", "fp64"), "optimizer": ("muon",)}
# Dettmers et al., "QLoRA", arXiv 2305.14314, §3, as nn.nf4 stores it: two values per byte, an 8-bit
# scale per 64 values, an fp32 scale per 256 of these, and their offset and 256 levels.
_BLOCK, _SCALES_BLOCK, _MATRIX_BYTES = 64, 256, 4 + 4 * 256
NF4_BYTES = 0.5 + 1 / _BLOCK + 4 / (_BLOCK * _SCALES_BLOCK)  # per value of a large matrix


class Matrix(NamedTuple):
    """A matrix of a block, and whether it has an adapter."""

    name: LoraTarget
    inputs: int
    outputs: int
    adapted: bool

    @property
    def elements(self) -> int:
        """Return the number of elements of the matrix, without a bias."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class AdapterSettings:
    """Adapters that a plan trains while all weights are frozen in the format `base`.

    The fields are the plan's fields of the same names, without the prefix `lora_`.
    """

    rank: int
    targets: tuple[LoraTarget, ...] = ("all",)
    base: Base = "fp32"
    dropout: float = 0.0
    alpha: float | None = None

    @classmethod
    def from_plan(cls, plan: Plan) -> Self | None:
        """Return a plan's adapters, or None if it trains all weights."""
        if plan.lora_rank is None:
            return None
        return cls(plan.lora_rank, plan.lora_targets, plan.base, plan.lora_dropout, plan.lora_alpha)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self | None:
        """Return adapters from settings named like a plan's fields, or None without `lora_rank`."""
        if values.get("lora_rank") is None:
            return None
        return cls(
            values["lora_rank"],
            values.get("lora_targets", ("all",)),
            values.get("base", "fp32"),
            values.get("lora_dropout", 0.0),
            values.get("lora_alpha"),
        )

    @property
    def values(self) -> dict[str, Any]:
        """Return the adapters as settings named like a plan's fields."""
        return {
            "lora_rank": self.rank,
            "lora_targets": self.targets,
            "base": self.base,
            "lora_dropout": self.dropout,
            "lora_alpha": self.alpha,
        }

    @property
    def title(self) -> str:
        """Return a short description of the adapters."""
        on = "" if "all" in self.targets else f" on {', '.join(self.targets)}"
        return f"{'QLoRA' if self.base == 'nf4' else 'LoRA'} {self.rank}{on}"

    def matrices(self, outline: Outline) -> list[Matrix]:
        """Return a block's matrices, each marked if it has an adapter.

        Raises BadInputError if the block lacks one of the targets.
        """
        attention, mlp = outline.stacks[0].attention, outline.stacks[0].mlp
        assert attention is not None and mlp is not None
        hidden, queries = outline.hidden, attention.heads * attention.head_dim
        keys = attention.kv_heads * attention.head_dim
        sizes: dict[LoraTarget, tuple[int, int]] = {
            "q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys),
            "out": (queries, hidden),
            **({"gate": (hidden, mlp.width)} if mlp.gated else {}),
            "up": (hidden, mlp.width), "down": (mlp.width, hidden),
        }  # fmt: skip
        for name in self.targets:
            if name != "all" and name not in sizes:
                raise BadInputError(
                    f"lora_targets {name}: the MLP of {outline.name} has no {name}. Use any of "
                    f"{', '.join(sizes)}, or all."
                )
        every = "all" in self.targets
        return [Matrix(name, *sizes[name], every or name in self.targets) for name in sizes]

    def trained_parameters(self, outline: Outline) -> int:
        """Return the number of trained parameters in all adapters of a model."""
        each = sum(m.inputs + m.outputs for m in self.matrices(outline) if m.adapted)
        return outline.layers * self.rank * each


def nf4_bytes(elements: int) -> int:
    """Return the bytes of a matrix in 4 bits, including its scales."""
    scales = math.ceil(elements / _BLOCK)
    return math.ceil(elements / 2) + scales + 4 * math.ceil(scales / _SCALES_BLOCK) + _MATRIX_BYTES


def nf4_scale_bytes(elements: int) -> int:
    """Return the bytes of a matrix's scales once they are unpacked from 8 bits to fp32."""
    return 4 * math.ceil(elements / _BLOCK)


def require_adaptable(outline: Outline) -> None:
    """Raise BadInputError if the planner cannot estimate adapters for a model."""
    why = outline.untrained
    if why is None and (outline.head_matmuls or outline.experts):
        why = "the planner cannot estimate adapters for models with experts or a head of two layers"
    stack = outline.stacks[0]
    plain = stack.attention is not None and stack.mlp is not None and not stack.other
    latent = stack.attention is not None and stack.attention.kv_rank is not None
    if why is None and (not plain or latent or stack.cross_attention is not None):
        why = "the planner cannot estimate adapters for this kind of block"
    if why is not None:
        raise BadInputError(
            f"lora_rank: {outline.name} cannot be planned with adapters: {why}. Leave lora_rank "
            "out to plan the training of all weights."
        )


def is_known(name: str, value: Any) -> bool:
    """Return whether the planner can estimate adapters with this value of an option."""
    return value in _KNOWN.get(name, (value,)) and value not in _UNKNOWN.get(name, ())


def can_plan_adapters(outline: Outline, values: Mapping[str, Any]) -> bool:
    """Return whether the planner can estimate adapters for a model with these options."""
    try:
        require_adaptable(outline)
    except BadInputError:
        return False
    return all(is_known(name, value) for name, value in values.items())
