"""Outline of any module, from one forward. Repeated parts are grouped into stacks."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from outpace.interop.custom_model import read_positions
from outpace.planner.model.outline import layer_parameters, parameters
from outpace.records.errors import BadInputError
from outpace.records.outline import AttentionShape, MatmulShape, Outline, Stack
from outpace.trace.matmuls import AttentionCall, Forward, MatmulCall, record

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# For "own" (self-attention) and "cross": the number of matmuls before it, and its number of keys.
Places = Mapping[str, tuple[int, int]]
# A list with less than this fraction of the largest list's work does not hold layers.
_MINOR = 0.1


def outline_from_module(module: nn.Module, example_inputs: Any, name: str | None = None) -> Outline:
    """Run a copy of `module` once and return an outline of its computation.

    `example_inputs`: a tuple of arguments, a mapping of keyword arguments, or one argument. The
    first dimension of the first tensor is the number of samples. Repeated members of a ModuleList,
    Sequential or ModuleDict are taken as layers. A matmul of two activations outside of attention
    is assumed to have the same size for other inputs. Raises BadInputError if the forward cannot
    run or has no matmul with a weight.
    """
    return ModuleTracing(module, example_inputs).outline(name or type(module).__name__)


@dataclass(frozen=True)
class LayerPart:
    """A module that may be a layer. Layers with equal `signature` form a stack.

    `done` has its operations in execution order, and `work` their total size.
    """

    path: str
    kind: Any
    signature: Any
    done: tuple[MatmulCall | AttentionCall, ...]
    work: int


class ModuleTracing:
    """Builder of an outline from a module's forward."""

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        self.module = module
        self.sizes = {name: p.numel() for name, p in module.named_parameters()}
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        if not tensors or not tensors[0].dim():
            raise BadInputError("the example inputs contain no tensor of samples")
        self.samples = int(tensors[0].shape[0])
        tokens = [t for t in tensors if t.dim() == 2 and not t.is_floating_point()]
        self.seq_len = int(tokens[0].shape[1]) if tokens else None
        self.forward: Forward = record(module, inputs)
        if not any(isinstance(one, MatmulCall) and one.weight for one in self.forward.done):
            raise BadInputError(
                f"the forward of {type(module).__name__} has no matmul with a weight, so there is "
                "nothing to plan for"
            )
        self.hidden: int | None = None
        self.table_width: int | None = None
        # Parameters of layers; the others belong to the embedding, the head or the rest.
        self.taken: set[str] = set()

    def outline(self, name: str) -> Outline:
        groups = self._group_layers()
        inside = tuple(part.path for group in groups for part in group)
        done = list(enumerate(self.forward.done))
        places = [i for i, one in done if _is_within(one.module, inside)]
        layered = set(places)
        outside = [(i, one) for i, one in done if i not in layered]
        if not groups:  # the whole forward is one layer
            stack = self._build_stack(self.forward.done, "", list(self.sizes), 1, None)
            return self._build_outline(name, [stack], [], [], None)
        width = self._residual_width(
            max((group[0] for group in groups), key=lambda part: part.work)
        )
        self.hidden = width
        stacks, seen = [], self.seq_len
        for group in groups:
            equal = [path for part in group for path in self.equal_parts(part)]
            names = self._parameters_of(group[0].path)
            stack = self._build_stack(group[0].done, group[0].path, names, len(equal), seen)
            for other in equal:
                self.taken.update(self._parameters_of(other))
            stacks.append(stack)
            if stack.cross_attention is None:
                seen = stack.seq_len or self.seq_len
        before = [one for i, one in outside if i < places[-1]]
        after = [one for i, one in outside if i > places[-1]]
        return self._build_outline(name, stacks, before, after, width)

    def equal_parts(self, part: LayerPart) -> tuple[str, ...]:
        """Return the paths of all layers that were traced as `part`, beginning with its own."""
        return (part.path,)

    def settings(self, path: str, module: nn.Module) -> Any:
        """Return properties, other than shapes, in which the layers of one stack must be equal."""
        return None

    def fill_layer(
        self, stack: Stack, rest: list[MatmulCall], places: Places, path: str, names: list[str]
    ) -> Stack:
        """Return the stack with the matmuls `rest` of one of its layers.

        `places` has each attention and the number of matmuls before it. `path` is the layer's
        module, and `names` are its parameters.
        """
        matmuls = self.matmuls(rest, path, names, self._tokens_of(stack))
        return stack.model_copy(update={"other": tuple(matmuls)})

    def _tokens_of(self, stack: Stack) -> int:
        return stack.seq_len or self.seq_len or 1

    def _parameters_of(self, path: str) -> list[str]:
        """Return the names of a module's parameters, without those shared with an earlier one."""
        return [name for name in self.sizes if _is_within(name, (path,))]

    def _group_layers(self) -> list[list[LayerPart]]:
        found = list(self._find_lists())
        most = max((sum(part.work for part in parts) for parts in found), default=0)
        groups: dict[Any, list[LayerPart]] = {}
        for parts in found:
            if sum(part.work for part in parts) >= _MINOR * most:
                for part in parts:
                    groups.setdefault((id(parts), part.signature), []).append(part)
        order = {id(one): i for i, one in enumerate(self.forward.done)}
        return sorted(groups.values(), key=lambda group: order[id(group[0].done[0])])

    def _find_lists(self) -> Iterator[list[LayerPart]]:
        """Yield the members of each outermost list of modules that has several layers of one kind.

        If no members are equal, those of the same class count as one kind.
        """
        lists = [(p, m) for p, m in self.module.named_modules() if isinstance(m, _LISTS)]
        parts: dict[str, list[LayerPart]] = {}
        chosen: list[str] = []
        for alike in (lambda part: part.kind, lambda part: part.kind[0]):
            for path, module in lists:  # outer ones first
                if any(_is_within(path, (one,)) or _is_within(one, (path,)) for one in chosen):
                    continue
                if path not in parts:
                    parts[path] = self._find_parts(path, module)
                if any(n > 1 for n in Counter(map(alike, parts[path])).values()):
                    chosen.append(path)
                    yield parts[path]

    def _find_parts(self, path: str, module: nn.Module) -> list[LayerPart]:
        named = ((f"{path}.{key}" if path else key, one) for key, one in module.named_children())
        parts = [self._make_part(where, one) for where, one in named]
        return [part for part in parts if part.done]

    def _make_part(self, path: str, module: nn.Module) -> LayerPart:
        done = tuple(one for one in self.forward.done if _is_within(one.module, (path,)))
        names = self._parameters_of(path)
        relative = tuple(_make_relative(one, path) for one in done)
        shapes = tuple((name.removeprefix(path), self.sizes[name]) for name in names)
        work = sum(
            one.rows * one.inputs * one.outputs for one in done if isinstance(one, MatmulCall)
        )
        kind = (type(module), shapes)
        return LayerPart(path, kind, (kind, relative, self.settings(path, module)), done, work)

    def _residual_width(self, part: LayerPart) -> int | None:
        """Return the width of the layer's output: its last dimension, or an image's channels."""
        shape = self.forward.shapes.get(part.path, ())
        if not shape:
            return None
        made = {one.outputs for one in part.done if isinstance(one, MatmulCall)}
        return shape[1] if len(shape) > 3 and shape[1] in made else shape[-1]

    def _build_stack(
        self,
        done: Sequence[MatmulCall | AttentionCall],
        path: str,
        names: list[str],
        layers: int,
        seen: int | None,
    ) -> Stack:
        length = self._find_length(done)
        rest, found = self._separate_attention(done, length, seen)
        attention, cross = (
            _attention_shape(found[name][0]) if name in found else None for name in ("own", "cross")
        )
        stack = Stack(
            name=path.rpartition(".")[0] or "layers",
            layers=layers,
            attention=attention,
            cross_attention=cross,
            norms=0,
            seq_len=None if length == self.seq_len else length,
        )
        places = {name: (place, one.keys) for name, (one, place) in found.items()}
        stack = self.fill_layer(stack, rest, places, path, names)
        self.taken.update(names)
        parameters = sum(self.sizes[name] for name in names)
        return stack.model_copy(
            update={"other_parameters": parameters - layer_parameters(stack, self.hidden or 1)}
        )

    def _find_length(self, done: Sequence[MatmulCall | AttentionCall]) -> int:
        """Return the number of tokens per sample.

        If a matmul has as many rows per sample as the input's sequence length, it is that length.
        Otherwise, it is the number of rows per sample in which most of the matmul work is done.
        """
        work: Counter[int] = Counter()
        for one in done:
            if isinstance(one, MatmulCall):
                weighed = one.rows * one.inputs * one.outputs * (2 if one.weight else 1)
                work[self._rows_per_sample(one.rows)] += weighed
        if self.seq_len in work or not work:
            return self.seq_len or 1
        return work.most_common(1)[0][0]

    def _rows_per_sample(self, rows: int) -> int:
        return -(-rows // self.samples)

    def _separate_attention(
        self, done: Sequence[MatmulCall | AttentionCall], length: int, seen: int | None
    ) -> tuple[list[MatmulCall], dict[str, tuple[AttentionCall, int]]]:
        """Return a layer's matmuls, and its self-attention ("own") and cross-attention ("cross").

        Each attention comes with the number of matmuls before it. Attentions beyond one of each are
        returned as matmuls. `seen`: the number of positions that a cross-attention reads.
        """
        rest: list[MatmulCall] = []
        found: dict[str, tuple[AttentionCall, int]] = {}
        for one in self._pair_matmuls(done):
            if isinstance(one, MatmulCall):
                rest.append(one)
                continue
            fits = one.batch == self.samples and one.queries == length
            if fits and "own" not in found and one.keys == length:
                found["own"] = (one, len(rest))
            elif fits and "cross" not in found and one.keys == (seen or length):
                found["cross"] = (one, len(rest))
            else:
                rest += _as_matmuls([one])
        return rest, found

    def _pair_matmuls(
        self, done: Sequence[MatmulCall | AttentionCall]
    ) -> Iterator[MatmulCall | AttentionCall]:
        """Yield the operations; two matmuls that compute attention become an AttentionCall."""
        waiting: MatmulCall | None = None
        for one in done:
            if waiting is not None and isinstance(one, MatmulCall):
                found = self._match_attention(waiting, one)
                yield waiting if found is None else found
                waiting = None
                if found is not None:
                    continue
            if isinstance(one, MatmulCall) and one.weight is None and one.batch > 1:
                waiting = one
                continue
            if waiting is not None:
                yield waiting
                waiting = None
            yield one
        if waiting is not None:
            yield waiting

    def _match_attention(self, scores: MatmulCall, mix: MatmulCall) -> AttentionCall | None:
        same = mix.weight is None and (mix.batch, mix.rows) == (scores.batch, scores.rows)
        if not same or mix.inputs != scores.outputs or scores.batch % self.samples:
            return None
        heads = scores.batch // self.samples
        return AttentionCall(
            scores.module,
            batch=self.samples,
            heads=heads,
            kv_heads=heads,
            queries=scores.rows // scores.batch,
            keys=scores.outputs,
            head_dim=scores.inputs,
            value_dim=mix.outputs,
            causal=False,
        )

    def matmuls(
        self, done: Sequence[MatmulCall], path: str, names: Sequence[str], length: int | None
    ) -> list[MatmulShape]:
        """Convert matmuls to shapes: one for each weight, with its number of uses, and the others.

        `names` are the parameters of the module at `path`. Matmuls that do not use one of them
        whole are counted by shape. `positions`, the rows per sample, is left out if it is `length`.
        """
        by_weight: dict[str, MatmulShape] = {}
        others: Counter[MatmulShape] = Counter()
        for one in done:
            each = self._rows_per_sample(one.rows)
            named = _strip_path(one.weight, path) if one.weight else one.module.removeprefix(path)
            matmul = MatmulShape(
                name=(named or "matmul").strip("."),
                inputs=one.inputs,
                outputs=one.outputs,
                positions=None if each == length else each,
            )
            known = by_weight.get(one.weight or "")
            size = self.sizes.get(one.weight or "") if one.weight in names else None
            whole = size == one.inputs * one.outputs
            if known is None and whole and one.weight not in self.taken:
                by_weight[str(one.weight)] = matmul
            elif known is not None and known.model_copy(update={"uses": 1}) == matmul:
                by_weight[str(one.weight)] = known.model_copy(update={"uses": known.uses + 1})
            else:
                others[matmul.model_copy(update={"weighted": False})] += 1
        counted = [one.model_copy(update={"count": n}) for one, n in others.items()]
        return [*by_weight.values(), *counted]

    def _build_outline(
        self,
        name: str,
        stacks: list[Stack],
        before: list[MatmulCall | AttentionCall],
        after: list[MatmulCall | AttentionCall],
        width: int | None,
    ) -> Outline:
        """Build the outline; `before` and `after` are the operations outside the layers."""
        stacks = _merge_equal(stacks)
        length = stacks[-1].seq_len or self.seq_len or 1
        left = [key for key in self.sizes if key not in self.taken]
        hidden = width or self._usual_width(stacks)
        table_width = self.table_width or hidden
        head = self._find_head(after, table_width, left)
        outputs = head.outputs if head is not None else 0
        table = self._find_embedding(left, table_width, outputs)
        vocab = 0 if table is None else self.sizes[table] // table_width
        predicted, tied = None, False
        if head is not None:
            each, tied = self._rows_per_sample(head.rows), head.weight == table
            predicted = None if each == length else each
            after = [one for one in after if one is not head]
        told = {table, None if head is None else head.weight}
        left = [key for key in left if key not in told]
        first = self.matmuls(_as_matmuls(before), "", left, self.seq_len)
        embedding = {p.name for p in first if p.weighted}
        left = [key for key in left if key not in embedding]
        last = self.matmuls(_as_matmuls(after), "", left, predicted or length)
        found = Outline(
            name=name, hidden=hidden, stacks=tuple(stacks), vocab=vocab, outputs=outputs, tied=tied,
            embedding_width=None if table_width == hidden else table_width,
            embed_matmuls=tuple(first), head_matmuls=tuple(last), predicted=predicted,
            max_positions=read_positions(self.module) or self.seq_len or length,
            source="traced",
        )  # fmt: skip
        outside = sum(self.sizes.values()) - parameters(found)
        return found.model_copy(update={"outside_parameters": outside})

    def _usual_width(self, stacks: list[Stack]) -> int:
        taken = Counter(p.inputs for stack in stacks for p in stack.other)
        return taken.most_common(1)[0][0]

    def _find_embedding(self, left: Sequence[str], hidden: int, outputs: int) -> str | None:
        """Return the name of the token embedding's weight, which is as wide as the layers.

        Of several, prefer one with as many rows as the head has outputs, then the largest.
        """
        rows = {
            f"{path}.weight" if path else "weight": part.num_embeddings
            for path, part in self.module.named_modules()
            if isinstance(part, nn.Embedding) and part.embedding_dim == hidden
        }
        there = [name for name in rows if name in left]
        return max(there, key=lambda name: (rows[name] == outputs, rows[name]), default=None)

    def _find_head(
        self, after: Sequence[MatmulCall | AttentionCall], hidden: int, there: Sequence[str]
    ) -> MatmulCall | None:
        """Return the last matmul if it is the output head, else None.

        A head reads the layers' output, and no other matmul uses its weight.
        """
        made = [one for one in after if isinstance(one, MatmulCall)]
        if not made or made[-1].weight not in there or made[-1].inputs != hidden:
            return None
        last = made[-1]
        uses = sum(
            one.weight == last.weight for one in self.forward.done if isinstance(one, MatmulCall)
        )
        whole = self.sizes[str(last.weight)] == last.inputs * last.outputs
        return last if whole and uses == 1 else None


def _merge_equal(stacks: list[Stack]) -> list[Stack]:
    """Merge adjacent stacks that differ only in their number of layers."""
    merged: list[Stack] = []
    for stack in stacks:
        if merged and merged[-1].model_copy(update={"layers": stack.layers}) == stack:
            layers = merged[-1].layers + stack.layers
            merged[-1] = stack.model_copy(update={"layers": layers})
        else:
            merged.append(stack)
    return merged


def _attention_shape(one: AttentionCall) -> AttentionShape:
    return AttentionShape(
        heads=one.heads, kv_heads=one.kv_heads, head_dim=one.head_dim, value_dim=one.value_dim,
        causal=one.causal, projected=False,
    )  # fmt: skip


def _as_matmuls(done: Sequence[MatmulCall | AttentionCall]) -> list[MatmulCall]:
    made: list[MatmulCall] = []
    for one in done:
        if isinstance(one, MatmulCall):
            made.append(one)
            continue
        many = one.batch * one.heads
        rows = many * one.queries
        made.append(MatmulCall(one.module, None, rows, one.head_dim, one.keys, many))
        made.append(MatmulCall(one.module, None, rows, one.keys, one.value_dim, many))
    return made


def _make_relative(one: MatmulCall | AttentionCall, path: str) -> MatmulCall | AttentionCall:
    """Return the operation with names relative to the module at `path`."""
    if isinstance(one, AttentionCall):
        return one._replace(module=one.module.removeprefix(path))
    return one._replace(module=one.module.removeprefix(path), weight=_strip_path(one.weight, path))


def _is_within(name: str, paths: Sequence[str]) -> bool:
    return any(not path or name == path or name.startswith(f"{path}.") for path in paths)


def _strip_path(name: str | None, path: str) -> str | None:
    if name is None or not path or not name.startswith(f"{path}."):
        return name
    return name.removeprefix(f"{path}.")
