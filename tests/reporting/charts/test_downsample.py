"""Fewer points hide no spike."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from outpace.reporting.charts.downsample import edges, means, thin

SERIES = arrays(
    np.float64, st.integers(0, 3000), elements=st.floats(-1e6, 1e6) | st.just(float("nan"))
)


@given(SERIES, st.integers(4, 400))
def test_places_are_in_order_bounded_and_span_the_series(values, most):
    places = thin(values, most)
    assert len(places) <= most
    assert (np.diff(places) > 0).all()
    if len(values):
        assert places[0] == 0 and places[-1] == len(values) - 1


@given(SERIES, st.integers(4, 400))
def test_every_buckets_extremes_survive(values, most):
    kept = set(thin(values, most).tolist())
    if len(values) <= most:
        assert kept == set(range(len(values)))
        return
    cuts = edges(len(values), (most - 2) // 2)
    for begin, end in pairwise(cuts):
        bucket = values[begin:end]
        if np.isnan(bucket).all():
            continue
        left = values[[place for place in range(begin, end) if place in kept]]
        assert np.nanmin(left) == np.nanmin(bucket)
        assert np.nanmax(left) == np.nanmax(bucket)


def test_one_spike_among_many_is_there():
    values = np.zeros(100_000)
    values[77_777] = 9.0
    assert 77_777 in thin(values, 100)


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match="use 4 or more"):
        thin(np.zeros(9), 3)


@given(SERIES.filter(len), st.integers(1, 200))
def test_means_of_buckets_weigh_to_the_mean_of_all(values, buckets):
    places, found = means(values, buckets)
    assert len(places) == len(found) == min(buckets, len(values))
    cuts = edges(len(values), min(buckets, len(values)))
    for mean, (begin, end) in zip(found, pairwise(cuts), strict=True):
        known = values[begin:end][~np.isnan(values[begin:end])]
        assert np.isnan(mean) if not len(known) else mean == pytest.approx(known.mean(), abs=1e-6)
