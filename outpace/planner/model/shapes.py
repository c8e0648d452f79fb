"""Parameter names and shapes of a transformer, without building it."""

from collections.abc import Iterator

from outpace.records.model import ModelSpec

Shape = tuple[int, ...]


def parameter_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shape of each parameter, in the model's order; a tied head is left out."""
    named: dict[str, Shape] = {}
    if not spec.norm_first:
        named["head_bias"] = (spec.vocab,)
    named |= _embedding_shapes(spec)
    for layer in range(spec.layers):
        named |= {f"blocks.{layer}.{name}": shape for name, shape in _block_shapes(spec)}
    if spec.norm_first:
        named |= _norm_shapes(spec, "final_norm", spec.hidden)
    else:
        named |= _linear_shapes("head_transform.dense", spec.hidden, spec.hidden, True)
        named |= _norm_shapes(spec, "head_transform.norm", spec.hidden)
    if not spec.tied:
        named["head.weight"] = (spec.vocab, spec.hidden)
    return named


def _embedding_shapes(spec: ModelSpec) -> dict[str, Shape]:
    named: dict[str, Shape] = {"embed.tokens.weight": (spec.vocab, spec.hidden)}
    if spec.positions == "learned":
        named["embed.positions.weight"] = (spec.max_positions, spec.hidden)
    if spec.segments:
        named["embed.segments.weight"] = (spec.segments, spec.hidden)
    return named if spec.norm_first else named | _norm_shapes(spec, "embed.norm", spec.hidden)


def _block_shapes(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield from _norm_shapes(spec, "attention_norm", spec.hidden).items()
    for part, width in (("q", queries), ("k", keys), ("v", keys)):
        yield from _linear_shapes(f"attention.{part}", spec.hidden, width, spec.qkv_bias).items()
    yield from _linear_shapes("attention.out", queries, spec.hidden, spec.out_bias).items()
    if spec.qk_norm:
        yield "attention.q_norm.weight", (spec.head_dim,)
        yield "attention.k_norm.weight", (spec.head_dim,)
    yield from _norm_shapes(spec, "mlp_norm", spec.hidden).items()
    yield from _linear_shapes("mlp.up", spec.hidden, spec.ffn, spec.mlp_bias).items()
    if spec.gated:
        yield from _linear_shapes("mlp.gate", spec.hidden, spec.ffn, spec.mlp_bias).items()
    yield from _linear_shapes("mlp.down", spec.ffn, spec.hidden, spec.mlp_bias).items()


def _linear_shapes(name: str, inputs: int, outputs: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def _norm_shapes(spec: ModelSpec, name: str, width: int) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (width,)}
    return weight | {f"{name}.bias": (width,)} if spec.norm == "layernorm" else weight
