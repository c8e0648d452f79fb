"""`outpace topology`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from outpace.cli.output import output_file, write_output
from outpace.cli.parser import Parser, duration_type
from outpace.records.errors import BadInputError
from outpace.records.inventory import GpuState, HostTopology
from outpace.records.topology import CpuTopology, Placement, Topology

_ABOUT = (
    "Show how this host's devices are connected, which GPUs to use for tensor parallelism, and why."
)
_EPILOG = (
    "Reads nvidia-smi topo -m, from this host or from a file, the GPUs' links, clocks and "
    "limits from NVML, and the processors from the kernel."
)


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Print a host's topology, and its consequences for parallelism; return 0.

    Raises BadInputError if an argument is invalid.
    """
    arguments = _parser().read(argv)
    from outpace.probing.hardware.host_topology import read_topology

    found = read_topology(arguments.file, arguments.nvlink, arguments.timeout)
    if arguments.svg is not None:
        _draw(arguments.svg, found)
    if arguments.json:
        print(found.model_dump_json(indent=2), flush=True)
        return 0
    _show(found.topology, found.placement, found.cpu, found.gpus_unknown)
    _show_state(found.gpus, found.state_unknown if found.topology is not None else None)
    return 0


def _draw(path: Path, host: HostTopology) -> None:
    from outpace.reporting.sections.topology_svg import cpu_svg, topology_svg

    if path.suffix != ".svg":
        raise BadInputError(f"--svg {path}: the name must end with .svg")
    if host.topology is not None and host.placement is not None:
        write_output(path, topology_svg(host.topology, host.placement))
    elif host.cpu is not None:
        write_output(path, cpu_svg(host.cpu))


def _show_state(gpus: Sequence[GpuState], why: str | None) -> None:
    from rich.text import Text

    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.topology import gpu_line

    console = Console(highlight=False)
    for gpu in gpus:
        console.print(Text(gpu_line(gpu)))
    if why is not None:
        console.print(Text(f"The current state of the GPUs is unknown: {why}", style="yellow"))


def _show(
    topology: Topology | None, placement: Placement | None, cpu: CpuTopology | None, why: str | None
) -> None:
    from rich.text import Text

    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.topology import cpu_text, topology_text

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
    add = parser.option
    add("--from", "FILE", Path,
        "output of nvidia-smi topo -m from another host, as a file; - is standard input",
        dest="file")  # fmt: skip
    add("--svg", "FILE", output_file, "also draw the topology to this .svg file")
    add("--nvlink", "GENERATION", str,
        "NVLink generation, 2 to 5, to show a group's bandwidth and how much slower other links "
        "are (default: that of this host's GPUs)")  # fmt: skip
    add("--timeout", "TIME", duration_type(0.1),
        "time to wait for nvidia-smi: 20, 1m (default: 20 s)", default=20.0)  # fmt: skip
    return parser
