"""State of GPUs from NVIDIA's management library (NVML), through nvidia-ml-py.

See https://docs.nvidia.com/deploy/nvml-api/. Each query may fail separately, which gives None. NVML
can hang with a broken driver, so `query` runs in a separate process.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from outpace.probing.hardware.nvidia_smi import ToolError, run_tool
from outpace.records.interpreter import PYTHON
from outpace.records.inventory import GpuState
from outpace.records.topology import cpu_list

# Causes of low clocks (nvml.h, nvmlClocksEventReason*), except idleness.
_REASONS = {
    0x2: "clocks set by a user",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
# Constants from NVML's header, which are stable: fields of nvmlDeviceGetFieldValues.
FI_NVLINK_DATA_TX, FI_NVLINK_DATA_RX = 138, 139  # KiB so far
FI_PCIE_TX, FI_PCIE_RX = 197, 198  # bytes so far
ALL_LINKS = 0xFFFFFFFF
PCIE_TX, PCIE_RX = 0, 1
CLOCK_SM = 1
WIDE = {2: "ulVal", 3: "ullVal", 4: "sllVal"}  # 64-bit types; 32-bit counters overflow too soon
NOT_FOUND = 6
LIBRARY = "libnvidia-ml.so.1"
_MARK = "outpace-gpus:"


def query(
    timeout_s: float = 20.0, command: list[str] | None = None
) -> tuple[tuple[GpuState, ...], str | None]:
    """Return this host's GPUs, and the reason if none are visible (otherwise None).

    The driver is queried in another process, by `command`, which must print the GPUs in the format
    of `main`. If it fails or hangs, a reason is returned and no error is raised.
    """
    try:
        text = run_tool(command or [*PYTHON, "-m", "outpace.probing.hardware.nvml"], timeout_s)
    except ToolError as error:
        return (), f"NVML: {error}"
    for line in text.splitlines():
        if line.startswith(_MARK):
            said = json.loads(line.removeprefix(_MARK))
            return tuple(GpuState.model_validate(one) for one in said["gpus"]), said["why"]
    return (), f"NVML gave no answer: {text.strip()[-300:] or 'it printed nothing'}"


def driver_answers(timeout_s: float = 20.0, library: str = LIBRARY) -> bool:
    """Return whether NVIDIA's driver answers a query from another process within `timeout_s`."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(library)  # loading it does not query the driver
        except OSError:
            return False
    return query(timeout_s)[1] is None


def read_gpus(library: Any) -> tuple[GpuState, ...]:
    """Return the state of all GPUs from an initialised `pynvml` or a substitute for it.

    Raises NVMLError.
    """
    count = library.nvmlDeviceGetCount()
    return tuple(_read_gpu(library, index) for index in range(count))


class _DeviceReader:
    """Reader of a device's properties that records why queries were refused."""

    def __init__(self, library: Any, handle: Any) -> None:
        self.library, self.handle = library, handle
        self.refused: dict[str, str] = {}

    def read_field(self, what: str, *arguments: Any) -> Any:
        """Return the result of nvmlDeviceGet`what`, or None if it was refused."""
        call = getattr(self.library, f"nvmlDeviceGet{what}", None)
        if call is None:
            self.refused[what] = "not in this version of nvidia-ml-py"
            return None
        try:
            return call(self.handle, *arguments)
        except self.library.NVMLError as error:
            self.refused[what] = str(error)
            return None


def _read_gpu(library: Any, index: int) -> GpuState:
    try:
        device = _DeviceReader(library, library.nvmlDeviceGetHandleByIndex(index))
    except library.NVMLError as error:
        return GpuState(index=index, not_told={"HandleByIndex": str(error)})
    read_field = device.read_field
    memory, busy = read_field("MemoryInfo"), read_field("UtilizationRates")
    limits, ecc, mig = (
        read_field("PowerManagementLimitConstraints"),
        read_field("EccMode"),
        read_field("MigMode"),
    )
    links, active = _count_nvlinks(device)
    others = read_field("ComputeRunningProcesses")
    return GpuState(
        index=index,
        name=decode_name(read_field("Name")),
        bus=_apply_if_known(read_field("PciInfo"), lambda pci: decode_name(pci.busId)),
        memory_bytes=_apply_if_known(memory, lambda found: found.total),
        memory_used_bytes=_apply_if_known(memory, lambda found: found.used),
        utilisation=_apply_if_known(busy, lambda found: share(found.gpu)),
        performance_state=read_field("PerformanceState"),
        sm_clock_hz=_scale_if_known(read_field("ClockInfo", library.NVML_CLOCK_SM), 1e6),
        sm_clock_max_hz=_scale_if_known(read_field("MaxClockInfo", library.NVML_CLOCK_SM), 1e6),
        temperature_c=read_field("Temperature", library.NVML_TEMPERATURE_GPU),
        power_w=_scale_if_known(read_field("PowerUsage"), 1e-3),
        power_limit_w=_scale_if_known(read_field("EnforcedPowerLimit"), 1e-3),
        power_limit_default_w=_scale_if_known(read_field("PowerManagementDefaultLimit"), 1e-3),
        power_limit_max_w=_apply_if_known(limits, lambda found: found[1] * 1e-3),
        throttled_by=_read_throttle_reasons(device),
        ecc=_apply_if_known(ecc, lambda found: bool(found[0])),
        ecc_pending=_apply_if_known(ecc, lambda found: bool(found[1])),
        ecc_uncorrected=read_field(
            "TotalEccErrors", library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
        ),
        remap_pending=_apply_if_known(read_field("RemappedRows"), lambda found: bool(found[2])),
        pcie_generation=read_field("CurrPcieLinkGeneration"),
        pcie_generation_max=read_field("MaxPcieLinkGeneration"),
        pcie_generation_card=read_field("GpuMaxPcieLinkGeneration"),
        pcie_width=read_field("CurrPcieLinkWidth"),
        pcie_width_max=read_field("MaxPcieLinkWidth"),
        nvlinks=links,
        nvlinks_active=active,
        nvlink_version=read_field("NvLinkVersion", 0) if links else None,
        cpu_affinity=_read_cpu_affinity(device),
        mig=_apply_if_known(mig, lambda found: bool(found[0])),
        persistence=_apply_if_known(read_field("PersistenceMode"), bool),
        other_processes=_apply_if_known(
            others, lambda found: sum(one.pid != os.getppid() for one in found)
        ),
        not_told=device.refused,
    )


def _read_throttle_reasons(device: _DeviceReader) -> tuple[str, ...] | None:
    bits = device.read_field("CurrentClocksEventReasons")
    if bits is None:
        bits = device.read_field("CurrentClocksThrottleReasons")
    return None if bits is None else tuple(why for bit, why in _REASONS.items() if bits & bit)


def throttle_reasons(library: Any, handle: Any) -> tuple[str, ...] | None:
    """Return the current reasons for a device's throttling; None if not reported."""
    return _read_throttle_reasons(_DeviceReader(library, handle))


def computing_pids(library: Any, handle: Any) -> frozenset[int] | None:
    """Return the PIDs of processes computing on a device; None if not reported."""
    listed = _DeviceReader(library, handle).read_field("ComputeRunningProcesses")
    return None if listed is None else frozenset(one.pid for one in listed)


def _count_nvlinks(device: _DeviceReader) -> tuple[int | None, int | None]:
    """Return the number of a GPU's NVLinks, and how many of them are up.

    NVML numbers links without gaps, so the first number that it refuses ends the list.
    """
    states = []
    for link in range(device.library.NVML_NVLINK_MAX_LINKS):
        state = device.read_field("NvLinkState", link)
        if state is None:
            break
        states.append(bool(state))
    if states or "Support" in device.refused.get("NvLinkState", ""):
        device.refused.pop("NvLinkState", None)  # end of the list, or no NVLinks
        return len(states), sum(states)
    return None, None


def _read_cpu_affinity(device: _DeviceReader) -> str | None:
    """Return the CPUs near the GPU, from NVML's mask of 64-bit words, lowest word first."""
    words = device.read_field("CpuAffinity", -(-(os.cpu_count() or 1) // 64))
    if words is None:
        return None
    return cpu_list(
        {
            64 * at + bit
            for at, word in enumerate(words)
            for bit in range(64)
            if int(word) >> bit & 1
        }
    )


def _apply_if_known(value: Any, read: Callable[[Any], Any]) -> Any:
    return None if value is None else read(value)


def _scale_if_known(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def share(percent: int) -> float | None:
    """Return a percentage as a fraction, or None above 100.

    Drivers report more than 100 for finished processes.
    """
    return percent / 100 if 0 <= percent <= 100 else None


def decode_name(value: str | bytes | None) -> str | None:
    """Return a name as text. Older versions of nvidia-ml-py return names as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def main() -> None:
    """Print this host's GPUs as JSON for `query`, with the reason if NVML cannot be used.

    The line begins with a mark that distinguishes it from other output.
    """
    gpus: tuple[GpuState, ...] = ()
    why = None
    try:
        import pynvml
    except ImportError:
        why = "nvidia-ml-py is not installed: pip install nvidia-ml-py"
    else:
        try:
            pynvml.nvmlInit()
            gpus = read_gpus(pynvml)
        except pynvml.NVMLError as error:
            why = f"NVML: {error}"
    said = {"gpus": [gpu.model_dump() for gpu in gpus], "why": why}
    print(_MARK + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
