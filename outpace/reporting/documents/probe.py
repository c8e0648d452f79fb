"""The report of a probed machine."""

from collections.abc import Iterable, Sequence

from outpace.probing.timing.link_model import COLLECTIVES, bus_factor
from outpace.records.figure import Figure as Measured
from outpace.records.machine import Machine
from outpace.records.probe_results import ProbeRecord
from outpace.records.units import show_count, show_seconds, show_share, show_size
from outpace.reporting.charts.figures import (
    AxisChoice,
    LineSeries,
    Unit,
    axis,
    bars,
    counts,
    join_items,
    lines,
    seconds,
    shares,
    sizes,
)
from outpace.reporting.charts.palette import BLUE, GREY, colour
from outpace.reporting.render.document import (
    Chart,
    Code,
    DataTable,
    Document,
    DocumentSection,
    Number,
    Paragraph,
    Part,
    pairs,
)
from outpace.reporting.sections.environment import machine_table, topology, versions

_KINDS = {
    "matmul": "Matmuls", "vocabulary": "The head, by vocabulary",
    "attention": "Attention, by number of heads", "memory": "Memory", "storage": "Storage",
    "loader": "Data loading", "tokenise": "Tokenising", "step": "Steps of small training runs",
    "ranks": "All ranks at once", "overlap": "Communication during computation",
}  # fmt: skip
_MOST_BARS = 16


def probe_document(machine: Machine, probed: ProbeRecord) -> Document:
    """Create the report of `outpace probe`: the measured speeds, their uncertainty, and advice."""
    sections = []
    for kind in dict.fromkeys(figure.key.kind for figure in probed.figures):
        if kind not in COLLECTIVES:
            own = [figure for figure in probed.figures if figure.key.kind == kind]
            sections.append(
                DocumentSection(
                    _KINDS.get(kind, kind.capitalize()), tuple(_figure_parts(kind, own))
                )
            )
    if any(figure.key.kind in COLLECTIVES for figure in probed.figures):
        sections.append(DocumentSection("Collectives", tuple(_collective_parts(probed))))
    return Document(
        "probe", f"{machine.cpu}, {machine.host_cores} cores", tuple(_verdict(machine, probed)),
        tuple(_facts(probed)),
        (DocumentSection("Advice", tuple(_advice_parts(probed))), *sections, topology(machine),
         _environment_section(machine, probed)),
    )  # fmt: skip


def _verdict(machine: Machine, probed: ProbeRecord) -> Iterable[str]:
    devices = ", ".join(device.name for device in machine.devices) or "no accelerator"
    best = [one for one in probed.figures if (one.key.kind, one.key.what) == ("matmul", "best")]
    rates = ", ".join(f"{one.key.of.get('dtype')} {one}" for one in best if one.value is not None)
    yield f"{devices}: {rates or 'no matmul was measured'}."
    everything = [*probed.all_figures()]
    unstable = sum(one.unstable is not None for one in everything)
    if unstable:
        yield (
            f"{unstable:,} of {len(everything):,} figures {'is' if unstable == 1 else 'are'} "
            "unstable: the machine was not "
            "steady enough to conclude."
        )
    elif everything:
        yield f"All {len(everything):,} figures are stable."
    yield from probed.steadiness.warnings
    yield from probed.steadiness.throttled


def _facts(probed: ProbeRecord) -> Iterable[tuple[str, str]]:
    found = {
        "memory copy": _format_largest(probed, "memory", "copy"),
        "link between ranks (busbw)": _format_link(probed),
        "probed": "quickly" if probed.quick else "in full",
        "took": show_seconds(probed.took_s),
        "ranks": str(probed.world_size),
        "hosts": str(probed.hosts),
    }
    return [(name, value) for name, value in found.items() if value is not None]


def _format_largest(probed: ProbeRecord, kind: str, what: str) -> str | None:
    some = [one for one in probed.figures
            if (one.key.kind, one.key.what) == (kind, what) and one.value is not None]  # fmt: skip
    return str(max(some, key=lambda one: int(one.key.of.get("bytes", 0)))) if some else None


def _format_link(probed: ProbeRecord) -> str | None:
    fit = probed.fit("all-reduce", "all")
    return None if fit is None or fit.bandwidth.value is None else str(fit.bandwidth)


def _advice_parts(probed: ProbeRecord) -> Iterable[Part]:
    if not probed.advice:
        yield Paragraph("There is no advice.")
        return
    rows = tuple((one.about, one.text, Number(one.gain, show_share(one.gain)))
                 for one in probed.advice)  # fmt: skip
    yield DataTable("Possible improvements", ("about", "what to change", "gain"), rows)


def _figure_parts(kind: str, figures: Sequence[Measured]) -> Iterable[Part]:
    if kind == "matmul":
        curve = _matmul_chart(figures)
        if curve is not None:
            yield curve
    by_unit = [one for one in figures if one.value is not None and one.key.what != "candidate"]
    for unit in dict.fromkeys(one.unit for one in by_unit):
        some = [one for one in by_unit if one.unit == unit]
        if kind == "matmul":
            some = [one for one in some if one.key.what in ("best", "peak")]
        if some:
            yield _bars_chart(some[:_MOST_BARS], len(some))
    yield _figures_table(_KINDS.get(kind, kind), figures)


def _unit_of(figures: Sequence[Measured]) -> Unit:
    name = figures[0].unit
    if name == "s":
        return seconds([one.value for one in figures])
    return shares() if name == "ratio" else counts(name)


def _figure_name(figure: Measured) -> str:
    return " ".join([figure.key.what, *(_format_value(k, v) for k, v in figure.key.of.items())])


def _format_value(name: str, value: str | int) -> str:
    if name.endswith("bytes"):
        return show_size(int(value))
    return str(value) if isinstance(value, str) else f"{name} {value}"


def _bars_chart(figures: Sequence[Measured], count: int) -> Chart:
    unit = _unit_of(figures)
    names = [_figure_name(one) for one in figures]
    counted = f", {len(figures)} of {count}" if count > len(figures) else ""
    level = next((one.level for one in figures if one.level), 0.95)
    what = "Times" if figures[0].unit == "s" else "Rates" if unit.si else "Shares"
    alt = join_items([f"{name}: {one}" for name, one in zip(names, figures, strict=True)])
    return bars(
        f"{what}, with the interval of a repeat ({level:.0%}){counted}", alt, names,
        [one.value for one in figures], unit, what.lower(),
        [(one.low, one.high) for one in figures],
        [GREY if one.origin == "catalog" else BLUE for one in figures],
    )  # fmt: skip


def _matmul_chart(figures: Sequence[Measured]) -> Chart | None:
    found: dict[str, list[tuple[float, float]]] = {}
    for one in figures:
        sides = [one.key.of.get(name) for name in "mnk"]
        if one.value is None or one.key.what not in ("curve", "candidate"):
            continue
        if all(isinstance(side, int) for side in sides):
            m, n, k = (int(side) for side in sides if side is not None)
            found.setdefault(str(one.key.of.get("dtype")), []).append((2.0 * m * n * k, one.value))
    if not found:
        return None
    series, rows = [], []
    rate, work = counts("FLOP/s"), counts("FLOP")
    for dtype, points in found.items():
        points.sort()
        x, y = ([point[side] for point in points] for side in (0, 1))
        series.append(LineSeries(dtype, (x,), y, {"mode": "lines+markers"}))
        rows += [(dtype, work.cell(a), rate.cell(b)) for a, b in points]
    best = "; ".join(f"{name}: at most {rate.show(max(y for _, y in points))}"
                     for name, points in found.items())  # fmt: skip
    return lines(
        "Rate of matmuls by their size", f"{best}.", series,
        [AxisChoice("size", "work of a matmul", work)], rate, "rate",
        DataTable("Rate of matmuls", ("dtype", "work", "rate"), tuple(rows)),
        xaxis=axis("work of a matmul", work, type="log"),
    )  # fmt: skip


def _figures_table(title: str, figures: Sequence[Measured]) -> DataTable:
    rows = tuple(
        (
            _figure_name(one),
            Number(one.value, str(one)),
            _bound_number(one, one.low),
            _bound_number(one, one.high),
            one.source or one.origin,
            one.unstable or "",
        )
        for one in figures
    )
    columns = ("of", "value", "a repeat, from", "to", "source", "unstable")
    return DataTable(f"{title}: all {len(rows)} figures", columns, rows)


def _bound_number(figure: Measured, bound: float | None) -> Number:
    if bound is None:
        return Number(None, "n/a")
    text = {"s": show_seconds, "ratio": show_share}.get(figure.unit)
    return Number(bound, text(bound) if text is not None else show_count(bound, figure.unit))


def _collective_parts(probed: ProbeRecord) -> Iterable[Part]:
    figures = [one for one in probed.figures if one.key.kind in COLLECTIVES]
    yield from _fit_charts(probed, figures)
    if probed.fits:
        rows = tuple(
            (fit.collective, fit.axis, Number(fit.ranks, str(fit.ranks)), fit.backend,
             Number(fit.latency.value, str(fit.latency)),
             Number(fit.bandwidth.value, str(fit.bandwidth)),
             Number(fit.residual, show_share(fit.residual)))
            for fit in probed.fits
        )  # fmt: skip
        columns = ("collective", "axis", "ranks", "by", "latency", "bandwidth (busbw)",
                   "points off by")  # fmt: skip
        yield DataTable("Latency and bandwidth, fitted over sizes", columns, rows)
    yield _figures_table("Collectives", figures)


def _fit_charts(probed: ProbeRecord, figures: Sequence[Measured]) -> Iterable[Part]:
    for axis_name in dict.fromkeys(fit.axis for fit in probed.fits):
        series, rows = [], []
        fits = [fit for fit in probed.fits if fit.axis == axis_name]
        for place, fit in enumerate(fits):
            own = [
                one
                for one in figures
                if one.key.kind == fit.collective
                and one.value
                and one.key.has(axis=axis_name, backend=fit.backend)
                and "bytes" in one.key.of
            ]
            points = sorted((int(one.key.of["bytes"]), one.value or 0.0) for one in own)
            if not points:
                continue
            x = [float(size) for size, _ in points]
            dots = {"mode": "markers", "marker": {"color": colour(place), "size": 7}}
            series.append(
                LineSeries(f"{fit.collective}, measured", (x,), [t for _, t in points], dots)
            )
            latency, rate = fit.latency.value, fit.bandwidth.value
            if latency is None or not rate:
                continue
            fitted = [latency + size * bus_factor(fit.collective, fit.ranks) / rate for size in x]
            line = {"line": {"color": colour(place), "width": 1.4, "dash": "dash"}}
            series.append(LineSeries(f"{fit.collective}, fitted", (x,), fitted, line))
            rows += [
                (
                    fit.collective,
                    Number(size, show_size(int(size))),
                    Number(took, show_seconds(took)),
                    Number(other, show_seconds(other)),
                )
                for (size, took), other in zip(points, fitted, strict=True)
            ]
        if series:
            sized, time = sizes([]), seconds([max(t or 0.0 for line in series for t in line.y)])
            yield lines(
                f"Collectives on axis {axis_name}: measured, and predicted by the fit",
                f"{len(rows)} sizes, each measured and fitted.", series,
                [AxisChoice("size", "size of the array", sized)], time, "time",
                DataTable("Collectives, measured and fitted",
                      ("collective", "array", "measured", "fitted"), tuple(rows)),
                xaxis=axis("size of the array", sized, type="log"),
                yaxis=axis("time", time, type="log"),
            )  # fmt: skip


def _environment_section(machine: Machine, probed: ProbeRecord) -> DocumentSection:
    steady = probed.steadiness
    others = None if steady.other_cores is None else f"{steady.other_cores:.2f} cores"
    stolen = None if steady.stolen is None else show_share(steady.stolen)
    parts: list[Part] = [
        Code("The command", probed.command),
        pairs("The probe", [
            ("date", probed.date), ("sections", ", ".join(probed.sections)),
            ("others used", others),
            ("taken by the hypervisor", stolen),
        ]),
        machine_table(machine), versions(probed.versions),
    ]  # fmt: skip
    return DocumentSection("Environment and command", (*parts, *map(Paragraph, probed.notes)))
