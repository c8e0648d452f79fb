"""What several runs that belong together say: where time went by rank, losses, utilisation."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from outpace.report import curves, where
from outpace.report.document import Figure, Part, Words
from outpace.report.loads import utilisation
from outpace.report.run_source import Run

_EACH_DRAWN = 4  # runs, of which each has a figure of its own


def ranks(runs: Mapping[str, Run]) -> Iterator[Part]:
    """Parts of a step by rank, of runs on several."""
    several = {
        name: run.measurement.parts_by_rank
        for name, run in runs.items()
        if run.measurement is not None and len(run.measurement.parts_by_rank) > 1
    }
    for name, parts in list(several.items())[:_EACH_DRAWN]:
        yield _titled(where.by_rank(parts), name)
    if len(several) > _EACH_DRAWN:
        yield Words(f"By rank only the first {_EACH_DRAWN} of {len(several)} are drawn.")


def losses(runs: Mapping[str, Run]) -> Iterator[Part]:
    """All of them in one figure."""
    with_steps = {name: run.steps for name, run in runs.items() if len(run.steps)}
    if with_steps:
        yield curves.loss_by_arm(with_steps)
    else:
        yield Words("The steps of these runs are not here.")


def loads(runs: Mapping[str, Run]) -> Iterator[Part]:
    """How busy devices were in each."""
    figures = {name: utilisation(run.utilisation) for name, run in runs.items()}
    known = {name: found[0] for name, found in figures.items() if found}
    for name, figure in list(known.items())[:_EACH_DRAWN]:
        yield _titled(figure, name)
    if not known:
        yield Words("How busy devices were is not recorded in these runs.")
    elif len(known) > _EACH_DRAWN:
        yield Words(f"Only the first {_EACH_DRAWN} of {len(known)} are drawn.")


def _titled(figure: Figure, name: str) -> Figure:
    return replace(figure, title=f"{figure.title}: {name}")
