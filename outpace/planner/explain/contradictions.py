"""Required options that contradict each other, and values that would be possible instead."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from outpace.planner.model.adapters import ADAPTER_NAMES
from outpace.planner.plan_columns import OPTIMIZERS, PRECISIONS
from outpace.planner.search.search_request import SearchRequest
from outpace.planner.search.space import has_plans
from outpace.records.errors import join_and, join_or

_MOST_OPTIONS = 3  # largest set of options to check
_SIZES = ("dp_replicate", "dp_shard", "virtual_stages")
_MOST_SIZES = 16  # largest size to suggest instead of a required one
_VALUES: Mapping[str, tuple[str, ...]] = {
    "optimizer": tuple(OPTIMIZERS),
    "precision": tuple(name for name in PRECISIONS if name != "fp64"),  # only for proofs
}


def contradictions(wanted: SearchRequest, other_program: bool = False) -> list[str]:
    """Return a sentence for each smallest set of required options that no plan can combine.

    `other_program`: the trainer is not outpace and may support combinations that the planner cannot
    predict.
    """
    items = _required_items(wanted)
    for count in range(1, _MOST_OPTIONS + 1):
        found = [
            some
            for some in combinations(items, count)
            if not has_plans(_require_only(wanted, {name: items[name] for name in some}))
        ]
        if found:
            return [
                _describe_contradiction(wanted, {name: items[name] for name in some}, other_program)
                for some in found
            ]
    return []


def _required_items(wanted: SearchRequest) -> dict[str, Any]:
    """Return the required options by name, with all adapter options as one item."""
    items = {name: value for name, value in wanted.keep.items() if name not in ADAPTER_NAMES}
    adapters = {name: value for name, value in wanted.keep.items() if name in ADAPTER_NAMES}
    if adapters:
        items["adapters"] = adapters
    if "precision" not in {*items, *wanted.vary}:
        items["precision"] = wanted.precision
    return items


def _require_only(wanted: SearchRequest, items: Mapping[str, Any]) -> SearchRequest:
    keep = {name: value for name, value in items.items() if name != "adapters"}
    keep |= items.get("adapters", {})
    vary = {name: values for name, values in wanted.vary.items() if name != "precision"}
    precision = keep.pop("precision", "fp32")  # contradicts nothing
    if "precision" in wanted.vary:
        vary["precision"] = wanted.vary["precision"]
    optimizer = wanted.optimizer if "precision" in items else None
    return replace(
        wanted, keep=keep, vary=vary, precision=precision, optimizer=optimizer,
        offloaded_precision=wanted.offloaded_precision if "precision" in items else None,
    )  # fmt: skip


def _describe_contradiction(
    wanted: SearchRequest, items: Mapping[str, Any], other_program: bool
) -> str:
    """Return a sentence on options that contradict each other, and on values that are allowed.

    If these options include the precision of another trainer, the sentence says only that outpace
    cannot predict the combination.
    """
    named = {
        name: f"--lora-rank {value['lora_rank']}" if name == "adapters" else f"{name}={value}"
        for name, value in items.items()
    }
    if len(named) == 1:
        begin = f"no plan can have {next(iter(named.values()))}{_possible_sizes(wanted, items)}"
    elif other_program and "precision" in items:
        begin = (
            f"outpace does not predict {join_and(named.values())} together, whether or not the "
            "trainer supports it"
        )
    else:
        begin = f"{join_and(named.values())} contradict each other"
    return ". ".join([begin, *_list_allowed_values(wanted, items, named)])


def _possible_sizes(wanted: SearchRequest, items: Mapping[str, Any]) -> str:
    (name,) = items
    most = min(wanted.world, _MOST_SIZES) if name in _SIZES else 0
    fine = [n for n in range(1, most + 1) if has_plans(_require_only(wanted, {name: n}))]
    return f"; {name} may be {join_or(fine)} here" if fine else ""


def _list_allowed_values(
    wanted: SearchRequest, items: Mapping[str, Any], named: Mapping[str, str]
) -> Iterator[str]:
    for name in items:
        others = [named[other] for other in named if other != name]
        fine = [
            value
            for value in _VALUES.get(name, ())
            if has_plans(_require_only(wanted, {**items, name: value}))
        ]
        if fine and others:
            yield f"With {join_and(others)}, {name} may be {join_or(fine)}"
