"""NVML's answers, as documented, become a load; what fails alone is unknown alone."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from outpace.probing.utilisation.host_load import HostReader
from outpace.probing.utilisation.sampler import DeviceReader, Sampler, open_nvml, training_in
from outpace.records.utilisation import DeviceLoad

NOT_SUPPORTED, NOT_FOUND = 3, 6
ULL, UINT = 3, 1


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


class Fake:
    """A stand-in for the module pynvml with one device. `failing` names queries that raise."""

    def __init__(self, failing: tuple[str, ...] = ()) -> None:
        self.failing = failing
        self.counters = {138: 0, 139: 0, 197: 0, 198: 0}  # NVLink out, in (KiB); PCIe out, in
        self.counter_type = ULL
        self.energy_mj = 0
        self.processes: list[Any] = []
        self.samples: list[Any] | None = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in self.failing:

            def fail(*_: Any) -> Any:
                raise NvmlError(NOT_SUPPORTED)

            return fail
        return super().__getattribute__(name)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        return f"handle {index}"

    def nvmlDeviceGetName(self, device: Any) -> str:  # noqa: N802
        assert device == "handle 0"
        return "NVIDIA A"

    def nvmlDeviceGetMemoryInfo(self, device: Any) -> Any:  # noqa: N802
        return SimpleNamespace(total=1000, used=700, free=300)

    def nvmlDeviceGetUtilizationRates(self, device: Any) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=94, memory=40)

    def nvmlDeviceGetComputeRunningProcesses(self, device: Any) -> list[Any]:  # noqa: N802
        return self.processes

    def nvmlDeviceGetProcessUtilization(self, device: Any, since_us: int) -> list[Any]:  # noqa: N802
        found = [one for one in self.samples or [] if one.timeStamp > since_us]
        if not found:
            raise NvmlError(NOT_FOUND)
        return found

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any) -> int:  # noqa: N802
        return self.energy_mj

    def nvmlDeviceGetPowerUsage(self, device: Any) -> int:  # noqa: N802
        return 123_400

    def nvmlDeviceGetClockInfo(self, device: Any, kind: int) -> int:  # noqa: N802
        return {1: 1980}[kind]

    def nvmlDeviceGetPcieThroughput(self, device: Any, direction: int) -> int:  # noqa: N802
        return {0: 70, 1: 90}[direction]

    def nvmlDeviceGetFieldValues(self, device: Any, fields: list[Any]) -> list[Any]:  # noqa: N802
        values = []
        for field in fields:
            number = field[0] if isinstance(field, tuple) else field
            count = self.counters.get(number)
            value = SimpleNamespace(ullVal=count, uiVal=count)
            values.append(
                SimpleNamespace(
                    nvmlReturn=NOT_SUPPORTED if count is None else 0,
                    valueType=self.counter_type,
                    value=value,
                )
            )
        return values


def process(pid: int, used: int | None) -> Any:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def sample(pid: int, share: int, at_us: int | None = None) -> Any:
    stamp = int((time.time() + 60) * 1e6) if at_us is None else at_us
    return SimpleNamespace(pid=pid, timeStamp=stamp, smUtil=share)


def busy() -> Fake:
    """A device that pids 10 and 11 of the run and 99 of somebody else compute on."""
    fake = Fake()
    fake.processes = [process(10, 300), process(11, 100), process(99, 250)]
    later = int((time.time() + 30) * 1e6)
    fake.samples = [sample(10, 90, later), sample(10, 50, later + 5), sample(11, 20, later),
                    sample(99, 24, later)]  # fmt: skip
    return fake


def read(fake: Fake, pids: set[int] | None, pids_known: bool = True) -> DeviceLoad:
    """Two seconds after the reader began, in which the counters rose."""
    samples, fake.samples = fake.samples, []  # what came before the reader is not asked for
    with mock.patch("time.monotonic", return_value=100.0):
        reader = DeviceReader(fake, 0, pids_known)
    fake.samples = samples
    fake.counters = {138: 2000, 139: 4000, 197: 6000, 198: 8000} if fake.counters else {}
    fake.energy_mj = 800_000
    return reader.read(pids, 102.0)


def test_all_figures_in_their_units():
    load = read(busy(), {10, 11})
    assert (load.index, load.name, load.memory_total_bytes) == (0, "NVIDIA A", 1000)
    assert (load.utilisation, load.memory_bytes) == (0.94, 700)
    assert load.run_memory_bytes == 400
    assert load.run_utilisation == pytest.approx(0.7)  # the newest of each process
    assert load.power_w == pytest.approx(400)  # 800 J in two seconds
    assert load.clock_hz == 1.98e9
    assert load.nvlink_tx_bytes_per_s == pytest.approx(1000 * 1024)
    assert load.nvlink_rx_bytes_per_s == pytest.approx(2000 * 1024)
    assert load.pcie_tx_bytes_per_s == pytest.approx(3000)
    assert load.pcie_rx_bytes_per_s == pytest.approx(4000)


@pytest.mark.parametrize(
    ("query", "unknown"),
    [
        ("nvmlDeviceGetMemoryInfo", {"memory_bytes", "memory_total_bytes"}),
        ("nvmlDeviceGetUtilizationRates", {"utilisation"}),
        ("nvmlDeviceGetComputeRunningProcesses", {"run_memory_bytes", "run_utilisation"}),
        ("nvmlDeviceGetProcessUtilization", {"run_utilisation"}),
        ("nvmlDeviceGetTotalEnergyConsumption", set()),  # power is asked for instead
        ("nvmlDeviceGetPowerUsage", set()),  # not needed
        ("nvmlDeviceGetPcieThroughput", set()),  # not needed
        ("nvmlDeviceGetFieldValues", {"nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s"}),
        ("nvmlDeviceGetName", set()),
    ],
)
def test_a_query_that_fails_leaves_the_others_known(query: str, unknown: set[str]):
    fake = busy()
    fake.failing = (query,)
    load = read(fake, {10, 11})
    found = {name for name, value in load.model_dump().items() if value is None}
    assert found == unknown
    if query == "nvmlDeviceGetTotalEnergyConsumption":
        assert load.power_w == pytest.approx(123.4)


def test_without_a_wide_counter_pcie_is_what_nvml_saw_in_kb_per_s():
    fake = busy()
    fake.counter_type = UINT  # 32 bits wrap in a fraction of a second
    load = read(fake, None)
    assert (load.pcie_tx_bytes_per_s, load.pcie_rx_bytes_per_s) == (70e3, 90e3)
    assert load.nvlink_tx_bytes_per_s is None


def test_a_device_of_others_is_idle_for_the_run_and_unknown_in_a_container():
    load = read(busy(), {5})
    assert (load.run_memory_bytes, load.run_utilisation) == (0, 0.0)
    assert load.utilisation == 0.94
    load = read(busy(), {5}, pids_known=False)
    assert (load.run_memory_bytes, load.run_utilisation) == (None, None)
    load = read(busy(), {10}, pids_known=False)  # the driver says our numbers all the same
    assert load.run_memory_bytes == 300
    load = read(busy(), None)
    assert (load.run_memory_bytes, load.run_utilisation) == (None, None)


def test_nobody_computing_is_zero_and_nonsense_is_unknown():
    fake = busy()
    fake.samples = []
    assert read(fake, {10}).run_utilisation == 0.0
    fake = busy()
    fake.samples = [sample(10, 4_000_000)]
    assert read(fake, {10}).run_utilisation is None
    fake = busy()
    fake.processes = [process(10, None)]
    assert read(fake, {10}).run_memory_bytes is None


def test_a_sampler_without_a_driver_or_with_a_broken_device_has_the_host_alone():
    assert Sampler().read().devices == ()
    broken = Fake(failing=("nvmlDeviceGetHandleByIndex",))
    assert Sampler(nvml=broken).read().devices == ()
    assert len(Sampler([os.getpid()], nvml=Fake()).read().devices) == 1


PYNVML = """
import os, time
class NVMLError(Exception): pass
def nvmlInit():
    {init}
def nvmlDeviceGetCount():
    return 0
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Plants a `pynvml` here and in child processes, which does `init` when it is begun with."""

    def plant(init):
        (tmp_path / "pynvml.py").write_text(PYNVML.format(init=init))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    yield plant
    sys.modules.pop("pynvml", None)


@pytest.mark.skipif(sys.platform != "linux", reason="loads Linux's C library")
def test_a_driver_that_hangs_is_not_asked_in_this_process(driver, tmp_path):
    asked = tmp_path / "asked"
    driver(f"open({str(asked)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(300)")
    began = time.monotonic()
    assert open_nvml(timeout_s=3, library="libc.so.6") is None
    assert time.monotonic() - began < 150  # not the driver's 300
    # A busy machine may not have come as far in another process.
    assert not asked.exists() or str(os.getpid()) not in asked.read_text().split()
    asked.unlink(missing_ok=True)
    assert open_nvml(library="libno-such-driver.so") is None
    assert not asked.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="loads Linux's C library")
def test_a_driver_that_answers_is_opened_and_one_that_refuses_is_not(driver):
    driver("pass")
    opened = open_nvml(600.0, library="libc.so.6")
    assert opened is not None and opened.nvmlDeviceGetCount() == 0
    driver("raise NVMLError('Driver/library version mismatch')")
    assert open_nvml(library="libc.so.6") is None


def test_the_process_that_holds_a_run_s_figures_open_is_found(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    code = f"f = open({str(metrics)!r}, 'a'); print('open', flush=True); input()"
    environ = {**os.environ, "LOCAL_WORLD_SIZE": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        assert training_in(metrics) == [child.pid]
        child.stdin.write(b"\n")
    assert training_in(metrics) == []


def test_counters_of_energy_are_watts_and_wrap(tmp_path):
    for package, range_uj in ((0, 10_000_000), (1, 10_000_000)):
        zone = tmp_path / f"intel-rapl:{package}"
        zone.mkdir()
        (zone / "max_energy_range_uj").write_text(str(range_uj))
        (zone / "energy_uj").write_text("9000000")
    part = tmp_path / "intel-rapl:0:0"  # already in its package
    part.mkdir()
    (part / "energy_uj").write_text("5")
    with mock.patch("time.monotonic", return_value=100.0):
        reader = HostReader(rapl=tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("9500000")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("500000")  # 1.5 J, past the end
    assert reader.read(101.0).power_w == pytest.approx(2.0)
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()  # half of the watts would be wrong
    assert reader.read(102.0).power_w is None
