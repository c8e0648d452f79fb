"""Prediction intervals for step times."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

from outpace.catalog.tables import read_table
from outpace.planner.calibration.fit_rates import UNKNOWN

LEVEL = 0.9
# A kind gets its own interval if, with each source left out once, the interval contains at least
# this share of that source's steps on average. A lower share is reported with the interval.
LEAST_COVERAGE = 0.85
# Classes of device counts, each with its upper bound.
WORLDS = ((1, "1"), (8, "2–8"), (64, "9–64"), (512, "65–512"), (10**9, "> 512"))
# Interval for guessed rates, without measured steps: the factor by which a rate may be wrong.
_GUESSED = math.exp(UNKNOWN * NormalDist().inv_cdf((1 + LEVEL) / 2))


@lru_cache
def _read_residuals() -> Mapping[str, Any]:
    return read_table("residuals")


class Interval(NamedTuple):
    """Factors that contain the ratio of true to predicted time with probability `level`."""

    low: float
    high: float
    basis: str
    level: float = LEVEL

    @property
    def explanation(self) -> str:
        """Return a sentence that names the measurements behind the interval."""
        share = f"{self.level:.0%}".replace("%", " %")
        if self.level == LEVEL:
            return f"The {share} interval is based on {self.basis}."
        return (
            f"The interval is based on {self.basis}. With each source left out once, it contained "
            f"{share} of that source's steps on average."
        )


@dataclass(frozen=True)
class QuestionKind:
    """Features of a planning problem that select the published steps for its prediction interval.

    `architecture` is the chip's, or None if the chip is not in the catalog. `experts`: the model
    has experts. `adapters`: only adapters are trained. `software` is the stack's name (see
    `catalog.stacks`). `devices` is the number of devices. A feature that is None selects steps of
    any value.
    """

    architecture: str | None = None
    experts: bool = False
    adapters: bool = False
    software: str | None = None
    devices: int | None = None

    @property
    def narrow_name(self) -> str | None:
        """Return the name of the kind that fits all features; None if a feature is not set."""
        if None in (self.architecture, self.software, self.devices):
            return None
        model = f"{self.model}, adapters" if self.adapters else self.model
        worlds = next(name for most, name in WORLDS if (self.devices or 1) <= most)
        return f"{self.architecture}, {model}, {self.software}, {worlds}"

    @property
    def model(self) -> str:
        """Return the type of model: "experts" or "dense"."""
        return "experts" if self.experts else "dense"

    def find(self, table: Mapping[str, Any]) -> tuple[str, Any]:
        """Return the name and the row of the narrowest kind in a table that matches."""
        wide = kind_name(self.architecture, self.experts)
        names = (self.narrow_name, wide, kind_name(None, self.experts))
        name = next(name for name in names if name in table)
        assert name is not None
        return name, table[name]


def interval(
    calibrated: bool,
    guessed: bool = False,
    kind: QuestionKind = QuestionKind(),
    residuals: Sequence[float] = (),
) -> Interval:
    """Return the prediction interval for a planning problem.

    Its factors are quantiles of measured over predicted times, chosen so that they also cover
    sources that were left out. They come from published steps of the narrowest `kind` with enough
    of them, or else on any chip (benchmarks/planner_accuracy.py). For `calibrated` rates without
    residuals, they come from steps on probed machines (planner_measured.py).

    If the rates are `guessed`, no measurements apply, and a wide interval is returned. `residuals`
    are ratios of measured to predicted time for steps on this machine to which no rates were
    fitted; their median error widens the interval.
    """
    if guessed:
        return Interval(1 / _GUESSED, _GUESSED, "no measurement, since the rates are guessed")
    table = _read_residuals()
    if calibrated and table["probed"] and not residuals:
        row = table["probed"]
        basis = f"{row['rows']} steps on machines that were probed"
        return Interval(float(row["low"]), float(row["high"]), basis)
    name, row = kind.find(table["kinds"])
    more = ""
    if name == kind_name(None, kind.experts) and kind.architecture is not None:
        more = f"; {_why_no_interval(table, kind.architecture, kind.experts)}, so it is wide"
    basis = _describe_basis(kind, name, row)
    low, high = float(row["low"]), float(row["high"])
    if residuals:
        own = statistics.median(abs(math.log(ratio)) for ratio in residuals)
        low = math.exp(-math.hypot(math.log(low), own))
        high = math.exp(math.hypot(math.log(high), own))
        more = f"; widened by the error of {len(residuals)} steps of the probe{more}"
    covers = float(row["coverage"])
    level = LEVEL if covers >= LEAST_COVERAGE else round(covers, 2)
    return Interval(low, high, basis + more, level)


def _describe_basis(kind: QuestionKind, name: str, row: Mapping[str, Any]) -> str:
    model = "models with experts" if kind.experts else "dense models"
    where = f"on {kind.architecture} chips"
    if name == kind_name(None, kind.experts):
        where = "on any chip"
    elif name == kind.narrow_name:
        model = f"adapters on {model}" if kind.adapters else model
        where = f"with {kind.software} {where}, {name.rsplit(', ', 1)[1]} devices"
    count = len(row["sources"])
    return (
        f"{row['rows']} published steps of {model} {where}, from {count} "
        f"source{'s' if count > 1 else ''}"
    )


def _why_no_interval(table: Mapping[str, Any], architecture: str, experts: bool) -> str:
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
    """Return a kind's name in the table; an architecture of None means any chip."""
    return f"{architecture or 'any chip'}, {'experts' if experts else 'dense'}"
