"""Series of loads: however thinned, they say the same of the whole time."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.records.errors import BadInputError
from outpace.records.utilisation import (
    DeviceLoad,
    HostLoad,
    Load,
    ThinnedLoads,
    Utilisation,
    average,
    series,
)

STARTED = "2026-01-01T00:00:00+00:00"
SHARES = st.floats(0, 1)


def load(share: float, duration_s: float = 1.0, memory_bytes: int = 0) -> Load:
    device = DeviceLoad(
        index=1, name="A", memory_total_bytes=100, utilisation=share, power_w=None,
        memory_bytes=memory_bytes,
    )  # fmt: skip
    host = HostLoad(cores=(share, 1 - share), run_cores=2 * share, clock_hz=2e9)
    return Load(duration_s=duration_s, devices=(device,), host=host)


@given(
    st.lists(st.tuples(SHARES, st.floats(0.5, 2), st.integers(0, 100)), min_size=1),
    st.integers(2, 9),
)
def test_thinning_keeps_the_averages_the_highest_memory_and_the_time(points, most):
    loads = [load(*point) for point in points]
    kept = ThinnedLoads(1.0, most=most)
    for each in loads:
        kept.add(each)
    # The newest point is not thinned before it is whole.
    assert len(kept.loads) <= most
    assert kept.period_s in {2.0**n for n in range(12)}
    whole, thinned = average(loads), average(kept.loads)
    assert thinned.duration_s == pytest.approx(whole.duration_s)
    assert thinned.devices[0].utilisation == pytest.approx(whole.devices[0].utilisation)
    assert thinned.devices[0].memory_bytes == max(memory for _, _, memory in points)
    assert thinned.host.cores == pytest.approx(whole.host.cores)
    assert thinned.host.run_cores == pytest.approx(whole.host.run_cores)
    assert thinned.devices[0].power_w is None


def test_a_long_series_has_at_most_a_thousand_points():
    kept = ThinnedLoads(1.0)
    for _ in range(5000):
        kept.add(load(0.5))
    assert 500 <= len(kept.loads) <= 1000
    assert kept.period_s == 8.0


def test_averages_weigh_by_time_and_leave_out_what_was_not_known():
    unknown = load(0.0).model_copy(update={"host": HostLoad(cores=(None, 0.0))})
    mean = average([load(1.0, 3.0), unknown])
    assert mean.devices[0].utilisation == pytest.approx(0.75)
    assert mean.host.cores == (1.0, 0.0)
    assert mean.host.run_cores == 2.0


def test_a_series_comes_back_from_its_file(tmp_path: Path):
    loads = [load(0.25, 1.0, 7), load(0.75, 1.5, 9)]
    made = series(loads, started=STARTED, period_s=1.0, sampler_cpu_s=0.01)
    made.save(tmp_path / "a.json")
    read = Utilisation.load(tmp_path / "a.json")
    assert read == made and list(read.loads) == loads
    assert read.average() == average(loads)
    text = (tmp_path / "a.json").read_text()
    assert text.count("\n") == 1 and '"xxh3_128":"' in text
    (tmp_path / "a.json").write_text(text.replace('"sampler_cpu_s":0.01', '"sampler_cpu_s":0.02'))
    with pytest.raises(BadInputError, match="was changed since outpace wrote it"):
        Utilisation.load(tmp_path / "a.json")


def test_a_series_of_before_clocks_were_recorded_is_read():
    made = series([load(0.5)] * 3, started=STARTED, period_s=1.0, sampler_cpu_s=0.0)
    values = made.model_dump()
    del values["host"]["clock_hz"]
    read = Utilisation.parse(values, "a.json")
    assert [one.host.clock_hz for one in read.loads] == [None] * 3
    assert read.loads[0].host.run_cores == 1.0 and made.loads[0].host.clock_hz == 2e9


def test_series_of_unequal_lengths_are_refused(tmp_path: Path):
    made = series([load(0.5)] * 3, started=STARTED, period_s=1.0, sampler_cpu_s=0.0)
    values = made.model_dump()
    values["host"]["run_cores"] = (0.1, 0.2)
    with pytest.raises(BadInputError, match=r"series of \[2, 3\] values for 3 points"):
        Utilisation.parse(values, "a.json")
    values = made.model_dump() | {"ends_s": (1.0, 3.0, 2.0)}
    with pytest.raises(BadInputError, match="is not increasing"):
        Utilisation.parse(values, "a.json")
