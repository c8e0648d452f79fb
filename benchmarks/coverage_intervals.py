"""Prediction intervals of the planner, as factors of a predicted time.

They are quantiles of real comparisons, stored in outpace/catalog/residuals.json by kind of machine.
"""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from score_board import question_kind

from outpace.planner.calibration.prediction_interval import LEAST_COVERAGE, LEVEL, kind_name

KEPT = Path(__file__).parent.parent / "outpace" / "catalog" / "residuals.json"


def residuals(ratios: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the interval of measured over predicted times that contains a share LEVEL of them.

    `ratios`: measured over predicted times, by source. The factors are quantiles in which all
    sources have equal weight. Sources differ from each other, so quantiles of some sources cover
    less of another source than of themselves. The quantiles are therefore chosen such that each
    source, when left out, is covered to LEVEL on average.
    """
    sources = sorted(ratios)

    def covered(level: float) -> dict[str, float]:
        shares = {}
        for source in sources:
            low, high = _interval({k: v for k, v in ratios.items() if k != source}, level)
            shares[source] = float(np.mean([low <= r <= high for r in ratios[source]]))
        return shares

    levels = np.linspace(0.6, 1.0, 401)
    means = [statistics.fmean(covered(level).values()) for level in levels]
    level = float(levels[int(np.argmin(np.abs(np.array(means) - LEVEL)))])
    low, high = _interval(ratios, level)
    shares = covered(level)
    rows = sum(map(len, ratios.values()))
    return {
        "low": round(low, 4),
        "high": round(high, 4),
        "rows": rows,
        "sources": sources,
        "coverage": round(statistics.fmean(shares.values()), 4),
        "coverage_of_rows": round(sum(shares[s] * len(ratios[s]) for s in sources) / rows, 4),
        "left_out": {source: round(share, 4) for source, share in shares.items()},
    }


def _interval(ratios: Mapping[str, Sequence[float]], level: float) -> tuple[float, float]:
    values = np.concatenate([np.array(own) for own in ratios.values()])
    weights = np.concatenate([np.full(len(own), 1 / len(own)) for own in ratios.values()])
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    tail = (1 - level) / 2
    low = values[order][min(np.searchsorted(shares, tail), len(values) - 1)]
    high = values[order][min(np.searchsorted(shares, 1 - tail), len(values) - 1)]
    return float(low), float(high)


# Minimum for a narrow kind to have a separate interval: sources, and rows of all sources.
LEAST_SOURCES, LEAST_ROWS = 3, 20
# Minimum for a wide kind: with fewer units, less than one lies outside an interval of LEVEL, so
# leaving each one out says nothing about the interval.
LEAST_UNITS = round(1 / (1 - LEVEL))
# Stacks whose experts are a loop in Python or a plugin's kernels, where plans have grouped matmuls.
_OTHER_EXPERTS = ("Trainer",)
Ratios = dict[str, list[float]]


def by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the intervals of kinds with enough units and rows, and of all dense and all MoE.

    `rows` come from score_board.py. A kind is a chip's architecture and whether a model has
    experts; a narrow kind also includes what is trained, with which software, and on how many
    devices.
    """
    found = _narrow(rows)
    for name, own in _by_kind(rows):
        ratios, named = _units(own, LEAST_UNITS), {"sources": _sources(own)}
        if name in (kind_name(None, False), kind_name(None, True)):
            found[name] = _widened(residuals(ratios), ratios) | named
        elif _is_enough(ratios):
            spread = residuals(ratios)
            if spread["coverage"] >= LEAST_COVERAGE:
                found[name] = spread | named
    return found


def _narrow(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the intervals of narrow kinds with enough rows."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(question_kind(row).narrow_name or "", []).append(row)
    found = {}
    for name, own in sorted(kinds.items()):
        ratios = _units(own, LEAST_SOURCES, LEAST_UNITS)
        if len(own) >= LEAST_ROWS and len(ratios) >= LEAST_SOURCES:
            spread = residuals(ratios)
            if spread["coverage"] >= LEAST_COVERAGE:
                found[name] = spread | {"sources": _sources(own)}
    return found


def _units(rows: Sequence[Mapping[str, Any]], least: int, each: int = 1) -> Ratios:
    """Return measured over predicted times by source; each source is left out once.

    If fewer than `least` sources have `each` rows of a kind, each problem of a source (a model and
    a length, on chips of one architecture) takes the place of the source. Two rows of a second
    software would otherwise set the interval of the 800 of a first one that are left out.
    """
    counts = Counter(row["source"] for row in rows)
    enough = sum(count >= each for count in counts.values()) >= least
    parts = ("source",) if enough else ("source", "problem", "chip")
    ratios: Ratios = {}
    for row in rows:
        unit = ", ".join(row[part] for part in parts)
        ratios.setdefault(unit, []).append(row["measured_s"] / row["predicted_s"])
    return ratios


def _sources(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({row["source"] for row in rows})


def without_interval(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the other kinds that have rows: the number of rows, and what the units cover.

    A coverage of None means that there are too few units.
    """
    found: dict[str, Any] = {}
    for name, own in _by_kind(rows):
        ratios = _units(own, LEAST_UNITS)
        whole = name in (kind_name(None, False), kind_name(None, True))
        covers = residuals(ratios)["coverage"] if _is_enough(ratios) else None
        if not whole and (covers is None or covers < LEAST_COVERAGE):
            sources = len(_sources(own))
            found[name] = {"rows": len(own), "sources": sources, "coverage": covers}
    return found


def _is_enough(ratios: Ratios) -> bool:
    return len(ratios) >= LEAST_UNITS and sum(map(len, ratios.values())) >= LEAST_ROWS


def _by_kind(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return the rows of each wide kind."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        experts = row["mlp"] == "experts"
        # Intervals are for plans, which train everything.
        if row["trained"] != "full" or (experts and row["stack"] in _OTHER_EXPERTS):
            continue
        for name in (kind_name(row["chip"], experts), kind_name(None, experts)):
            kinds.setdefault(name, []).append(row)
    return sorted(kinds.items())


def _widened(spread: dict[str, Any], ratios: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return an interval that covers everything seen, since sources do not predict each other."""
    if spread["coverage"] >= LEAST_COVERAGE:
        return spread
    seen = [ratio for own in ratios.values() for ratio in own]
    return spread | {"low": round(min(seen), 4), "high": round(max(seen), 4)}


def keep_kinds(found: Mapping[str, Mapping[str, Any]], without: Mapping[str, Any]) -> None:
    """Write the intervals of these kinds, and why others are `without` one."""
    both = json.loads(KEPT.read_text(encoding="utf-8"))
    both["kinds"] = {name: kept(spread) for name, spread in found.items()}
    both["without_interval"] = without
    KEPT.write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")


def kept(spread: Mapping[str, Any]) -> dict[str, Any]:
    """Return what outpace/catalog/residuals.json stores of an interval."""
    return {name: spread[name] for name in ("low", "high", "rows", "sources", "coverage")}


def keep(kind: str, spread: Mapping[str, Any]) -> None:
    """Write the interval of a kind of machine: catalog or probed."""
    both = json.loads(KEPT.read_text(encoding="utf-8"))
    both[kind] = kept(spread)
    KEPT.write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")
