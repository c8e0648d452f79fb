"""Outline of a transformers model, traced on the meta device with few layers of each kind.

The layers are those that transformers builds, so no family needs code of its own.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution

from outpace.interop.config import CONFIG_FILE, read_config
from outpace.interop.config_check import format_missing_dimensions, quiet_transformers
from outpace.interop.transformers_build import BuiltModel, build_from_folder, config_value
from outpace.planner.model.outline import layer_parameters, parameters
from outpace.records.errors import BadInputError
from outpace.records.outline import AttentionShape, MatmulShape, Outline, Stack
from outpace.trace.layer_structure import LayerWeights, recognise_layer
from outpace.trace.matmuls import AttentionCall, MatmulCall
from outpace.trace.outline import LayerPart, ModuleTracing, Places

_SAMPLES = 2
# Another trace with twice as many tokens shows which matmuls grow with the length. The length is a
# multiple of the chunks of recurrent layers: 64 (gated delta rule) to 256 tokens (Mamba 2).
_LENGTH = 512
_TOKEN = 5  # the first token ids are often padding
_FEWEST = 3  # lists with fewer layers are traced completely
_NUMBERS = re.compile(r"idx|index|layer_id|layer_number|depth")
_COUNTS = re.compile(r"layer|block|depth|^n_", re.IGNORECASE)
_FROM_CONFIG = re.compile(
    r"sliding_window=(getattr\(self\.config, ['\"]sliding_window|self\.config\.sliding_window\b)"
)
_WINDOWS = ("sliding_window", "window_size", "attention_window", "local_window_size")
_POSITIONS = re.compile(r"^wpe$|pos")
_MANY = 0.1
_ANY_LENGTH = 2**20  # for a model without positions
_PLAIN = (bool, int, float, str, type(None))
_EXPERT = re.compile(r"(\bexperts?[._](?:expert_)?)\d+")  # an expert's number in a name
Shape = tuple[int, ...]


def outline_from_folder(directory: Path) -> Outline:
    """Return the outline of the model in a Hugging Face folder, of any family in transformers.

    Raises BadInputError if its config.json cannot be read, or the model not built or traced.
    """
    try:
        built, found = outline_of_builds(partial(build_from_folder, directory), directory.name)
    except BadInputError as error:  # the cause may be a dimension missing in config.json
        missing = format_missing_dimensions(read_config(directory))
        raise BadInputError(f"{str(error).removesuffix('.')}{missing or '.'}") from None
    return found.model_copy(
        update={
            "source": f"{directory / CONFIG_FILE}, built with transformers and traced",
            "untrained": f"outpace has no {built.family}",
            "notes": (*built.notes, *_describe_unused(found)),
        }
    )


def _describe_unused(found: Outline) -> Iterator[str]:
    rest = found.outside_parameters + sum(s.layers * s.other_parameters for s in found.stacks)
    if rest > _MANY * parameters(found):
        yield (
            f"{rest:,} of {parameters(found):,} parameters are in no matmul of the traced "
            "forward: lookup tables, or parts that text input does not use. They count as "
            "weights, gradients and optimizer states."
        )


def outline_of_builds(build: Callable[[str], BuiltModel], name: str) -> tuple[BuiltModel, Outline]:
    """Build a model and return it with its outline, trying bf16 first, then fp32.

    Stacked experts support only 16-bit matmuls, and the attention of some families only fp32.
    Raises BadInputError if no forward runs without values.
    """
    first: BadInputError | None = None
    for dtype in ("bfloat16", "float32"):
        built = build(dtype)
        for cached in (True, False):  # some caches do not work with few layers
            try:
                return built, _outline_build(built, name, cached)
            except BadInputError as error:
                first = first or error
    raise BadInputError(
        f"{str(first).removesuffix('.')}. To trace any model with values, pass a Python function "
        "that builds it: --model file.py:build."
    )


def _outline_build(built: BuiltModel, name: str, cached: bool) -> Outline:
    model, positions = built.module, built.positions
    model.config.use_cache = cached
    longer = min(2 * _LENGTH, positions or 2 * _LENGTH)
    length = max(1, longer // 2)
    with quiet_transformers(), _without_value_checks():
        found = _trace_model(built, name, length)
        if any(matmul.positions is not None for matmul in _list_other_matmuls(found)):
            found = _scale_matmuls(found, _trace_model(built, name, 2 * length), length)
    learned = _count_learned_positions(model, found)
    return found.model_copy(
        update={
            "max_positions": positions or _ANY_LENGTH,
            "learned_positions": learned,
            "outside_parameters": found.outside_parameters - learned * found.hidden,
        }
    )


@contextmanager
def _without_value_checks() -> Iterator[None]:
    """Disable argument checks of torch.distributions, which read values (Gemma 3n)."""
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checks)


def _count_learned_positions(model: nn.Module, found: Outline) -> int:
    return sum(
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and module.embedding_dim == found.hidden
        and _POSITIONS.search(name.rpartition(".")[2])
    )


def _trace_model(built: BuiltModel, name: str, length: int) -> Outline:
    model = built.module
    tokens = torch.full((_SAMPLES, length), _TOKEN)
    inputs: dict[str, Any] = {"input_ids": tokens}
    if built.features is not None:
        key, shape = built.features
        inputs = {key: torch.zeros((_SAMPLES, *shape), dtype=model.dtype)}
    if built.decodes:
        inputs["decoder_input_ids"] = tokens
    sizes = _Shapes(model)
    with _leave_out_layers(model, sizes) as equal:
        try:
            return _checked_outline(_TransformersTracing(model, inputs, sizes, equal), name)
        except BadInputError:
            if not equal:
                raise
    return _checked_outline(_TransformersTracing(model, inputs, sizes, {}), name)


def _checked_outline(tracing: "_TransformersTracing", name: str) -> Outline:
    found = tracing.outline(name)
    if parameters(found) != sum(tracing.sizes.values()) or found.outside_parameters < 0:
        raise BadInputError(
            f"the layers of {name} could not be distinguished: {parameters(found):,} parameters "
            f"were found, of {sum(tracing.sizes.values()):,}"
        )
    return found


class _Shapes:
    """Shapes of a model's parameters by name, each once, and the config's type of each layer."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes: dict[str, Shape] = {
            name: tuple(p.shape) for name, p in model.named_parameters()
        }
        config = getattr(model, "config", None)
        self.kinds_of_layers: Sequence[str] = config_value(config, "layer_types") or ()
        self.counts = {
            value
            for key, value in vars(config or object).items()
            if _COUNTS.search(key) and type(value) is int
        }

    def find_shapes(self, path: str) -> dict[str, tuple[int, ...]]:
        start = f"{path}."
        return {n.removeprefix(start): s for n, s in self.shapes.items() if n.startswith(start)}

    def settings(self, path: str, part: nn.Module) -> Any:
        """Return the layer's type and settings, in which layers of equal shapes may differ."""
        number = path.rpartition(".")[2]
        kinds = self.kinds_of_layers
        kind = kinds[int(number)] if number.isdigit() and int(number) < len(kinds) else None
        values = tuple(
            (name, key, value)
            for name, module in part.named_modules()
            for key, value in sorted(vars(module).items())
            if isinstance(value, _PLAIN) and not _NUMBERS.search(key)
        )
        return kind, values


@contextmanager
def _leave_out_layers(model: nn.Module, sizes: _Shapes) -> Iterator[Mapping[str, tuple[str, ...]]]:
    """Remove layers that equal earlier ones from the end of each list, within the context.

    Yield the paths of the layers that each remaining layer stands for.
    """
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) >= _FEWEST
        and len(module) in sizes.counts
    ]  # fmt: skip
    equal: dict[str, tuple[str, ...]] = {}
    restore: list[tuple[nn.ModuleList, list[nn.Module]]] = []
    outer: list[str] = []
    for path, module in lists:
        if any(path.startswith(f"{one}.") for one in outer):
            continue
        outer.append(path)
        layers = list(module)
        kept, found = _choose_representatives(path, layers, sizes)
        if kept < len(layers):
            equal.update(found)
            restore.append((module, layers))
            module._modules = dict(list(module._modules.items())[:kept])
    try:
        yield equal
    finally:
        for module, layers in restore:
            module._modules = {str(i): layer for i, layer in enumerate(layers)}


def _choose_representatives(
    path: str, layers: Sequence[nn.Module], sizes: _Shapes
) -> tuple[int, dict[str, tuple[str, ...]]]:
    """Return the number of layers to keep, and the paths of removed layers by kept layer.

    The first layers are kept, up to the first one of every kind.
    """
    first: dict[Any, int] = {}
    rest: dict[int, list[str]] = {}
    kinds = []
    for number, layer in enumerate(layers):
        where = f"{path}.{number}"
        key = (type(layer), tuple(sizes.find_shapes(where).items()), sizes.settings(where, layer))
        first.setdefault(key, number)
        kinds.append(key)
    kept = max(2, *(number + 1 for number in first.values()))  # a stack needs a repetition
    for number in range(kept, len(layers)):
        rest.setdefault(first[kinds[number]], []).append(f"{path}.{number}")
    return kept, {f"{path}.{number}": tuple(paths) for number, paths in rest.items()}


class _TransformersTracing(ModuleTracing):
    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        sizes: _Shapes,
        equal: Mapping[str, tuple[str, ...]],
    ) -> None:
        super().__init__(model, inputs)
        self.inputs = inputs
        self.known = sizes
        self.equal = equal
        self.sizes = {name: math.prod(shape) for name, shape in sizes.shapes.items()}
        self.forward.done, self.stacked = _join_experts(
            self.forward.done, sizes.shapes, self.samples * (self.seq_len or 1)
        )
        self.modules = dict(model.named_modules())
        embedding = _embedding_name(model, "get_input_embeddings")
        self.table = embedding if embedding in self.sizes else None
        if self.table is not None:
            self.table_width = sizes.shapes[self.table][1]

    def equal_parts(self, part: LayerPart) -> tuple[str, ...]:
        return (part.path, *self.equal.get(part.path, ()))

    def settings(self, path: str, module: nn.Module) -> Any:
        return self._find_window(path, module)

    def fill_layer(
        self, stack: Stack, rest: list[MatmulCall], places: Places, path: str, names: list[str]
    ) -> Stack:
        layer = self.modules[path]
        bare = self._add_traits(stack, path, layer, names)
        weights = LayerWeights(
            shapes={name: self.known.shapes[name] for name in names} | self.stacked,
            hidden=self.hidden or 0,
            rows=self.samples * self._tokens_of(stack),
            cross_rows=self.samples * places["cross"][1] if "cross" in places else None,
        )
        before = {name: place for name, (place, _) in places.items()}
        found = recognise_layer(bare, rest, before, weights)
        found = replace(found, stack=self._limit_experts(found.stack))
        filled = super().fill_layer(found.stack, list(found.rest), places, path, names)
        if layer_parameters(filled, weights.hidden) <= sum(self.sizes[name] for name in names):
            return filled
        return super().fill_layer(stack, rest, places, path, names)

    def _add_traits(self, stack: Stack, path: str, layer: nn.Module, names: list[str]) -> Stack:
        """Return the stack with properties that its matmuls do not show: norms, dropout, masks."""
        named = [(n, m) for n, m in layer.named_modules() if "norm" in type(m).__name__.lower()]
        norms = [
            m for n, m in named
            if f"{path}.{n}.weight" in names and self.sizes[f"{path}.{n}.weight"] == self.hidden
        ]  # fmt: skip
        drops = any(isinstance(m, nn.Dropout) and m.p > 0 for m in layer.modules())
        both = stack.attention is not None and len(norms) == 1
        return stack.model_copy(
            update={
                "attention": self._set_mask(
                    stack.attention, path, layer, stack.cross_attention is not None
                ),
                "cross_attention": self._set_cross_mask(stack.cross_attention, path, layer),
                "norms": len(norms),
                "norm_bias": any(getattr(norm, "bias", None) is not None for norm in norms),
                "dropout": drops,
                "parallel": both,
            }
        )

    def _limit_experts(self, stack: Stack) -> Stack:
        """Set the number of active experts from the config, if the code computes all experts."""
        each = getattr(getattr(self.module, "config", None), "num_experts_per_tok", None)
        mlp = stack.mlp
        if mlp is None or mlp.active < mlp.experts or not isinstance(each, int):
            return stack
        active = min(max(1, each), mlp.experts or 1)
        return stack.model_copy(update={"mlp": mlp.model_copy(update={"active": active})})

    def _set_mask(
        self, attention: AttentionShape | None, path: str, layer: nn.Module, decodes: bool
    ) -> AttentionShape | None:
        """Return the attention with the mask of its modules: whether it is causal, and its window.

        Masks have no values during a trace. `decodes`: whether the layer is a decoder's. Its
        attention is causal unless a module says otherwise.
        """
        if attention is None:
            return None
        told = [
            m.is_causal for m in layer.modules() if isinstance(getattr(m, "is_causal", None), bool)
        ]
        usual = attention.causal or decodes or "CausalLM" in type(self.module).__name__
        causal = bool(told[0]) if told else usual
        window = self._find_window(path, layer, causal)
        return attention.model_copy(update={"causal": causal, "window": window})

    def _set_cross_mask(
        self, attention: AttentionShape | None, path: str, layer: nn.Module
    ) -> AttentionShape | None:
        """Return the cross-attention as not causal.

        In a model without decoder inputs, what looks like cross-attention is a layer's second
        self-attention (LongCat), so it gets the mask of a self-attention.
        """
        if attention is None or "decoder_input_ids" not in self.inputs:
            return self._set_mask(attention, path, layer, decodes=True)
        return attention.model_copy(update={"causal": False})

    def _find_window(self, path: str, layer: nn.Module, causal: bool = True) -> int | None:
        """Return a layer's attention window, by its layer type in the config or from its modules.

        The window includes the position itself. For bidirectional attention, a config's number
        leaves it out (transformers/masking_utils.py, sliding_window_bidirectional_overlay).
        """
        config = getattr(self.module, "config", None)
        kind, _ = self.known.settings(path, nn.Identity())
        if kind is not None:
            name = next(
                (name for word, name in (("sliding", "sliding_window"),
                                         ("chunked", "attention_chunk_size")) if word in kind),
                None,
            )  # fmt: skip
            value = config_value(config, name) if name else None
            if isinstance(value, int) and value > 0:
                return value + (name == "sliding_window" and not causal)
            if name is None:
                return None
        for module in layer.modules():
            values = [getattr(module, name, None) for name in _WINDOWS]
            if _passes_window(type(module)):
                values.append(config_value(module.config, "sliding_window"))
            for value in values:
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    def _find_embedding(self, left: Sequence[str], hidden: int, outputs: int) -> str | None:
        return self.table if self.table in left else super()._find_embedding(left, hidden, outputs)


def _passes_window(kind: type[nn.Module]) -> bool:
    """Return whether an attention's forward applies its config's window in every layer."""
    try:
        return _FROM_CONFIG.search(inspect.getsource(kind.forward)) is not None
    except (OSError, TypeError):  # no source code
        return False


def _join_experts(
    done: Sequence[MatmulCall | AttentionCall], shapes: Mapping[str, Shape], tokens: int
) -> tuple[list[MatmulCall | AttentionCall], dict[str, Shape]]:
    """Join the matmuls of experts that run one after another, each on some of the tokens.

    Return all operations, and the shapes of the weights as if experts were stacked.
    """
    groups: dict[Any, list[MatmulCall]] = {}
    for one in done:
        if isinstance(one, MatmulCall) and one.weight in shapes and one.rows < tokens:
            key = (_EXPERT.sub(r"\1", str(one.weight)), one.inputs, one.outputs)
            groups.setdefault(key, []).append(one)
    joined: dict[int, MatmulCall | None] = {}
    stacked: dict[str, Shape] = {}
    for group in groups.values():
        first, elements = group[0], group[0].inputs * group[0].outputs
        weights = [math.prod(shapes[name]) for name in {str(one.weight) for one in group}]
        # each expert has a weight, or all use slices of one
        whole = len(weights) == len(group) or len(weights) == 1
        if len(group) > 1 and whole and sum(weights) // elements >= len(group):
            joined |= dict.fromkeys(map(id, group), None)
            joined[id(first)] = first._replace(rows=sum(one.rows for one in group))
            stacked[str(first.weight)] = (len(group), first.inputs, first.outputs)
    kept = [joined.get(id(one), one) for one in done]
    return [one for one in kept if one is not None], stacked


def _embedding_name(model: nn.Module, getter: str) -> str | None:
    """Return the name of the weight of the embedding that the model's `getter` returns."""
    try:
        found = getattr(model, getter)()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    weight = getattr(found, "weight", None)
    if weight is None or weight.dim() != 2:
        return None
    return next((name for name, p in model.named_parameters() if p is weight), None)


def _list_other_matmuls(outline: Outline) -> Iterator[MatmulShape]:
    for stack in outline.stacks:
        yield from stack.other


def _scale_matmuls(short: Outline, long: Outline, length: int) -> Outline:
    """Return the outline `short`, with matmuls marked whose number of rows grows with the length.

    `long` is the outline of the same model for a sequence longer by `length`.
    """
    if [s.layers for s in short.stacks] != [s.layers for s in long.stacks]:
        return short
    stacks = tuple(
        one.model_copy(update={"other": _scale_by_length(one.other, other.other, length)})
        for one, other in zip(short.stacks, long.stacks, strict=True)
    )
    return short.model_copy(update={"stacks": stacks})


def _scale_by_length(
    short: Sequence[MatmulShape], long: Sequence[MatmulShape], length: int
) -> tuple[MatmulShape, ...]:
    """Return the matmuls of `short`, with those that grow with the sequence counted per token.

    `long` is from a sequence longer by `length`. Rows that only come from padding the sequence for
    a convolution are left out.
    """
    rows, longer = _count_rows(short), _count_rows(long)
    made = [one for one in short if one.positions is None]
    for matmul, many in rows.items():
        grown = longer.get(matmul, 0) - many
        if 0 < grown <= many and grown % length == 0 and (grown == many or matmul.weighted):
            times = grown // length
            weights = sum(one.count for one in short if matmul.weighted and _key(one) == matmul)
            uses = times // weights if weights and times % weights == 0 else 1
            update = {"count": times // uses, "uses": uses}
            made.append(matmul.model_copy(update=update))
        else:
            made += [one for one in short if one.positions is not None and _key(one) == matmul]
    return tuple(made)


def _count_rows(matmuls: Sequence[MatmulShape]) -> dict[MatmulShape, int]:
    rows: dict[MatmulShape, int] = {}
    for one in matmuls:
        if one.positions is not None:
            many = one.positions * one.count * one.uses
            rows[_key(one)] = rows.get(_key(one), 0) + many
    return rows


def _key(one: MatmulShape) -> MatmulShape:
    return one.model_copy(update={"positions": None, "count": 1, "uses": 1})
