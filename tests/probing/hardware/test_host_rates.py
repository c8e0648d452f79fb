"""Rates of a host that are measured in seconds."""

from pathlib import Path

import pytest

from outpace.planner.calibration.cluster import of_host
from outpace.probing.hardware import host_rates
from outpace.records.host_rates import HostRates
from outpace.records.machine import Machine


@pytest.mark.slow
def test_they_are_of_all_cores_and_not_of_what_others_leave() -> None:
    one, two = host_rates.measure_host_rates(1), host_rates.measure_host_rates(2)
    assert one is not None and two is not None
    assert set(one.flops_per_s) == {"fp32", "bf16"}
    assert one.flops_per_s["fp32"] > 1e8 and one.memory_bytes_per_s > 1e8
    # By the thread's own clock: twice as many cores, twice the rate, also on a busy machine.
    assert 1.2 < two.flops_per_s["fp32"] / one.flops_per_s["fp32"] < 3.3


def test_what_cannot_be_measured_is_none(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "no python"))
    assert host_rates.measure_host_rates(1) is None


def test_processes_share_them() -> None:
    machine = Machine(cpu="a CPU", cpu_features=("avx2",), host_cores=2, host_memory_bytes=2**34)
    rates = HostRates(flops_per_s={"fp32": 1e11, "bf16": 3e11}, memory_bytes_per_s=2e10)
    guess, measured = of_host(machine, 2), of_host(machine, 2, rates)
    assert measured.device.rate("fp32") == 5e10 != guess.device.rate("fp32")
    assert measured.device.rate("bf16") == 1.5e11
    assert "measured in a few seconds" in measured.notes[0]
    assert "guessed from its vector width" in guess.notes[0]
