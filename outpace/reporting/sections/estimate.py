"""Chart of an estimate's step time by part."""

from collections.abc import Mapping

from outpace.planner.explain.titles import PARTS
from outpace.records.estimate import Estimate
from outpace.records.units import show_seconds
from outpace.reporting.charts.figures import join_items, seconds, stacked_bars
from outpace.reporting.charts.palette import ESTIMATED
from outpace.reporting.render.document import Chart


def parts_bars(title: str, estimates: Mapping[str, Estimate]) -> Chart:
    """Draw the parts of each estimate's step time."""
    unit = seconds([one.step_time_s for one in estimates.values()])
    alt = join_items([f"{name}: {_format_largest(one)}" for name, one in estimates.items()])
    return stacked_bars(
        title, alt, list(estimates),
        {words: [one.parts_s.get(part, 0.0) for one in estimates.values()]
         for part, words in PARTS.items()},
        unit, "time of a step", {words: ESTIMATED[part] for part, words in PARTS.items()},
    )  # fmt: skip


def _format_largest(estimate: Estimate) -> str:
    parts = sorted(estimate.parts_s.items(), key=lambda pair: -pair[1])[:3]
    return ", ".join(f"{PARTS[part]} {show_seconds(took)}" for part, took in parts if took)
