"""Sections on several runs together: time by rank, losses, memory, utilisation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from outpace.records.units import show_bytes
from outpace.reporting.charts.figures import bars, join_items, sizes
from outpace.reporting.data.run_folder import RunFolder
from outpace.reporting.render.document import Chart, DataTable, Number, Paragraph, Part, pairs
from outpace.reporting.sections import curves, step_breakdown
from outpace.reporting.sections.utilisation import utilisation

_EACH_DRAWN = 4  # maximum number of runs with separate figures


def ranks(runs: Mapping[str, RunFolder]) -> Iterator[Part]:
    """Draw a chart of each rank's step time by part, for runs with several ranks."""
    several = {
        name: run.measurement.parts_by_rank
        for name, run in runs.items()
        if run.measurement is not None and len(run.measurement.parts_by_rank) > 1
    }
    for name, parts in list(several.items())[:_EACH_DRAWN]:
        yield _add_name(step_breakdown.by_rank(parts), name)
    if len(several) > _EACH_DRAWN:
        yield Paragraph(f"Only the first {_EACH_DRAWN} of {len(several)} are drawn by rank.")


def losses(runs: Mapping[str, RunFolder]) -> Iterator[Part]:
    """Draw the losses of all runs in one chart."""
    with_steps = {name: run.steps for name, run in runs.items() if len(run.steps)}
    if with_steps:
        yield curves.loss_by_arm(with_steps)
    else:
        yield Paragraph("The steps of these runs are not available.")


def loads(runs: Mapping[str, RunFolder]) -> Iterator[Part]:
    """Yield a chart of the devices' utilisation for each run."""
    figures = {name: utilisation(run.utilisation) for name, run in runs.items()}
    known = {name: found[0] for name, found in figures.items() if found}
    for name, figure in list(known.items())[:_EACH_DRAWN]:
        yield _add_name(figure, name)
    if not known:
        yield Paragraph("The load of devices is not recorded in these runs.")
    elif len(known) > _EACH_DRAWN:
        yield Paragraph(f"Only the first {_EACH_DRAWN} of {len(known)} are drawn.")


def peak_memory(bytes_by_name: Mapping[str, int | None], shades: Sequence[str] = ()) -> Part:
    """Draw the peak memory of each run's fullest rank. `shades`: the colours of the bars."""
    values = [None if size is None else float(size) for size in bytes_by_name.values()]
    if all(value is None for value in values):
        return Paragraph("The memory of these runs is not recorded.")
    alt = join_items([f"{name}: {show_bytes(size)}" for name, size in bytes_by_name.items()])
    return bars("Peak memory on the fullest rank", alt, list(bytes_by_name), values, sizes(values),
                "memory", (), shades)  # fmt: skip


def memory_by_rank(bytes_by_run: Mapping[str, Sequence[int]]) -> Iterator[Part]:
    """Yield a table of the peak memory of each rank, for runs with several ranks."""
    several = {name: sizes for name, sizes in bytes_by_run.items() if len(sizes) > 1}
    rows = [
        (", ".join(filter(None, (name, f"rank {rank}"))), Number(size, show_bytes(size)))
        for name, sizes in several.items()
        for rank, size in enumerate(sizes)
    ]
    if rows:
        yield DataTable("Peak memory by rank", ("rank", "memory"), tuple(rows))


def versions(runs: Mapping[str, RunFolder]) -> Iterator[Part]:
    """Yield a table of package versions. Runs with equal versions share one."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, run in runs.items():
        found.setdefault(tuple(sorted(run.record.versions.items())), []).append(name)
    for known, names in found.items():
        yield pairs("Versions" if len(found) == 1 else f"Versions: {', '.join(names)}", known)
    if not found:
        yield Paragraph("Versions are in the records of the runs, which are not available.")


def _add_name(figure: Chart, name: str) -> Chart:
    return replace(figure, title=f"{figure.title}: {name}")
