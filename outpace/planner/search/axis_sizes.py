"""Possible sizes of an axis for a model and a number of ranks."""

import math
from collections.abc import Iterator
from itertools import product
from types import MappingProxyType

from outpace.planner.model.outline import weights
from outpace.planner.search.search_request import SearchRequest

_SHORTEST_PART = 1024  # tokens of a sequence per context-parallel rank
_MOST_EP = 64


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def meshes(wanted: SearchRequest) -> Iterator[tuple[int, int, int]]:
    """Yield possible (tp, cp, pp); tp stays within a node, and cp keeps enough tokens per rank."""
    world = wanted.world
    for tp, cp, pp in product(*(_possible_sizes(wanted, axis) for axis in ("tp", "cp", "pp"))):
        if world % (tp * cp * pp) == 0:
            yield tp, cp, pp


def _possible_sizes(wanted: SearchRequest, axis: str) -> list[int]:
    return [n for n in divisors(wanted.world) if refused_size(wanted, axis, n) is None]


def allowed_sizes(wanted: SearchRequest, axis: str) -> list[int]:
    """Return the possible sizes of an axis: tp, cp, pp or ep."""
    return expert_axes(wanted.world, wanted) if axis == "ep" else _possible_sizes(wanted, axis)


def refused_size(wanted: SearchRequest, axis: str, size: int) -> str | None:
    """Explain why an axis cannot have this size for the model and machine; None if it can."""
    name, world = wanted.outline.name, wanted.world
    if size == 1:
        return None
    if world % size:
        return f"{axis} {size} does not divide the {world} devices"
    return _REFUSALS[axis](wanted, size, name)


def _refused_tp(wanted: SearchRequest, size: int, name: str) -> str | None:
    most = min(wanted.per_node, wanted.most_tp or wanted.per_node)
    if size > most:
        where = "--max-tp" if wanted.most_tp == most else "the devices of a node"
        return f"tp {size} is more than {where}, {most}"
    for stack in wanted.outline.stacks:
        for attention in (stack.attention, stack.cross_attention):
            if attention is None:
                continue
            for heads, what in (
                (attention.heads, "heads"), (attention.kv_heads, "key and value heads")
            ):  # fmt: skip
                if heads % size:
                    return f"tp {size} does not divide the {heads} {what} of {name}"
        for weight in weights(stack, wanted.outline.hidden):
            width = weight.outputs if weight.cut == "outputs" else weight.inputs
            if weight.cut != "none" and not weight.experts and width % size:
                return f"tp {size} does not divide {width}, the width of {weight.name} of {name}"
    return None


def _refused_cp(wanted: SearchRequest, size: int, name: str) -> str | None:
    if all(stack.attention is None for stack in wanted.outline.stacks):
        return f"{name} has no attention to split by cp"
    if wanted.seq_len % (2 * size):
        return (
            f"cp {size} splits sequences into {2 * size} parts, but {wanted.seq_len} tokens are "
            "not a multiple of that"
        )
    if size > max(1, wanted.seq_len // _SHORTEST_PART):
        return (
            f"cp {size} leaves fewer than {_SHORTEST_PART} of {wanted.seq_len} tokens to a device"
        )
    return None


def _refused_pp(wanted: SearchRequest, size: int, name: str) -> str | None:
    if not wanted.alike:
        return f"pp {size}: the layers of {name} differ, so they cannot be divided evenly"
    if size > wanted.outline.layers:
        return f"pp {size} is more than the {wanted.outline.layers} layers of {name}"
    return None


def _refused_ep(wanted: SearchRequest, size: int, name: str) -> str | None:
    experts = wanted.outline.experts
    if not experts:
        return f"ep {size}: {name} has no experts"
    if wanted.trained:
        return f"ep {size}: outpace does not train with ep, and --trained requires plans it trains"
    if experts % size:
        return f"ep {size} does not divide the {experts} experts of {name}"
    return f"ep {size} is more than {_MOST_EP}" if size > _MOST_EP else None


_REFUSALS = MappingProxyType(
    {"tp": _refused_tp, "cp": _refused_cp, "pp": _refused_pp, "ep": _refused_ep}
)


def expert_axes(ranks: int, wanted: SearchRequest) -> list[int]:
    """Return the sizes of ep that divide both `ranks` and the number of experts."""
    experts = wanted.outline.experts
    if not experts or wanted.trained:
        return [1]
    return [n for n in divisors(math.gcd(ranks, experts)) if n <= _MOST_EP]
