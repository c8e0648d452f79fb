"""The pieces of which vtrain-single's rows are composed, and their effect on picks.

Times are linear in micro-batches and in layers, so a layer's time per micro-batch follows from
differences between rows. Replacing each with the planner's, and keeping everything else as
published, shows which of them determine the picks.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from published import Row

# Hidden width, tp, micro-batch.
Kind = tuple[int, int, int]


def kind(row: Row) -> Kind:
    return row.number("hidden"), row.number("tp"), row.number("micro_batch")


def count(row: Row) -> int:
    """Return the micro-batches of a rank."""
    return row.number("global_batch") // row.number("dp") // row.number("micro_batch")


def linear(table: Sequence[Row]) -> dict[str, Any]:
    """Return how far other numbers of micro-batches are off the line through the first two."""
    names = ("layers", "hidden", "heads", "tp", "pp", "dp", "micro_batch")
    alike: defaultdict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for row in table:
        alike[tuple(row[name] for name in names)][count(row)] = row.measured_s or 0.0
    off, example = [], []
    for key, times in alike.items():
        first, second, *rest = sorted(times) if len(times) > 2 else (0, 0)
        slope = (times[second] - times[first]) / (second - first) if rest else 0.0
        off += [abs(times[first] + slope * (more - first) - times[more]) for more in rest]
        if rest and not example:
            example = [*zip(names, key, strict=True), *sorted(times.items())]
    return {"checked": len(off), "worst_s": round(max(off), 9), "example": example}


def layers(table: Sequence[Row], seconds: Mapping[str, float]) -> dict[Kind, float]:
    """Return times per layer and micro-batch without a pipeline, from differences of rows."""
    alike: defaultdict[tuple[Kind, int, int], dict[int, float]] = defaultdict(dict)
    for row in table:
        if row.number("pp") == 1:
            key = kind(row), row.number("dp"), row.number("layers")
            alike[key][count(row)] = seconds[row.id]
    slopes: defaultdict[Kind, defaultdict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for (what, _, deep), times in alike.items():
        if len(times) > 1:
            few, many = min(times), max(times)
            slopes[what][deep].append((times[many] - times[few]) / (many - few))
    found = {}
    for what, by_depth in slopes.items():
        if len(by_depth) > 1:
            few, many = min(by_depth), max(by_depth)
            rise = float(np.mean(by_depth[many]) - np.mean(by_depth[few]))
            found[what] = rise / (many - few)
    return found


def regret(table: Sequence[Row], seconds: Callable[[Row], float]) -> tuple[float, float]:
    """Return mean and 95th percentile of the regret of picks by these times."""
    groups: defaultdict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in table:
        groups[row.same].append((row.measured_s or 0.0, seconds(row)))
    lost = [
        min(own, key=lambda one: one[1])[0] / min(one[0] for one in own) - 1
        for own in groups.values()
        if len(own) >= 4
    ]
    return float(np.mean(lost)), float(np.quantile(lost, 0.95))


def analyse(table: Sequence[Row], predicted: Mapping[str, float]) -> dict[str, Any]:
    """Return layers as published and predicted, and the regret if everything else were known."""
    table = [row for row in table if row.source == "vtrain-single"]
    published = {row.id: row.measured_s or 0.0 for row in table}
    true, ours = layers(table, published), layers(table, predicted)

    def swapped(which: set[Kind], base: Mapping[str, float], sign: float) -> tuple[float, float]:
        def seconds(row: Row) -> float:
            what, number = kind(row), row.id
            if what not in which:
                return base[number]
            times = (count(row) + row.number("pp") - 1) * row.number("layers") / row.number("pp")
            return base[number] + sign * times * (ours[what] - true[what])

        return regret(table, seconds)

    each = {what: swapped({what}, published, 1.0) for what in true}
    worst = sorted(each, key=lambda what: -each[what][0])
    return {
        "linear": linear(table),
        "pieces": [
            {"hidden": h, "tp": tp, "micro_batch": m, "published_s": round(true[h, tp, m], 9),
             "predicted_s": round(ours[h, tp, m], 9), "regret": each[h, tp, m]}
            for h, tp, m in sorted(true)
        ],
        "worst": list(worst[:2]),
        "all_else_known": swapped(set(true), published, 1.0),
        "layers_known": swapped(set(true), predicted, -1.0),
        "all_but_worst_known": swapped(set(worst[:1]), published, 1.0),
        "all_but_two_known": swapped(set(worst[:2]), published, 1.0),
        "predicted_but_two_known": swapped(set(worst[:2]), predicted, -1.0),
    }  # fmt: skip
