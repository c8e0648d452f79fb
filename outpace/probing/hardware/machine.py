"""Description of this machine without measurements: CPU, memory and devices."""

import platform
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from outpace.probing.hardware.cpus import cpu_quota, usable_cpus
from outpace.probing.hardware.procfs import MEMBERSHIP, MOUNTS
from outpace.records.hardware import Accelerator
from outpace.records.machine import Device, Machine

FindAccelerator = Callable[[str, int | None], Accelerator | None]
# CPU features that determine the speed of matmuls.
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "bf16",
             "sve", "sve_bf16", "asimd")  # fmt: skip


def usable_cores(membership: Path = MEMBERSHIP, mounts: Path = MOUNTS) -> int:
    """Return the number of cores that this process may use, by CPU affinity and cgroup quota."""
    cpus, (quota, _) = len(usable_cpus()), cpu_quota(membership, mounts)
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def identify(find_accelerator: FindAccelerator) -> Machine:
    """Describe this host and its CUDA devices, which `find_accelerator` looks up in a catalog."""
    name, features = _read_processor()
    return Machine(
        host_cores=usable_cores(),
        host_memory_bytes=psutil.virtual_memory().total,
        cpu=name,
        cpu_features=features,
        devices=tuple(_cuda_devices(find_accelerator)),
        system=f"{platform.system()} {platform.release()}",
    )


def _read_processor() -> tuple[str, tuple[str, ...]]:
    name, flags = platform.processor() or platform.machine(), set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags.update(value.split())
                break
    except OSError:
        pass  # not Linux: use the platform's name
    return name, tuple(feature for feature in _FEATURES if feature in flags)


def _cuda_devices(find_accelerator: FindAccelerator) -> list[Device]:
    if not torch.cuda.is_available():
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        known = find_accelerator(properties.name, properties.total_memory)
        devices.append(
            Device(
                name=properties.name,
                memory_bytes=properties.total_memory,
                accelerator=known.name if known else None,
            )
        )
    return devices
