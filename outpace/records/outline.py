"""Outline: the properties of a model that determine time and memory.

The planner works with outlines. A ModelSpec can also be built and trained; outlines exist for all
specs, for transformers described by a Hugging Face config, and for traced modules.
"""

from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from outpace.records.base import Record, entry

# Configurations of other trainers that contain a plan, but no model dimensions.
OUTLINE_FORMATS = ("deepspeed", "accelerate", "fsdp")


class AttentionShape(Record):
    """A layer's attention; with `kv_rank`, multi-head latent attention.

    Latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1) computes queries through `query_rank`
    (None: directly), and keys and values through `kv_rank`; `rope_dim` of a key's `head_dim` is
    shared by all heads and computed separately from the latent.
    """

    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt = Field(description="width of queries and keys")
    value_dim: PositiveInt = Field(description="width of values (default: head_dim)")
    causal: bool = True
    window: PositiveInt | None = entry("maximum number of keys per query")
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    query_rank: PositiveInt | None = None
    kv_rank: PositiveInt | None = None
    rope_dim: NonNegativeInt = 0
    projected: bool = entry(
        "false: the projections of queries, keys and values are in the stack's `other`", True
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("value_dim") is None:
            return {**values, "value_dim": values.get("head_dim")}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.kv_rank is not None and self.rope_dim >= self.head_dim:
            raise ValueError(f"rope_dim {self.rope_dim} is not below head_dim {self.head_dim}")
        return self


class Mlp(Record):
    """A layer's MLP, or its experts, of which each token uses `active`.

    `width`: width of the MLP or of one expert; `shared`: width of experts that all tokens use.
    """

    width: PositiveInt
    gated: bool = False
    bias: bool = False
    experts: NonNegativeInt = entry("0: one MLP for all tokens", 0)
    active: PositiveInt = entry("experts that each token uses", 1)
    shared: NonNegativeInt = 0
    shared_gate: bool = entry("whether each token has a gate on `shared`", False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.experts and self.active > self.experts:
            raise ValueError(f"active is {self.active}, but there are only {self.experts} experts")
        return self


class MatmulShape(Record):
    """`count` matmuls of `inputs` by `outputs`, each with its own weight."""

    name: str
    inputs: PositiveInt
    outputs: PositiveInt
    count: PositiveInt = 1
    positions: PositiveInt | None = entry("rows per sample (None: the sequence's)")
    uses: PositiveInt = entry("matmuls with the same weight in a forward pass", 1)
    weighted: bool = entry("false: without a weight, or with one that is counted elsewhere", True)

    @property
    def elements(self) -> int:
        """Number of elements of the weights."""
        return self.inputs * self.outputs * self.count if self.weighted else 0


class Stack(Record):
    """Several layers of the same shape, not necessarily adjacent.

    `seq_len` is the length of the sequences in these layers; None if it is that of the training
    samples. The keys and values of cross-attention come from the last preceding stack without
    cross-attention (T5's encoder). `other` holds matmuls and parameters outside attention and MLP
    (traced modules).
    """

    name: str = "layers"
    layers: PositiveInt
    attention: AttentionShape | None = None
    cross_attention: AttentionShape | None = None
    mlp: Mlp | None = None
    other: tuple[MatmulShape, ...] = ()
    other_parameters: NonNegativeInt = 0
    norms: NonNegativeInt = entry("norms of a layer, as a multiple of the hidden width", 2)
    norm_bias: bool = False
    seq_len: PositiveInt | None = None
    dropout: bool = False
    parallel: bool = entry("MLP parallel to attention (GPT-NeoX, Phi)", False)
    norm_last: bool = entry("whether the MLP's result is normalised (BERT, Gemma 2)", False)


class Outline(Record):
    """A model's layers, embedding and head.

    `untrained` says why outpace does not train the model, None if it does. `outputs` are the
    columns of the head's matmul (0 without a head), over `predicted` positions of a sequence (None:
    all). Embedding and head have the width `embedding_width` if projections connect them to the
    layers (OPT-350m). `notes` say where the dimensions come from, if users should know that.
    """

    name: str
    hidden: PositiveInt
    stacks: tuple[Stack, ...] = Field(min_length=1)
    vocab: NonNegativeInt = Field(description="rows of the embedding")
    embedding_width: PositiveInt | None = entry("None: hidden")
    outputs: NonNegativeInt = 0
    tied: bool = False
    learned_positions: NonNegativeInt = 0
    outside_parameters: NonNegativeInt = entry(
        "parameters besides embeddings, positions and head: norms, transforms, patches", 0
    )
    embed_matmuls: tuple[MatmulShape, ...] = Field(
        default=(), alias="embed_products", description="projections from embedding to layers"
    )
    head_matmuls: tuple[MatmulShape, ...] = Field(
        default=(), alias="head_products", description="projections from layers to head"
    )
    predicted: PositiveInt | None = None
    max_positions: PositiveInt
    source: str = ""
    untrained: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def table_width(self) -> int:
        """Width of the embedding and of the head."""
        return self.embedding_width or self.hidden

    @property
    def layers(self) -> int:
        """Number of layers in all stacks."""
        return sum(stack.layers for stack in self.stacks)

    @property
    def experts(self) -> int:
        """Largest number of experts of a layer; 0 if there are none."""
        return max((s.mlp.experts for s in self.stacks if s.mlp is not None), default=0)
