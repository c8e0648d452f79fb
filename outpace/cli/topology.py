"""`outpace topology`."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from outpace.cli.output import output_file, write_output
from outpace.cli.parser import LONGEST_S, Parser, number_type
from outpace.records.errors import BadInputError
from outpace.records.hardware import Accelerator
from outpace.records.inventory import GpuState
from outpace.records.topology import CpuTopology, Placement, Topology

_ABOUT = "How this host's devices are joined, which GPUs should hold tensor parallelism, and why."
_EPILOG = (
    "Reads nvidia-smi topo -m, of this host or saved in a file, the GPUs' links, clocks and limits "
    "from NVML, and the processors from the kernel."
)


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Print a topology and what it means; returns 0. Raises BadInputError."""
    arguments = _parser().read(argv)
    topology, why = _topology(arguments.file, arguments.timeout)
    cpu = None
    if arguments.file is None:
        from outpace.probe.cpus import read_cpus

        cpu = read_cpus()
    gpus, gpus_why = _gpus(arguments)
    placement = None
    if topology is not None:
        from outpace.probe.placement import place

        placement = place(topology, *_rates(arguments.nvlink, gpus))
    if arguments.svg is not None:
        _draw(arguments.svg, topology, placement, cpu)
    if arguments.json:
        said = {
            "topology": topology and topology.model_dump(mode="json"),
            "placement": placement and placement.model_dump(mode="json"),
            "cpu": cpu and cpu.model_dump(mode="json"),
            "gpus": [gpu.model_dump(mode="json") for gpu in gpus],
            "gpus_unknown": why,
            "state_unknown": gpus_why,
        }
        print(json.dumps(said, indent=2), flush=True)
        return 0
    _show(topology, placement, cpu, why)
    _show_state(gpus, gpus_why if topology is not None else None)
    return 0


def _topology(file: Path | None, timeout_s: float) -> tuple[Topology | None, str | None]:
    """What is in the file, or this host's; None and why there is none to see."""
    from outpace.probe.topology import ToolError, parse, read_live

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


def _gpus(arguments: argparse.Namespace) -> tuple[tuple[GpuState, ...], str | None]:
    """This host's GPUs as NVML tells of them now, and why it tells of none; no file's."""
    if arguments.file is not None:
        return (), None
    from outpace.probe.nvml import query

    return query(arguments.timeout)


def _rates(nvlink: str | None, gpus: Sequence[GpuState]) -> tuple[float | None, float | None]:
    """Bytes/s in one direction of an NVLink and of a GPU's PCIe slot, of the catalog.

    Of the link that is named, and the cards that have it; else of this host's GPUs.
    """
    from outpace.catalog.accelerators import ACCELERATORS, find_accelerator
    from outpace.catalog.links import LINKS, find_link

    if nvlink is not None:
        link = find_link(f"NVLink {nvlink}")
        chips = [one for one in ACCELERATORS.values() if _device_link(one) == link.name]
        return link.bytes_per_s, _slot(chips)
    found = [find_accelerator(gpu.name or "", gpu.memory_bytes) for gpu in gpus]
    chips = [chip for chip in found if chip is not None]
    names = {_device_link(chip) for chip in chips}
    if len(chips) < len(found) or len(names) != 1:
        return None, None
    name = names.pop()
    known = name is not None and LINKS[name].kind == "nvlink"
    return (LINKS[name].bytes_per_s if name and known else None), _slot(chips)


def _device_link(chip: Accelerator) -> str | None:
    return None if chip.device_link is None else chip.device_link.link


def _slot(chips: Sequence[Accelerator]) -> float | None:
    """The fastest of their PCIe slots."""
    from outpace.catalog.links import LINKS

    links = [LINKS[chip.host_link] for chip in chips]
    return max((link.bytes_per_s for link in links if link.kind == "pcie"), default=None)


def _draw(
    path: Path, topology: Topology | None, placement: Placement | None, cpu: CpuTopology | None
) -> None:
    from outpace.report.topology_svg import cpu_svg, topology_svg

    if path.suffix != ".svg":
        raise BadInputError(f"--svg {path}: the name has to end with .svg")
    if topology is not None and placement is not None:
        write_output(path, topology_svg(topology, placement))
    elif cpu is not None:
        write_output(path, cpu_svg(cpu))


def _show_state(gpus: Sequence[GpuState], why: str | None) -> None:
    """How each GPU is now; why that is not known where there are GPUs."""
    from rich.text import Text

    from outpace.report.terminal import Console
    from outpace.report.topology import gpu_line

    console = Console(highlight=False)
    for gpu in gpus:
        console.print(Text(gpu_line(gpu)))
    if why is not None:
        console.print(Text(f"How the GPUs are now is not known: {why}", style="yellow"))


def _show(
    topology: Topology | None, placement: Placement | None, cpu: CpuTopology | None, why: str | None
) -> None:
    from rich.text import Text

    from outpace.report.terminal import Console
    from outpace.report.topology import cpu_text, topology_text

    console = Console(highlight=False)
    if topology is not None and placement is not None:
        console.print(topology_text(topology, placement))
    if why is not None:
        console.print(Text(f"GPUs: {why}", style="yellow"))
    if cpu is not None:
        console.print(cpu_text(cpu))


def _parser() -> Parser:
    parser = Parser("topology", _ABOUT, _EPILOG)
    parser.add_json()
    add = parser.arguments.add_argument
    add(
        "--from",
        dest="file",
        type=Path,
        default=None,
        metavar="FILE",
        help="what nvidia-smi topo -m printed elsewhere; - is standard input",
    )
    add("--svg", type=output_file, default=None, metavar="FILE", help="draw it, too")
    add(
        "--nvlink",
        default=None,
        metavar="GENERATION",
        help="2 to 5, to say how fast a group is joined and how much slower the others are "
        "(default: of this host's GPUs)",
    )
    add(
        "--timeout",
        type=number_type(float, 0.1, LONGEST_S),
        default=20.0,
        metavar="SECONDS",
        help="how long to wait for nvidia-smi (default: 20)",
    )
    return parser
