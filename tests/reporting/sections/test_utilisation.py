"""Utilisation over time: of hosts with clocks of their own, of resumed runs, of very many cores."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.records.utilisation import HostLoad, Load, series
from outpace.reporting.page import page
from outpace.reporting.render.document import Document, DocumentSection
from outpace.reporting.sections.utilisation import utilisation

SHARES = st.none() | st.floats(0, 1)


def seen(points, node=0, minute=0):
    """A host's series of (seconds, each core's share)."""
    loads = [
        Load(node=node, duration_s=lasted_s, host=HostLoad(cores=tuple(cores), memory_bytes=2**30))
        for lasted_s, cores in points
    ]
    started = f"2026-11-22T00:{minute:02}:00+00:00"
    return series(loads, started=started, period_s=1.0, sampler_cpu_s=0.1)


def rows(figure):
    (trace,) = figure.traces
    return dict(zip(trace["y"], trace["z"], strict=True))


@given(st.lists(st.tuples(st.floats(0.1, 50), st.tuples(*[SHARES] * 8)), min_size=1, max_size=60))
def test_the_mean_over_the_grid_is_the_mean_over_time(points):
    busy, *_ = utilisation([seen(points)])
    drawn = rows(busy)
    assert list(drawn) == [f"core {core}" for core in range(8)]
    assert all(cell is None or -0.01 <= cell <= 100.01 for row in drawn.values() for cell in row)
    for core, row in enumerate(drawn.values()):
        known = [(s, cores[core]) for s, cores in points if cores[core] is not None]
        assert (busy.table.rows[core][1].value is None) == (not known)
        if len(known) == len(points):  # else points of the grid stand for less time
            mean = sum(s * share for s, share in known) / sum(s for s, _ in known)
            assert busy.table.rows[core][1].value == pytest.approx(mean, abs=1e-3)
            assert sum(row) / len(row) / 100 == pytest.approx(mean, abs=1.5e-3)


def test_hosts_with_clocks_of_their_own_are_on_one_grid():
    first = seen([(10.0, [0.25] * 4)] * 6)
    other = seen([(7.0, [0.75] * 4)] * 10, node=1, minute=1)
    busy, memory = utilisation([other, first])
    drawn = rows(busy)
    assert list(drawn)[:5] == [*(f"host 0: core {core}" for core in range(4)), "host 1: core 0"]
    assert len({len(row) for row in drawn.values()}) == 1
    assert set(drawn["host 0: core 3"]) == {25.0, None}  # it ended before the other
    later = drawn["host 1: core 0"]
    assert set(later) == {75.0, None} and later[0] is None and later[-1] == 75.0
    assert "shorter peaks are smoothed out" in busy.alt
    assert [trace["name"] for trace in memory.traces] == ["host 0", "host 1"]


def test_a_resumed_runs_parts_are_one_row_with_a_gap():
    parts = [seen([(10.0, [0.5] * 8)] * 12), seen([(10.0, [1.0] * 8)] * 12, minute=8)]
    drawn = rows(utilisation(parts)[0])
    assert len(drawn) == 8
    row = drawn["core 0"]
    assert row[0] == 50.0 and row[-1] == 100.0 and row[len(row) // 2] is None
    few, _ = utilisation([seen([(10.0, [0.5])] * 3), seen([(10.0, [1.0])] * 3, minute=8)])
    (line,) = few.traces
    assert line["y"] == [50.0, 50.0, 50.0, None, 100.0, 100.0, 100.0]
    assert few.table.rows[0][1].value == pytest.approx(0.75)


def test_very_many_cores_are_a_row_a_host_on_a_small_page():
    cores = [core / 192 for core in range(192)]
    hosts = [seen([(1.0, cores)] * 500, node=node) for node in range(8)]
    busy, memory = utilisation(hosts)
    assert busy.title == "Utilisation over time: the mean of each host's cores"
    assert list(rows(busy)) == [f"host {node}" for node in range(8)]
    assert all(cell == pytest.approx(100 * sum(cores) / 192, abs=0.1)
               for row in rows(busy).values() for cell in row)  # fmt: skip
    assert len(busy.table.rows) == 8 * 192
    document = Document("run", "a", ("b",), (), (DocumentSection("c", (busy, memory)),))
    assert len(page([document]).encode()) < 10e6


def test_each_label_of_many_rows_has_a_line_of_its_own():
    busy, *_ = utilisation([seen([(1.0, [0.5] * 192)] * 400)])
    labels = busy.layout["yaxis"]["ticktext"]
    assert labels[0] == "core 0" and len(labels) == math.ceil(192 / 5)
    assert 14 * len(labels) <= busy.height_px
