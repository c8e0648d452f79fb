"""Uncertainty of a predicted time."""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from statistics import NormalDist
from typing import Any

from outpace.planner.calibrate import UNKNOWN

LEVEL = 0.9
# Of a step on rates that are a guess, which no real steps tell of: as far off as a rate may be.
_GUESSED = math.exp(UNKNOWN * NormalDist().inv_cdf((1 + LEVEL) / 2))


@lru_cache
def _residuals() -> Mapping[str, Any]:
    text = files("outpace.catalog").joinpath("residuals.json").read_text(encoding="utf-8")
    loaded: Mapping[str, Any] = json.loads(text)
    return loaded


def interval(calibrated: bool, guessed: bool = False) -> tuple[float, float]:
    """Return the factors on a predicted time between which the true one lies with LEVEL.

    They are quantiles of real comparisons: of published steps, and of steps on a machine whose
    rates steps of a probe put right (benchmarks/planner_accuracy.py, planner_measured.py).
    `guessed`: the rates are neither.
    """
    if guessed:
        return 1 / _GUESSED, _GUESSED
    table = _residuals()
    row = (table["probed"] if calibrated else None) or table["catalog"]
    return float(row["low"]), float(row["high"])
