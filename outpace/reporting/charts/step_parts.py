"""Chart of a step's time by part."""

from collections.abc import Mapping

from outpace.records.measurement import PARTS, TimeParts
from outpace.records.units import show_share
from outpace.reporting.charts import palette
from outpace.reporting.charts.figures import join_items, seconds, stacked_bars
from outpace.reporting.render.document import Chart


def parts_figure(title: str, parts: Mapping[str, TimeParts]) -> Chart:
    """Draw a bar per name, stacked from the parts of a step."""
    unit = seconds([one.total_s for one in parts.values()])
    alt = join_items([f"{name}: {in_words(one)}" for name, one in parts.items()])
    return stacked_bars(
        title, alt, list(parts),
        {part: [getattr(one, f"{part}_s") for one in parts.values()] for part in PARTS},
        unit, "time of a step", palette.PARTS,
    )  # fmt: skip


def in_words(parts: TimeParts) -> str:
    """Return each part's share of the step time as text: "backward 53.5 %, forward 45.1 %".

    Parts that take less than 1 % are left out.
    """
    whole = parts.total_s or 1.0
    found = {part: getattr(parts, f"{part}_s") / whole for part in PARTS}
    shown = sorted(((share, part) for part, share in found.items() if share >= 0.01), reverse=True)
    return ", ".join(f"{part} {show_share(share)}" for share, part in shown)
