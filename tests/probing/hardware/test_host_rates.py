"""Rates of a host that are measured in seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from outpace.planner.calibration.cluster import of_host
from outpace.probing.hardware import host_rates
from outpace.records.host_rates import HostRates
from outpace.records.machine import Machine


@pytest.mark.slow
def test_they_are_of_all_cores_and_not_of_what_others_leave() -> None:
    host_rates._measure_in_subprocess.cache_clear()
    one, two = host_rates.measure_host_rates(1), host_rates.measure_host_rates(2)
    assert one is not None and two is not None
    assert set(one.flops_per_s) == {"fp32", "bf16"}
    assert one.flops_per_s["fp32"] > 1e8 and one.memory_bytes_per_s > 1e8
    # By the thread's own clock: twice as many cores, twice the rate, also on a busy machine.
    assert 1.2 < two.flops_per_s["fp32"] / one.flops_per_s["fp32"] < 3.3


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """Nothing is measured before the test, and what it measures is not kept."""
    host_rates._measure_in_subprocess.cache_clear()
    yield
    host_rates._measure_in_subprocess.cache_clear()


@pytest.mark.usefixtures("unmeasured")
def test_what_cannot_be_measured_is_none_and_tried_again(monkeypatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr("sys.executable", str(python))
    assert host_rates.measure_host_rates(1) is None
    rates = HostRates(flops_per_s={"fp32": 1e11}, memory_bytes_per_s=2e10)
    python.write_text(
        f"#!/bin/sh\necho >> {tmp_path / 'calls'}\necho '{rates.model_dump_json()}'\n"
    )
    python.chmod(0o755)
    for _ in range(2):
        assert host_rates.measure_host_rates(1) == rates
    assert (tmp_path / "calls").read_text() == "\n"  # measured once, then known


def test_processes_share_them() -> None:
    machine = Machine(cpu="a CPU", cpu_features=("avx2",), host_cores=2, host_memory_bytes=2**34)
    rates = HostRates(flops_per_s={"fp32": 1e11, "bf16": 3e11}, memory_bytes_per_s=2e10)
    guess, measured = of_host(machine, 2), of_host(machine, 2, rates)
    assert measured.device.rate("fp32") == 5e10 != guess.device.rate("fp32")
    assert measured.device.rate("bf16") == 1.5e11
    assert "measured for a few seconds" in measured.notes[0]
    assert "guessed from its vector width" in guess.notes[0]
