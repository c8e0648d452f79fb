"""The planner's intervals: between which factors of a predicted time the measured one lies.

They are quantiles of real comparisons, kept in outpace/catalog/residuals.json by kind of machine.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LEVEL = 0.9
KEPT = Path(__file__).parent.parent / "outpace" / "catalog" / "residuals.json"


def residuals(ratios: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Factors on a prediction between which LEVEL of the measured times lie.

    `ratios`: measured over predicted, by source. Of their quantiles, every source counting the
    same. Sources differ from each other, so that quantiles of some cover less of another than of
    themselves: the share that is asked of the sources at hand is the one with which each source,
    left out, is covered to LEVEL in the mean.
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


def kept(spread: Mapping[str, Any]) -> dict[str, Any]:
    """What outpace/catalog/residuals.json has to say of it."""
    return {name: spread[name] for name in ("low", "high", "rows", "sources", "coverage")}


def keep(kind: str, spread: Mapping[str, Any]) -> None:
    """Write it there for a kind of machine: catalog or probed."""
    both = json.loads(KEPT.read_text(encoding="utf-8"))
    both[kind] = kept(spread)
    KEPT.write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")
