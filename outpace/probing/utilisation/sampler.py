"""Sampler of host and NVIDIA device load. Values that cannot be read are None.

Device figures come from NVML through nvidia-ml-py: https://docs.nvidia.com/deploy/nvml-api/
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import psutil

from outpace.probing.hardware.nvml import (
    ALL_LINKS,
    CLOCK_SM,
    FI_NVLINK_DATA_RX,
    FI_NVLINK_DATA_TX,
    FI_PCIE_RX,
    FI_PCIE_TX,
    LIBRARY,
    NOT_FOUND,
    PCIE_RX,
    PCIE_TX,
    WIDE,
    decode_name,
    driver_answers,
    share,
)
from outpace.probing.utilisation.host_load import RAPL, HostReader, Processes, Rate
from outpace.records.ranks import RANK_NAME
from outpace.records.utilisation import DeviceLoad, Load

Result = TypeVar("Result")

# Inode of the initial PID namespace, whose PIDs the driver reports (linux/proc_ns.h).
_FIRST_NAMESPACE = "pid:[4026531836]"


class Nvml(Protocol):
    """The functions of `pynvml` that outpace uses. Unsupported functions raise an error."""

    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Any: ...  # noqa: N802
    def nvmlDeviceGetName(self, device: Any, /) -> str | bytes: ...  # noqa: N802
    def nvmlDeviceGetMemoryInfo(self, device: Any, /) -> Any: ...  # noqa: N802
    def nvmlDeviceGetUtilizationRates(self, device: Any, /) -> Any: ...  # noqa: N802
    def nvmlDeviceGetComputeRunningProcesses(self, device: Any, /) -> Sequence[Any]: ...  # noqa: N802
    def nvmlDeviceGetProcessUtilization(self, device: Any, since_us: int, /) -> Sequence[Any]: ...  # noqa: N802
    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, /) -> int: ...  # noqa: N802
    def nvmlDeviceGetPowerUsage(self, device: Any, /) -> int: ...  # noqa: N802
    def nvmlDeviceGetClockInfo(self, device: Any, kind: int, /) -> int: ...  # noqa: N802
    def nvmlDeviceGetPcieThroughput(self, device: Any, direction: int, /) -> int: ...  # noqa: N802
    def nvmlDeviceGetFieldValues(self, device: Any, fields: Sequence[Any], /) -> Sequence[Any]: ...  # noqa: N802


def open_nvml(timeout_s: float = 20.0, library: str = LIBRARY) -> Nvml | None:
    """Return NVML's interface; None if it is unavailable or the driver hangs.

    A query to a broken driver may never return and cannot be aborted in this process, so another
    process first queries the driver within `timeout_s`.
    """
    try:
        import pynvml

        if not driver_answers(timeout_s, library):
            return None
        pynvml.nvmlInit()
    except Exception:  # any failure means that there is no usable driver
        return None
    return cast(Nvml, pynvml)


class DeviceReader:
    """Reader of one device's load. Counters cover the time since the previous reading.

    `pids_known` says whether NVML reports the PIDs visible here; in a container, it may report
    those of the host. Raises NVML's error if there is no such device.
    """

    def __init__(self, nvml: Nvml, index: int, pids_known: bool) -> None:
        self._nvml = nvml
        self._index = index
        self._own_pids = pids_known
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = _query(lambda: nvml.nvmlDeviceGetName(self._handle))
        self._name = decode_name(name) or f"device {index}"
        self._energy, self._nvlink_rx, self._nvlink_tx = Rate(), Rate(), Rate()
        self._pcie_rx, self._pcie_tx = Rate(), Rate()
        self._seen_us = int((time.time() - 1) * 1e6)
        self.read(frozenset(), time.monotonic(), first=True)

    def read(
        self, run_pids: Collection[int] | None, now_s: float, first: bool = False
    ) -> DeviceLoad:
        """Return the load since the last call.

        `run_pids` are the processes of a run, whose share of the load is reported separately; None
        if there is no run.
        """
        nvml, handle = self._nvml, self._handle
        memory = _query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rates = _query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        run_memory_bytes, run_utilisation = self._run_usage(run_pids)
        return DeviceLoad(
            index=self._index,
            name=self._name,
            memory_total_bytes=None if memory is None else int(memory.total),
            utilisation=None if rates is None else share(rates.gpu),
            run_utilisation=run_utilisation,
            memory_bytes=None if memory is None else int(memory.used),
            run_memory_bytes=run_memory_bytes,
            power_w=self._power_w(now_s),
            clock_hz=self._clock_hz(),
            pcie_rx_bytes_per_s=self._pcie_rate(self._pcie_rx, FI_PCIE_RX, PCIE_RX, now_s, first),
            pcie_tx_bytes_per_s=self._pcie_rate(self._pcie_tx, FI_PCIE_TX, PCIE_TX, now_s, first),
            nvlink_rx_bytes_per_s=self._nvlink_rx.per_s(self._nvlink(FI_NVLINK_DATA_RX), now_s),
            nvlink_tx_bytes_per_s=self._nvlink_tx.per_s(self._nvlink(FI_NVLINK_DATA_TX), now_s),
        )

    def _power_w(self, now_s: float) -> float | None:
        """Return the mean power from the energy counter, or else NVML's power reading."""
        energy_mj = _query(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        watts = self._energy.per_s(energy_mj, now_s)
        if watts is not None:
            return watts / 1e3
        power_mw = _query(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._handle))
        return None if power_mw is None else power_mw / 1e3

    def _clock_hz(self) -> float | None:
        mhz = _query(lambda: self._nvml.nvmlDeviceGetClockInfo(self._handle, CLOCK_SM))
        return None if mhz is None else mhz * 1e6

    def _pcie_rate(
        self, rate: Rate, field: int, direction: int, now_s: float, first: bool
    ) -> float | None:
        """Return PCIe bytes/s from a counter or, without one, from NVML's sample over 20 ms.

        If `first`, no sample is taken. NVML reports the sample in KB/s.
        """
        count = self._read_counter(field)
        if count is not None:
            return rate.per_s(count, now_s)
        if first:
            return None
        seen = _query(lambda: self._nvml.nvmlDeviceGetPcieThroughput(self._handle, direction))
        return None if seen is None else seen * 1e3

    def _nvlink(self, field: int) -> float | None:
        kib = self._read_counter((field, ALL_LINKS))
        return None if kib is None else kib * 1024

    def _read_counter(self, field: int | tuple[int, int]) -> float | None:
        found = _query(lambda: self._nvml.nvmlDeviceGetFieldValues(self._handle, [field])[0])
        if found is None or found.nvmlReturn != 0 or found.valueType not in WIDE:
            return None
        return float(getattr(found.value, WIDE[found.valueType]))

    def _run_usage(self, run_pids: Collection[int] | None) -> tuple[int | None, float | None]:
        """Return the bytes of memory and the utilisation of the run's processes on this device."""
        if run_pids is None:
            return None, None
        listed = _query(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        ours = [one for one in listed or () if one.pid in run_pids]
        known = listed is not None and (self._own_pids or bool(ours))
        used = [one.usedGpuMemory for one in ours]
        memory_bytes = None if not known or None in used else int(sum(used))
        return memory_bytes, self._run_utilisation(run_pids) if known else None

    def _run_utilisation(self, run_pids: Collection[int]) -> float | None:
        """Return the latest utilisation by the run's processes together; 0.0 if none computed."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_us)
        except Exception as error:
            return 0.0 if getattr(error, "value", None) == NOT_FOUND else None
        newest: dict[int, Any] = {}
        for sample in sorted(samples, key=lambda one: one.timeStamp):
            newest[sample.pid] = sample
            self._seen_us = max(self._seen_us, sample.timeStamp)
        shares = [share(one.smUtil) for pid, one in newest.items() if pid in run_pids]
        known = [one for one in shares if one is not None]
        return min(1.0, sum(known)) if len(known) == len(shares) else None


def _query(query: Callable[[], Result]) -> Result | None:
    with suppress(
        Exception
    ):  # errors of NVML and ctypes: not supported, no permission, device lost
        return query()
    return None


class Sampler:
    """Sampler of the load of this host and its GPUs.

    `roots` are the PIDs of the first processes of a run on this host.
    """

    def __init__(
        self,
        roots: Collection[int] = (),
        *,
        nvml: Nvml | None = None,
        node: int = 0,
        rapl: Path = RAPL,
    ) -> None:
        self._processes = Processes(roots) if roots else None
        self._node = node
        self._host = HostReader(self._processes, rapl)
        self._devices = [] if nvml is None else _make_readers(nvml)
        self._last_s = time.monotonic()

    @property
    def run_ended(self) -> bool:
        """Return whether a run was given and all of its processes have exited."""
        return self._processes is not None and not self._processes.pids

    def read(self) -> Load:
        """Return the load since the previous call, which should be at least 0.1 s ago."""
        now_s = time.monotonic()
        host = self._host.read(now_s)
        run_pids = None if self._processes is None else self._processes.pids
        devices = tuple(device.read(run_pids, now_s) for device in self._devices)
        duration_s, self._last_s = max(now_s - self._last_s, 1e-6), now_s
        return Load(node=self._node, duration_s=duration_s, devices=devices, host=host)


def same_pids() -> bool:
    """Return whether the driver reports the PIDs that this process sees; not so in containers."""
    return _query(lambda: str(Path("/proc/self/ns/pid").readlink())) == _FIRST_NAMESPACE


def _make_readers(nvml: Nvml) -> list[DeviceReader]:
    pids_known = same_pids()
    count = _query(nvml.nvmlDeviceGetCount) or 0
    readers = (_query(partial(DeviceReader, nvml, index, pids_known)) for index in range(count))
    return [reader for reader in readers if reader is not None]


def training_in(metrics: Path) -> list[int]:
    """Return the PIDs of the first processes of the run that writes this metrics file.

    Rank 0 holds the file open. If a launcher started rank 0 and others on this host, the launcher's
    PID is returned for all of them.
    """
    target = metrics.resolve()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if any(Path(file.path) == target for file in process.open_files()):
                local = int(process.environ().get("LOCAL_WORLD_SIZE", "1"))
                several = local > 1 or process.name().startswith(RANK_NAME)
                return [process.ppid() if several else process.pid]
    return []


def open_files() -> set[Path]:
    """Return the files that are open in processes of this host, as far as permissions allow."""
    found: set[Path] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            found.update(Path(file.path) for file in process.open_files())
    return found
