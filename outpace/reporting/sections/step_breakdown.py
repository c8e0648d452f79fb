"""The time of a step by part, and by rank if that was recorded."""

from collections.abc import Mapping, Sequence

import numpy as np

from outpace.records.measurement import PARTS, TimeParts
from outpace.records.units import show_seconds, show_share
from outpace.reporting.charts import palette
from outpace.reporting.charts.figures import bars, join_items, seconds, stacked_bars
from outpace.reporting.data.step_log import StepLog
from outpace.reporting.render.document import Chart

_MOST_RANKS = 24


def parts_figure(title: str, parts: Mapping[str, TimeParts]) -> Chart:
    """Draw a bar per name, made of a step's parts."""
    unit = seconds([one.total_s for one in parts.values()])
    alt = join_items([f"{name}: {in_words(one)}" for name, one in parts.items()])
    return stacked_bars(
        title, alt, list(parts),
        {part: [getattr(one, f"{part}_s") for one in parts.values()] for part in PARTS},
        unit, "time of a step", palette.PARTS,
    )  # fmt: skip


def in_words(parts: TimeParts) -> str:
    """Format the parts that take at least 1 % of a step: "backward 53.5 %, forward 45.1 %"."""
    whole = parts.total_s or 1.0
    found = {part: getattr(parts, f"{part}_s") / whole for part in PARTS}
    said = sorted(((share, part) for part, share in found.items() if share >= 0.01), reverse=True)
    return ", ".join(f"{part} {show_share(share)}" for share, part in said)


def by_rank(parts: Sequence[TimeParts]) -> Chart:
    """Draw a bar per rank; if there are many, those that compute longest."""
    slow = sorted(range(len(parts)), key=lambda rank: -parts[rank].computing_s)[:_MOST_RANKS]
    title = "Time of a step by part and by rank"
    if len(parts) > _MOST_RANKS:
        title += f": the {_MOST_RANKS} of {len(parts)} that compute longest"
    return parts_figure(title, {f"rank {rank}": parts[rank] for rank in sorted(slow)})


def step_intervals(steps: StepLog, parts: TimeParts | None) -> Chart:
    """Draw rank 0's `parts` of a median step, and the interval that contains 90 % of the steps.

    Without `parts`, those of the log are drawn.
    """
    parts = parts or steps.median_parts()
    found = {
        part: (
            getattr(parts, f"{part}_s"),
            *np.nanpercentile(steps.steady(f"{part}_s"), (5, 95)).tolist(),
        )
        for part in PARTS
    }
    unit = seconds([high for _, _, high in found.values()])
    alt = " ".join(
        f"{part}: {show_seconds(middle)}, 90 % of steps between {show_seconds(low)} and "
        f"{show_seconds(high)}."
        for part, (middle, low, high) in found.items()
    )
    return bars(
        "Each part of rank 0's median step, and the interval of 90 % of steps", alt, list(found),
        [middle for middle, _, _ in found.values()], unit, "time",
        [(low, high) for _, low, high in found.values()],
        [palette.PARTS[part] for part in found],
    )  # fmt: skip
