"""Cache of plans' memory needs, so that a search estimates no plan twice."""

from collections.abc import Callable
from dataclasses import fields
from typing import cast

import numpy as np

from outpace.planner.plan_columns import Floats, PlanBatch

# Bytes that each plan's fullest rank needs.
Needs = Callable[[PlanBatch], Floats]


def remember(needs: Needs, known: dict[bytes, float]) -> Needs:
    """Return a version of `needs` that caches its results in `known`.

    The search for alternatives mostly considers plans whose memory is already known.
    """

    def look_up(columns: PlanBatch) -> Floats:
        keys = _plan_keys(columns)
        missing = [place for place, key in enumerate(keys) if key not in known]
        if missing:
            found = needs(columns.select(np.array(missing)))
            known.update(zip((keys[place] for place in missing), found.tolist(), strict=True))
        return np.array([known[key] for key in keys], float)

    return look_up


def _plan_keys(columns: PlanBatch) -> list[bytes]:
    """Return a byte string per plan as its key, without adapters, which do not vary in a search."""
    values = [getattr(columns, f.name) for f in fields(PlanBatch) if f.name != "adapters"]
    numbers = [(one if one.ndim > 1 else one[:, None]).astype(np.float64) for one in values]
    rows = np.ascontiguousarray(np.concatenate(numbers, axis=1))
    whole = np.dtype((np.void, rows.shape[1] * rows.itemsize))
    keys = rows.view(whole).ravel().tolist()
    return cast(list[bytes], keys)
