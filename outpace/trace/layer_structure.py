"""Attention, MLP and experts of a traced layer, recognised by the shapes of its matmuls.

Recognised parts are planned like layers of outpace's models, including tensor and expert
parallelism. For all other matmuls, only sizes are known.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.records.outline import AttentionShape, Mlp, Stack
from outpace.trace.matmuls import MatmulCall


@dataclass(frozen=True)
class LayerWeights:
    """The parameters of a traced layer, and the sizes by which its matmuls are recognised.

    `shapes` has the parameters' shapes by name. `hidden` is the width of the layer's output. `rows`
    is the number of tokens that the layer reads, `cross_rows` that of its cross-attention.
    """

    shapes: Mapping[str, tuple[int, ...]]
    hidden: int
    rows: int
    cross_rows: int | None = None

    def is_whole(self, one: MatmulCall, *, cross: bool = False) -> bool:
        """Return whether a matmul multiplies all tokens of the layer by a whole weight matrix.

        With `cross`, these may also be the tokens that cross-attention reads.
        """
        shape = self.shapes.get(one.weight or "")
        return (
            shape is not None
            and (one.rows == self.rows or (cross and one.rows == self.cross_rows))
            and (len(shape) == 2 or (len(shape) == 3 and shape[-1] == 1))
            and shape[0] * shape[1] == one.inputs * one.outputs
        )

    def has_bias(self, matmuls: Sequence[MatmulCall]) -> bool:
        """Return whether each of the matmuls adds a bias."""
        return all(self._bias_name(one) is not None for one in matmuls)

    def _bias_name(self, one: MatmulCall) -> str | None:
        weight = str(one.weight)
        names = (f"{weight.removesuffix('weight')}bias", f"{weight}_bias")
        return next((name for name in names if name in self.shapes), None)


@dataclass(frozen=True)
class LayerStructure:
    """A stack of equal layers with its recognised parts, and the matmuls that belong to none."""

    stack: Stack
    rest: tuple[MatmulCall, ...]


def recognise_layer(
    stack: Stack, matmuls: Sequence[MatmulCall], places: Mapping[str, int], weights: LayerWeights
) -> LayerStructure:
    """Recognise the attention projections and the MLP or experts in the layers of a stack.

    `matmuls` are a layer's matmuls in execution order. `places` has the number of them that run
    before the self-attention ("own") and before the cross-attention ("cross").
    """
    rest = list(matmuls)
    uses = Counter(one.weight for one in matmuls)
    updates: dict[str, Any] = {}
    taken: list[MatmulCall] = []
    for name, place in (("attention", "own"), ("cross_attention", "cross")):
        attention: AttentionShape | None = getattr(stack, name)
        if attention is None:
            continue
        before, after = (
            [
                o
                for o in part
                if o not in taken
                and uses[o.weight] == 1
                and weights.is_whole(o, cross=place == "cross")
            ]
            for part in (matmuls[: places[place]], matmuls[places[place] :])
        )
        projected = _find_projections(attention, before, after, weights)
        if projected is not None:
            updates[name], found = projected
            taken += found
            rest = [
                *(one for one in rest if one not in found),
                *_gate_matmuls(updates[name], found),
            ]
    whole = [one for one in rest if uses[one.weight] == 1 and weights.is_whole(one)]
    found_mlp = _find_experts(rest, whole, weights) or next(_find_mlps(whole, weights), None)
    if found_mlp is not None:
        updates["mlp"], found = found_mlp
        rest = [one for one in rest if one not in found]
        rest += _extra_router_outputs(updates["mlp"], found)
    return LayerStructure(stack.model_copy(update=updates), tuple(rest))


def _group_by_module(matmuls: Sequence[MatmulCall]) -> Iterator[list[MatmulCall]]:
    """Yield the matmuls of each submodule, innermost submodules first, and finally all matmuls."""
    groups: dict[tuple[str, ...], list[MatmulCall]] = {}
    for one in matmuls:
        parts = str(one.weight).split(".")
        for depth in range(len(parts)):
            groups.setdefault(tuple(parts[:depth]), []).append(one)
    for path in sorted(groups, key=len, reverse=True):
        yield groups[path]


def _likely_groups(before: Sequence[MatmulCall], out: MatmulCall) -> Iterator[Sequence[MatmulCall]]:
    """Yield groups of matmuls that may contain an attention's projections, the likeliest first.

    These are the matmuls in the module of the output projection `out`, then all, then those of each
    submodule.
    """
    start = f"{_module_path(out)}."
    yield [one for one in before if str(one.weight).startswith(start)]
    yield from reversed(list(_group_by_module(before)))


Projected = tuple[AttentionShape, list[MatmulCall]]


def _find_projections(
    attention: AttentionShape,
    before: Sequence[MatmulCall],
    after: Sequence[MatmulCall],
    weights: LayerWeights,
) -> Projected | None:
    """Find an attention's projections of queries, keys and values, and its output projection.

    The former are searched in `before`, the output in `after`. Return the attention with what they
    show, and their matmuls; None if they are not found.
    """
    mixed = attention.heads * attention.value_dim
    out = next((one for one in after if (one.inputs, one.outputs) == (mixed, weights.hidden)), None)
    if out is None:
        return None
    for group in _likely_groups(before, out):
        for reader in (_find_plain_projections, _find_latent_projections):
            found = reader(attention, group, weights)
            if found is not None:
                shape, taken = found
                bias = weights.has_bias([out])
                return shape.model_copy(update={"out_bias": bias}), [*taken, out]
    return None


def _find_plain_projections(
    attention: AttentionShape, before: Sequence[MatmulCall], weights: LayerWeights
) -> Projected | None:
    """Find the projections of queries, keys and values, fused or separate.

    The number of key heads is derived from their width, because the traced attention may have
    repeated the keys for all heads.
    """
    read = [one for one in before if one.inputs == weights.hidden]
    queries = attention.heads * attention.head_dim
    for kv_heads in range(attention.heads, 0, -1):
        if attention.heads % kv_heads:
            continue
        keys, values = kv_heads * attention.head_dim, kv_heads * attention.value_dim
        taken = _find_qkv(read, queries, keys, values)
        if taken is not None:
            bias = weights.has_bias(taken)
            update = {"projected": True, "kv_heads": kv_heads, "qkv_bias": bias}
            return attention.model_copy(update=update), taken
    return None


def _find_qkv(
    read: Sequence[MatmulCall], queries: int, keys: int, values: int
) -> list[MatmulCall] | None:
    if len(read) < 3:
        return list(read) if sum(one.outputs for one in read) == queries + keys + values else None
    taken: list[MatmulCall] = []
    # a gate may be fused with the queries
    for outputs in ((queries, 2 * queries), (keys,), (values,)):
        one = next((one for one in read if one.outputs in outputs and one not in taken), None)
        if one is None:
            return None
        taken.append(one)
    return taken


def _gate_matmuls(attention: AttentionShape, taken: Sequence[MatmulCall]) -> list[MatmulCall]:
    """Return the matmul of an output gate, if the query projection also computes one.

    The projection is then twice as wide as the queries. The gate multiplies attention's output.
    """
    queries = attention.heads * attention.head_dim
    if attention.kv_rank is not None:
        return []
    return [
        one._replace(weight=None, outputs=queries)
        for one in taken[:1]
        if one.outputs == 2 * queries
    ]


def _find_latent_projections(
    attention: AttentionShape, before: Sequence[MatmulCall], weights: LayerWeights
) -> Projected | None:
    """Find the low-rank projections of latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    if attention.heads != attention.kv_heads:
        return None
    queries = attention.heads * attention.head_dim
    for down in before:
        for up in before:
            rope = down.outputs - up.inputs
            shared = attention.head_dim - rope + attention.value_dim
            if down.inputs != weights.hidden or not 0 <= rope < attention.head_dim:
                continue
            if up is down or up.outputs != attention.heads * shared:
                continue
            made = _find_latent_queries(queries, [one for one in before if one not in (up, down)],
                                   weights.hidden)  # fmt: skip
            if made is None:
                continue
            rank, taken = made
            update = {
                "projected": True, "query_rank": rank, "kv_rank": up.inputs, "rope_dim": rope,
                "qkv_bias": weights.has_bias([down]),
            }  # fmt: skip
            return attention.model_copy(update=update), [*taken, down, up]
    return None


def _find_latent_queries(
    queries: int, others: Sequence[MatmulCall], hidden: int
) -> tuple[int | None, list[MatmulCall]] | None:
    for up in others:
        if up.outputs != queries:
            continue
        down = next(
            (one for one in others if one is not up
             and (one.inputs, one.outputs) == (hidden, up.inputs)), None
        )  # fmt: skip
        if down is not None:
            return up.inputs, [down, up]
        if up.inputs == hidden:
            return None, [up]
    return None


def _find_mlps(
    whole: Sequence[MatmulCall], weights: LayerWeights
) -> Iterator[tuple[Mlp, list[MatmulCall]]]:
    found = [made for group in _group_by_module(whole) for made in _find_mlps_in(group, weights)]
    yield from sorted(found, key=lambda made: made[0].width, reverse=True)


def _find_mlps_in(
    group: Sequence[MatmulCall], weights: LayerWeights
) -> Iterator[tuple[Mlp, list[MatmulCall]]]:
    hidden = weights.hidden
    for down in group:
        if down.outputs != hidden:
            continue
        width = down.inputs
        up = [one for one in group if one is not down and one.inputs == hidden]
        apart = [one for one in up if one.outputs == width]
        joined = [one for one in up if one.outputs == 2 * width]
        for gated, taken in ((True, apart[:2]), (True, joined[:1]), (False, apart[:1])):
            if len(taken) == (2 if gated and taken == apart[:2] else 1):
                if len(taken) + 1 < len(group):  # the group has matmuls of something else
                    break
                bias = weights.has_bias([*taken, down])
                yield Mlp(width=width, gated=gated, bias=bias), [*taken, down]
                break


def _find_experts(
    rest: Sequence[MatmulCall], whole: Sequence[MatmulCall], weights: LayerWeights
) -> tuple[Mlp, list[MatmulCall]] | None:
    """Find experts with stacked weights, their router, and a shared expert if there is one."""
    stacked = [one for one in rest if len(weights.shapes.get(one.weight or "", ())) == 3]
    stacked = [one for one in stacked if one.rows % weights.rows == 0]
    for down in sorted(stacked, key=lambda one: one.inputs * one.outputs, reverse=True):
        count = weights.shapes[str(down.weight)][0]
        if down.outputs != weights.hidden or not _is_stacked(down, weights):
            continue
        up = [one for one in stacked if one is not down and one.rows == down.rows
              and one.inputs == weights.hidden and _is_stacked(one, weights)
              and weights.shapes[str(one.weight)][0] == count
              and _module_path(one) == _module_path(down)]  # fmt: skip
        active = down.rows // weights.rows
        matmuls = sum(one.outputs for one in up) / down.inputs
        if matmuls not in (1, 2) or not 1 <= active <= count:
            continue
        mlp = Mlp(width=down.inputs, gated=matmuls == 2, bias=weights.has_bias([*up, down]),
                  experts=count, active=active)  # fmt: skip
        taken = [*up, down]
        shared = next(_find_mlps(whole, weights), None)
        if shared is not None and shared[0].gated == mlp.gated:
            taken += shared[1]
            mlp = mlp.model_copy(update={"shared": shared[0].width})
        routers = [
            one
            for one in whole
            if one not in taken and one.inputs == weights.hidden and one.outputs >= count
        ]
        if routers:
            return mlp, [*taken, min(routers, key=lambda one: one.outputs)]
    return None


def _module_path(one: MatmulCall) -> str:
    """Return the path of the module that contains the matmul's linear layer or parameter."""
    return str(one.weight).removesuffix(".weight").rpartition(".")[0]


def _extra_router_outputs(mlp: Mlp, taken: Sequence[MatmulCall]) -> list[MatmulCall]:
    """Return a matmul of the router's outputs that are no experts (LongCat's identity experts)."""
    router = taken[-1]
    if not mlp.experts or router.outputs == mlp.experts:
        return []
    return [router._replace(weight=None, outputs=router.outputs - mlp.experts)]


def _is_stacked(one: MatmulCall, weights: LayerWeights) -> bool:
    shape = weights.shapes[str(one.weight)]
    return sorted(shape[1:]) == sorted((one.inputs, one.outputs))
