"""An estimate's time and memory as bars."""

from collections.abc import Mapping

from outpace.planner.titles import PARTS
from outpace.records.estimate import Estimate
from outpace.records.units import show_seconds
from outpace.report.colours import ESTIMATED
from outpace.report.document import Figure
from outpace.report.figures import listed, seconds, stacked


def parts_bars(title: str, estimates: Mapping[str, Estimate]) -> Figure:
    """Where each one's time goes."""
    unit = seconds([one.step_time_s for one in estimates.values()])
    alt = listed([f"{name}: {_largest(one)}" for name, one in estimates.items()])
    return stacked(
        title, alt, list(estimates),
        {words: [one.parts_s.get(part, 0.0) for one in estimates.values()]
         for part, words in PARTS.items()},
        unit, "time of a step", {words: ESTIMATED[part] for part, words in PARTS.items()},
    )  # fmt: skip


def _largest(one: Estimate) -> str:
    parts = sorted(one.parts_s.items(), key=lambda pair: -pair[1])[:3]
    return ", ".join(f"{PARTS[part]} {show_seconds(took)}" for part, took in parts if took)
