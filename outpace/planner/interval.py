"""How sure a predicted time is."""

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

LEVEL = 0.9


@lru_cache
def _residuals() -> Mapping[str, Any]:
    text = files("outpace.catalog").joinpath("residuals.json").read_text(encoding="utf-8")
    loaded: Mapping[str, Any] = json.loads(text)
    return loaded


def interval(calibrated: bool) -> tuple[float, float]:
    """Of a predicted time: the factors between which the true one lies with LEVEL.

    They are quantiles of real comparisons: of published steps, and of steps on a machine whose
    rates steps of a probe put right (benchmarks/planner_accuracy.py, planner_measured.py).
    """
    table = _residuals()
    row = (table["probed"] if calibrated else None) or table["catalog"]
    return float(row["low"]), float(row["high"])
