"""Charts of a step's time by part and rank, and of its variation."""

from collections.abc import Sequence

import numpy as np

from outpace.records.measurement import PARTS, TimeParts
from outpace.records.units import show_seconds
from outpace.reporting.charts import palette
from outpace.reporting.charts.figures import bars, seconds
from outpace.reporting.charts.step_parts import parts_figure
from outpace.reporting.data.step_log import StepLog
from outpace.reporting.render.document import Chart

_MOST_RANKS = 24


def by_rank(parts: Sequence[TimeParts]) -> Chart:
    """Draw each rank's step time by part; of many ranks, only those that compute longest."""
    slow = sorted(range(len(parts)), key=lambda rank: -parts[rank].computing_s)[:_MOST_RANKS]
    title = "Time of a step by part and by rank"
    if len(parts) > _MOST_RANKS:
        title += f": the {_MOST_RANKS} of {len(parts)} that compute longest"
    return parts_figure(title, {f"rank {rank}": parts[rank] for rank in sorted(slow)})


def step_intervals(steps: StepLog, parts: TimeParts | None) -> Chart:
    """Draw the parts of rank 0's median step, with the range of each part in 90 % of the steps.

    Without `parts`, the medians are computed from `steps`.
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
