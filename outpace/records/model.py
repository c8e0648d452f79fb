"""ModelSpec: the dimensions and choices that determine a transformer."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from outpace.records.base import Record, entry
from outpace.records.model_families import FAMILY_TRAITS, Family

# Larger values are typos, and would overflow the size of a tensor.
Layers = Annotated[int, Field(gt=0, le=100_000)]
Width = Annotated[int, Field(gt=0, le=2**24)]
Heads = Annotated[int, Field(gt=0, le=2**16)]
Rows = Annotated[int, Field(gt=0, le=2**32)]


class RopeScaling(Record):
    """Llama-3's scaling of rotary frequencies (Llama 3 herd of models, arXiv 2407.21783, §3.2)."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_positions: PositiveInt


class ModelSpec(Record):
    """Complete description of a transformer. Missing values follow from `family`."""

    family: Family
    layers: Layers = Field(description="transformer blocks")
    hidden: Width = Field(description="width of the residual stream")
    heads: Heads = Field(description="query heads")
    kv_heads: Heads = Field(description="key and value heads (default: heads)")
    head_dim: Heads = Field(description="width of a head (default: hidden / heads)")
    ffn: Width = Field(description="inner width of the MLP (default: 4 × hidden)")
    vocab: Rows = Field(description="rows of the embedding")
    max_positions: Rows = Field(description="longest sequence")
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: PositiveFloat
    norm_first: bool = entry("normalize before each sub-layer (GPT-2)", True)
    positions: Literal["learned", "rotary"]
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None
    activation: Literal["gelu", "gelu_tanh", "silu"]
    gated: bool = Field(description="MLP is down(act(gate(x)) × up(x)) (SwiGLU)")
    qkv_bias: bool
    out_bias: bool = Field(description="bias of attention's output projection")
    mlp_bias: bool
    qk_norm: bool = entry("RMSNorm on queries and keys per head", False)
    tied: bool = Field(description="the head shares its weight with the embedding")
    causal: bool = True
    sliding_window: PositiveInt | None = entry(
        "each token attends to itself and the window − 1 tokens before it"
    )
    window_layers: tuple[int, ...] | None = entry("layers with the sliding window (default: all)")
    segments: int = Field(default=0, ge=0, description="token types (BERT: 2)")
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        """Fill in missing values from the family and from the given dimensions."""
        if not isinstance(values, dict):
            return values
        given = {key: value for key, value in values.items() if value is not None}
        traits = FAMILY_TRAITS.get(str(given.get("family")))  # type: ignore[call-overload]
        filled = {**(traits.defaults if traits is not None else {}), **given}
        hidden, heads = filled.get("hidden"), filled.get("heads")
        if isinstance(heads, int):
            filled.setdefault("kv_heads", heads)
            if isinstance(hidden, int) and heads > 0:
                if "head_dim" not in filled and hidden % heads:
                    raise ValueError(
                        f"hidden {hidden} is not a multiple of heads {heads}. "
                        "Change one of them, or give head_dim"
                    )
                filled.setdefault("head_dim", hidden // heads)
        if isinstance(hidden, int):
            filled.setdefault("ffn", 4 * hidden)
        return filled

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}. Change one of "
                "them"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_dim}")
        return self

    @property
    def objective(self) -> Literal["causal", "masked"]:
        """Return the training objective: the next token, or masked tokens (BERT)."""
        return "causal" if self.causal else "masked"

    def layer_window(self, layer: int) -> int | None:
        """Return a layer's sliding window; None for full attention."""
        if self.window_layers is not None and layer not in self.window_layers:
            return None
        return self.sliding_window
