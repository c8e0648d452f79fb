"""A host's topology: links and state of its GPUs, its CPUs, and advice on placement."""

import sys
from collections.abc import Sequence
from pathlib import Path

from outpace.catalog.accelerators import ACCELERATORS, find_accelerator
from outpace.catalog.links import LINKS, find_link
from outpace.probing.hardware import nvml
from outpace.probing.hardware.cpus import read_cpus
from outpace.probing.hardware.gpu_placement import advise_placement
from outpace.probing.hardware.nvidia_smi import ToolError, parse, read_live
from outpace.records.errors import BadInputError
from outpace.records.hardware import Accelerator
from outpace.records.inventory import GpuState, HostTopology
from outpace.records.topology import Topology

TIMEOUT_S = 20.0  # for each answer of the driver


def read_topology(
    file: Path | None = None, nvlink: str | None = None, timeout_s: float = TIMEOUT_S
) -> HostTopology:
    """Read the topology of this host, or from a file with the output of `nvidia-smi topo -m`.

    The `file` "-" is standard input. `nvlink` is the generation of the links ("4") if no GPU
    reports it. Raises BadInputError for an unknown generation or an unreadable file.
    """
    if nvlink is not None:
        find_link(f"NVLink {nvlink}")  # raises an error for an unknown one, even if no GPU needs it
    topology, why = _read_links(file, timeout_s)
    gpus, gpus_why = ((), None) if file is not None else nvml.query(timeout_s)
    return HostTopology(
        topology=topology,
        placement=None
        if topology is None
        else advise_placement(topology, *_catalog_rates(nvlink, gpus)),
        cpu=None if file is not None else read_cpus(),
        gpus=gpus,
        gpus_unknown=why,
        state_unknown=gpus_why,
    )


def _read_links(file: Path | None, timeout_s: float) -> tuple[Topology | None, str | None]:
    """Read the topology from a file, or from this host if `file` is None.

    Returns the topology and None, or None and the reason why this host's topology cannot be read.
    """
    if file is None:
        try:
            return read_live(timeout_s), None
        except ToolError as error:
            return None, str(error)
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(errors="replace")
    except OSError as error:
        raise BadInputError(f"--from {file}: {error.strerror}") from None
    return parse(text, "standard input" if str(file) == "-" else file.name), None


def _catalog_rates(
    nvlink: str | None, gpus: Sequence[GpuState]
) -> tuple[float | None, float | None]:
    """Return the one-way bytes/s of an NVLink and of a GPU's PCIe slot, from the catalog.

    They are looked up for NVLink generation `nvlink` and the accelerators that have it. Without
    `nvlink`, they are looked up for this host's GPUs, and are None if a GPU is not in the catalog
    or if the GPUs have different links.
    """
    if nvlink is not None:
        link = find_link(f"NVLink {nvlink}")
        chips = [one for one in ACCELERATORS.values() if _device_link(one) == link.name]
        return link.bytes_per_s, _fastest_slot_bytes_per_s(chips)
    found = [find_accelerator(gpu.name or "", gpu.memory_bytes) for gpu in gpus]
    chips = [chip for chip in found if chip is not None]
    names = {_device_link(chip) for chip in chips}
    if len(chips) < len(found) or len(names) != 1:
        return None, None
    name = names.pop()
    known = name is not None and LINKS[name].kind == "nvlink"
    return (LINKS[name].bytes_per_s if name and known else None), _fastest_slot_bytes_per_s(chips)


def _device_link(chip: Accelerator) -> str | None:
    return None if chip.device_link is None else chip.device_link.link


def _fastest_slot_bytes_per_s(chips: Sequence[Accelerator]) -> float | None:
    links = [LINKS[chip.host_link] for chip in chips]
    return max((link.bytes_per_s for link in links if link.kind == "pcie"), default=None)
