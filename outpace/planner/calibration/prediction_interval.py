"""Uncertainty of a predicted time."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from statistics import NormalDist
from typing import Any, NamedTuple

from outpace.planner.calibration.fit_rates import UNKNOWN

LEVEL = 0.9
# Mean share of a source that the others' interval should cover, for kinds with their own interval.
# Lower shares are reported with the interval.
LEAST_COVERAGE = 0.85
# Interval for guessed rates, without real steps: as far off as a rate may be.
_GUESSED = math.exp(UNKNOWN * NormalDist().inv_cdf((1 + LEVEL) / 2))


@lru_cache
def _residuals() -> Mapping[str, Any]:
    text = files("outpace.catalog").joinpath("residuals.json").read_text(encoding="utf-8")
    loaded: Mapping[str, Any] = json.loads(text)
    return loaded


class Interval(NamedTuple):
    """Factors that enclose the ratio of true to predicted time with probability `level`."""

    low: float
    high: float
    basis: str
    level: float = LEVEL

    @property
    def explanation(self) -> str:
        """Return a sentence for the user."""
        share = f"{self.level:.0%}".replace("%", " %")
        if self.level == LEVEL:
            return f"The {share} interval is based on {self.basis}."
        return (
            f"The interval is based on {self.basis}. An interval from the other sources alone "
            f"contained {share} of a source's steps on average."
        )


def interval(
    calibrated: bool,
    guessed: bool = False,
    architecture: str | None = None,
    experts: bool = False,
    residuals: Sequence[float] = (),
) -> Interval:
    """Return the interval of a question.

    Its factors are quantiles of real comparisons: published steps of dense models or of models with
    `experts` on chips of an `architecture` (benchmarks/planner_accuracy.py), with each source left
    out once; if these are too few, such models on any chip; or steps on a machine whose rates a
    probe's steps corrected (planner_measured.py). `guessed`: none of these apply. `residuals`:
    ratios of measured to predicted time of steps on this machine to which nothing was fitted; their
    median widens the interval.
    """
    if guessed:
        return Interval(1 / _GUESSED, _GUESSED, "no measurement, since the rates are guessed")
    table = _residuals()
    if calibrated and table["probed"] and not residuals:
        row = table["probed"]
        basis = f"{row['rows']} steps on machines that were probed"
        return Interval(float(row["low"]), float(row["high"]), basis)
    model = "models with experts" if experts else "dense models"
    kinds = table["kinds"]
    row = None if architecture is None else kinds.get(kind_name(architecture, experts))
    where, more = f"on {architecture} chips", ""
    if row is None:
        row, where = kinds[kind_name(None, experts)], "on any chip"
        if architecture is not None:
            more = f"; {_reason(table, architecture, experts)}, so it is wide"
    basis = f"{row['rows']} published steps of {model} {where}, from {len(row['sources'])} sources"
    low, high = float(row["low"]), float(row["high"])
    if residuals:
        own = statistics.median(abs(math.log(ratio)) for ratio in residuals)
        low = math.exp(-math.hypot(math.log(low), own))
        high = math.exp(math.hypot(math.log(high), own))
        more = f"; widened by the error of {len(residuals)} steps of the probe{more}"
    covers = float(row["coverage"])
    level = LEVEL if covers >= LEAST_COVERAGE else round(covers, 2)
    return Interval(low, high, basis + more, level)


def _reason(table: Mapping[str, Any], architecture: str, experts: bool) -> str:
    """Return why a kind has no separate interval."""
    row = table["without_interval"].get(kind_name(architecture, experts))
    if row is None:
        return f"none of them is on {architecture}"
    count = row["sources"]
    steps = "one step" if row["rows"] == 1 else f"{row['rows']} steps"
    of = f"{steps} of {count} source{'s' if count > 1 else ''} on {architecture}"
    if row["coverage"] is None:
        return f"{of} are too few"
    return (
        f"{of} do not predict each other (an interval from the others contains "
        f"{row['coverage'] * 100:.0f} % of a source's steps on average)"
    )


def kind_name(architecture: str | None, experts: bool) -> str:
    """Return the name of a kind of question in the table; None is any chip."""
    return f"{architecture or 'any chip'}, {'experts' if experts else 'dense'}"
