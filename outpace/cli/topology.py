"""`outpace topology`."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from outpace.cli.parser import Parser, number_type
from outpace.records.base import write_atomic
from outpace.records.errors import BadInputError
from outpace.records.topology import CpuTopology, Placement, Topology

_ABOUT = "How this host's devices are joined, which GPUs should hold tensor parallelism, and why."
_EPILOG = (
    "Reads nvidia-smi topo -m, of this host or saved in a file, and the processors from the kernel."
)


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Print a topology and what it means; returns 0. Raises BadInputError."""
    arguments = _parser().read(argv)
    topology, why = _topology(arguments.file, arguments.timeout)
    cpu = None
    if arguments.file is None:
        from outpace.probe.cpus import read_cpus

        cpu = read_cpus()
    placement = None
    if topology is not None:
        from outpace.probe.placement import place

        placement = place(topology, _nvlink_rate(arguments))
    if arguments.svg is not None:
        _draw(arguments.svg, topology, placement, cpu)
    if arguments.json:
        said = {
            "topology": topology and topology.model_dump(mode="json"),
            "placement": placement and placement.model_dump(mode="json"),
            "cpu": cpu and cpu.model_dump(mode="json"),
            "gpus_unknown": why,
        }
        print(json.dumps(said, indent=2), flush=True)
        return 0
    _show(topology, placement, cpu, why)
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


def _nvlink_rate(arguments: argparse.Namespace) -> float | None:
    """Bytes/s of one NVLink in one direction: of the link named, or of this host's GPUs."""
    from outpace.catalog.links import LINKS, find_link

    if arguments.nvlink is not None:
        link = find_link(f"NVLink {arguments.nvlink}")
        return link.bytes_per_s
    if arguments.file is not None:
        return None
    from outpace.catalog.accelerators import find_accelerator
    from outpace.probe.nvml import query

    gpus, _ = query(arguments.timeout)
    known = {find_accelerator(gpu.name or "", gpu.memory_bytes) for gpu in gpus}
    links = {one.device_link.link if one and one.device_link else None for one in known}
    name = links.pop() if len(links) == 1 else None
    return None if name is None or LINKS[name].kind != "nvlink" else LINKS[name].bytes_per_s


def _draw(
    path: Path, topology: Topology | None, placement: Placement | None, cpu: CpuTopology | None
) -> None:
    from outpace.report.topology_svg import cpu_svg, topology_svg

    if path.suffix != ".svg":
        raise BadInputError(f"--svg {path}: the name has to end with .svg")
    try:
        if topology is not None and placement is not None:
            write_atomic(path, topology_svg(topology, placement))
        elif cpu is not None:
            write_atomic(path, cpu_svg(cpu))
    except OSError as error:
        raise BadInputError(f"--svg {path}: {error.strerror}") from None


def _show(
    topology: Topology | None, placement: Placement | None, cpu: CpuTopology | None, why: str | None
) -> None:
    from rich.console import Console
    from rich.text import Text

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
    add("--svg", type=Path, default=None, metavar="FILE", help="draw it, too")
    add(
        "--nvlink",
        default=None,
        metavar="GENERATION",
        help="2 to 5, to say how fast a group is joined (default: of this host's GPUs)",
    )
    add(
        "--timeout",
        type=number_type(float, 0.1),
        default=20.0,
        metavar="SECONDS",
        help="how long to wait for nvidia-smi (default: 20)",
    )
    return parser
