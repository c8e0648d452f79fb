"""Charts of a rank's memory by kind, over a step and at the peak."""

from collections.abc import Mapping, Sequence

import numpy as np

from outpace.records.memory import KINDS, Kind, MemoryAccount, MemoryUse, explain_kinds
from outpace.records.units import show_bytes
from outpace.reporting.charts import palette
from outpace.reporting.charts.downsample import thin
from outpace.reporting.charts.figures import Unit, axis, join_items, sizes, stacked_bars
from outpace.reporting.render.document import Cell, Chart, DataTable, Number, Paragraph, Part

_POINTS = 600
_HERE: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "offloaded")
COLOURS: Mapping[str, str] = dict(zip(KINDS, palette.MEMORY, strict=False))


def over_a_step(account: MemoryAccount, limit_bytes: int | None = None) -> Chart:
    """Draw memory over a step, stacked by kind, and the device's memory if it is nearly used up."""
    totals = np.array([float(moment.nbytes) for moment in account.timeline])
    places = thin(totals, _POINTS)
    moments = [account.timeline[place] for place in places]
    unit = sizes([float(account.peak_memory_bytes)])
    where = [f"{moment.location}: {moment.operator}" for moment in moments]
    used = [kind for kind in _HERE if any(moment.by_kind.get(kind) for moment in moments)]
    traces = tuple(
        {
            "type": "scatter", "mode": "lines", "stackgroup": "all", "name": kind,
            "x": list(map(int, places)),
            "y": unit.scale([float(moment.by_kind.get(kind, 0)) for moment in moments]),
            "line": {"width": 0, "shape": "hv", "color": COLOURS[kind]},
            "fillcolor": COLOURS[kind], "text": where,
            "hovertemplate": f"%{{fullData.name}}: %{{y:.4g}} {unit.name}<br>%{{text}}"
                             "<extra></extra>",
        }
        for kind in used
    )  # fmt: skip
    peak = account.peak
    title = f"Memory over a step, {account.source}, rank {account.rank} of {account.world_size}"
    alt = (
        f"Tensors take {show_bytes(account.peak_memory_bytes)} at the peak, in the "
        f"{peak.location}: "
        + ", ".join(f"{kind} {show_bytes(size)}" for kind, size in _largest_kinds(peak.by_kind))
        + "."
    )
    layout = {
        "hovermode": "closest", "yaxis": axis("memory of tensors", unit, rangemode="tozero"),
        "xaxis": _parts_axis(account), "annotations": [_peak_annotation(account, totals, unit)],
    }  # fmt: skip
    if limit_bytes is not None and limit_bytes < 1.6 * account.peak_memory_bytes:
        text = {"text": f"the device has {show_bytes(limit_bytes)}", "textposition": "top left"}
        height = limit_bytes * unit.factor
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height,
             "line": {"dash": "dash", "width": 1, "color": "#777777"}, "label": text},
        ]  # fmt: skip
    return Chart(title, alt, traces, layout, _peaks_table(account, used), 420)


def _largest_kinds(by_kind: Mapping[Kind, int]) -> list[tuple[Kind, int]]:
    return sorted(by_kind.items(), key=lambda pair: -pair[1])[:5]


def _parts_axis(account: MemoryAccount) -> dict[str, object]:
    """Return the layout of an axis that names a step's longer parts: forward, backward, …."""
    parts = [moment.part for moment in account.timeline]
    begins = [at for at, part in enumerate(parts) if at == 0 or parts[at - 1] != part]
    ends = [*begins[1:], len(parts)]
    long = [(a, b) for a, b in zip(begins, ends, strict=True) if b - a > 0.06 * len(parts)]
    return {"tickvals": [(a + b) / 2 for a, b in long], "ticktext": [parts[a] for a, _ in long],
            "showgrid": False, "zeroline": False,
            "title": {"text": "the step's operators, in order"}}  # fmt: skip


def _peak_annotation(account: MemoryAccount, totals: "np.ndarray[tuple[int], np.dtype[np.float64]]",
          unit: Unit) -> dict[str, object]:  # fmt: skip
    top = int(totals.argmax())
    words = f"{show_bytes(totals[top])}\n{account.timeline[top].part}"
    return {"x": top, "y": totals[top] * unit.factor, "text": words, "showarrow": True,
            "arrowcolor": "#777777", "ax": 0, "ay": -30}  # fmt: skip


def _peaks_table(account: MemoryAccount, used: Sequence[Kind]) -> DataTable:
    fullest: dict[str, int] = {}
    for place, moment in enumerate(account.timeline):
        if (
            moment.part not in fullest
            or moment.nbytes > account.timeline[fullest[moment.part]].nbytes
        ):
            fullest[moment.part] = place
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (part, account.timeline[place].module or "–",
         *(_size_cell(account.timeline[place].by_kind.get(kind, 0)) for kind in used),
         _size_cell(account.timeline[place].nbytes))
        for part, place in fullest.items()
    )  # fmt: skip
    return DataTable("Peak of each part", ("part", "module", *used, "all"), rows)


def _size_cell(size: int) -> Number:
    return Number(size, show_bytes(size))


def at_the_peak(
    bars: Mapping[str, Mapping[str, int]], limit: int | None = None
) -> tuple[Part, ...]:
    """Draw a bar of peak memory for each name, stacked by kind of memory, and explain the kinds.

    `limit`: the device's memory in bytes.
    """
    kinds = [kind for kind in dict.fromkeys([*_HERE, *(k for one in bars.values() for k in one)])
             if kind != "offloaded"]  # fmt: skip
    totals = [float(sum(size for kind, size in one.items() if kind != "offloaded"))
              for one in bars.values()]  # fmt: skip
    shown = limit is not None and limit < 2.5 * max(totals, default=0.0)
    alt = join_items(
        [f"{name}: {show_bytes(total)}" for name, total in zip(bars, totals, strict=True)]
    )
    chart = stacked_bars(
        "Memory at the peak on the fullest rank", alt, list(bars),
        {kind: [float(one.get(kind, 0)) for one in bars.values()] for kind in kinds},
        sizes([*totals, float(limit or 0) if shown else 0.0]), "memory", COLOURS,
        (f"the device has {show_bytes(limit)} ", float(limit)) if limit and shown else None,
    )  # fmt: skip
    told = explain_kinds([kind for kind in kinds if any(one.get(kind) for one in bars.values())])
    return (chart, Paragraph(f"{told[0].upper()}{told[1:]}.")) if told else (chart,)


def peak_by_source(use: MemoryUse) -> dict[str, Mapping[str, int]]:
    """Return the peak memory by kind: as traced in simulation and as measured, if available."""
    found = {"traced": use.traced, "measured": use.measured}
    return {
        name: {str(kind): size for kind, size in account.peak.by_kind.items()}
        for name, account in found.items()
        if account is not None
    }
