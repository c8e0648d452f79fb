"""Columns of plans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.planner.plan_columns import distinct_rows

ROWS = st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=20)


@pytest.mark.parametrize("factor", [1, 2**30], ids=["one number each", "rows"])
@given(rows=ROWS)
def test_each_row_is_found_by_the_first_that_is_equal(factor, rows):
    """Also where the numbers for combinations would not fit into 63 bits."""
    columns = [np.array(column, np.int64) * factor for column in zip(*rows, strict=True)]
    columns.append(np.full(len(rows), 2**30, np.int64))
    first, place = distinct_rows(columns)
    assert len(first) == len(set(rows))
    for row, found in zip(rows, place, strict=True):
        assert rows[first[found]] == row and rows.index(row) == first[found]
