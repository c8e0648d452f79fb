"""A topology in a terminal: the matrix of GPUs, and its consequences for parallelism."""

from itertools import combinations

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from outpace.records.errors import join_or
from outpace.records.inventory import GpuState
from outpace.records.topology import (
    LEGEND,
    CpuTopology,
    Grouping,
    Placement,
    SlowPairs,
    Topology,
    goodness,
    meaning,
    nvlinks,
)
from outpace.records.units import show_bytes, show_count

STYLES = {"PIX": "cyan", "PXB": "cyan", "PHB": "yellow", "NODE": "yellow", "SYS": "red",
          "SOC": "red", "X": "dim"}  # fmt: skip
_PAIRS_SHOWN = 6


def topology_text(topology: Topology, placement: Placement) -> Group:
    """Show missing NVLinks, the matrix of GPUs and network cards with its legend, and advice.

    The matrix has the link between each two devices. It is symmetric, so network cards have only
    rows; their columns would not fit.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    gpus = topology.gpus
    table.add_column("")
    for gpu in gpus:
        table.add_column(gpu, justify="center", no_wrap=True)
    with_numa = any(one.numa_affinity for one in topology.devices)
    with_nics = bool(placement.nics)
    for title in ["CPUs", *(["NUMA"] * with_numa), *(["nearest NICs"] * with_nics)]:
        table.add_column(title)
    near = {one.gpu: one for one in placement.nics}
    for gpu in gpus:
        device = topology.device(gpu)
        row = [Text(gpu, style="bold")]
        row += [_link_text(topology.link_between(gpu, other)) for other in gpus]
        row.append(Text(device.cpu_affinity or "n/a"))
        if with_numa:
            row.append(Text(device.numa_affinity or "n/a"))
        if with_nics:
            row.append(Text(f"{_shorten_names(near[gpu].nics)} {near[gpu].link or 'n/a'}".strip()))
        table.add_row(*row)
    for nic in topology.nics:
        label = topology.device(nic).label
        name = Text(nic, style="bold").append(f" {label}" if label else "", style="dim")
        table.add_row(name, *(_link_text(topology.link_between(nic, gpu)) for gpu in gpus))
    terms = {link for row in topology.links for link in row if link not in (None, "X")}
    shown = [
        term for term in LEGEND if term in terms or (term == "NV#" and any(map(nvlinks, terms)))
    ]
    lines = [Text(f"{term:<4} {LEGEND[term]}", style="dim") for term in shown]
    faults = [Text(line, style="yellow") for line in link_faults(placement, topology)]
    parts = [Text(line) for line in advice(placement, topology)[len(faults) :]]
    notes = [Text(f"Caution: {note}.", style="yellow") for note in topology.notes]
    return Group(*faults, table, *lines, Text(""), *parts, *notes)


def _link_text(link: str | None) -> Text:
    return Text(link or "n/a", style="green" if nvlinks(link) else STYLES.get(link or "", "red"))


def _shorten_names(names: tuple[str, ...]) -> str:
    """Join names for a narrow column: "NIC0 NIC1", or "NIC0 and 3 more"."""
    if not names:
        return ""
    return " ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more"


def advice(placement: Placement, topology: Topology) -> list[str]:
    """Return sentences on which GPUs to group for tensor parallelism, and on slow links."""
    count = len(topology.gpus)
    if count < 2:
        return [f"{count} GPU: nothing to place."]
    lines = [*link_faults(placement, topology), _tensor_parallel_sentence(placement, topology)]
    best = placement.tensor_parallel
    for one in placement.groupings:
        if best is not None and one.size > best.size:
            lines.append(f"TP {one.size} would cross {one.worst_link} in every layer.")
    if count > 2 and placement.bottleneck and not nvlinks(placement.bottleneck):
        lines.append(
            f"Communication over all {count} GPUs (DDP, FSDP) crosses {placement.bottleneck} at "
            "its slowest point."
        )
    for slow in placement.slow if count > 2 else ():
        pairs = ", ".join(f"{a}–{b}" for a, b in slow.pairs[:_PAIRS_SHOWN])
        more = len(slow.pairs) - _PAIRS_SHOWN
        lines.append(
            f"{slow.link}: {len(slow.pairs)} of {count * (count - 1) // 2} pairs ({pairs}"
            f"{f' and {more} more' if more > 0 else ''}), {meaning(slow.link)}."
            + (f" {_slower_sentence(slow, topology)}" if slow.times_slower is not None else "")
        )
    own = [one.gpu for one in placement.nics if one.link is None and not one.nics]
    if own:
        lines.append(
            f"{', '.join(own)}: each is a separate NUMA node (GPU NUMA ID), as with Grace, so "
            "every network card appears to be on another node. This matrix does not show which "
            "cards are near."
        )
    far = [one.gpu for one in placement.nics if one.link in ("SYS", "SOC")]
    if far:
        lines.append(
            f"{', '.join(far)}: every network card is on another NUMA node; sends between hosts "
            "cross between CPUs."
        )
    return lines


def _slower_sentence(slow: SlowPairs, topology: Topology) -> str:
    pairs = combinations(topology.gpus, 2)
    best = max((topology.link_between(*pair) for pair in pairs), key=goodness)
    return (
        f"An all-reduce of a large array between two of them takes at least "
        f"{slow.times_slower:.2g} times as long as over {best}, by the catalog's rates of a PCIe "
        "slot and of that bond."
    )


def gpu_line(gpu: GpuState) -> str:
    """Describe a GPU's current links, clocks, power and slowdowns. Unknown values are omitted.

    An idle GPU has low clocks and a slow PCIe link, to save power.
    """
    parts = [
        _with_maximum("PCIe {}", gpu.pcie_generation, gpu.pcie_generation_max)
        + _with_maximum(" ×{}", gpu.pcie_width, gpu.pcie_width_max),
        "" if gpu.nvlinks is None else f"{gpu.nvlinks_active} of {gpu.nvlinks} NVLinks up"
        if gpu.nvlinks else "no NVLink",
        _with_maximum("{} MHz", _to_mega(gpu.sm_clock_hz), _to_mega(gpu.sm_clock_max_hz)),
        _with_maximum("{} W", _to_whole(gpu.power_w), _to_whole(gpu.power_limit_w), "a limit of "),
    ]  # fmt: skip
    default = gpu.power_limit_default_w
    if default is not None and gpu.power_limit_w is not None and gpu.power_limit_w < default:
        parts.append(f"power limit below the card's default of {default:.0f} W")
    if gpu.throttled_by is not None:
        parts.append(
            f"slowed by {', '.join(gpu.throttled_by)}" if gpu.throttled_by else "not slowed"
        )
    state = ", ".join(part for part in parts if part.strip())
    return f"GPU{gpu.index} {gpu.name or '(name unknown)'}: {state or 'no state from the driver'}."


def _with_maximum(form: str, value: int | None, maximum: int | None, limit: str = "") -> str:
    """Format a value and its maximum, such as '1410 of 1980 MHz'; '' if the value is unknown."""
    if value is None:
        return ""
    both = (
        f"{value} of {limit}{maximum}"
        if maximum is not None and (limit or maximum != value)
        else str(value)
    )
    return form.format(both)


def _to_mega(hertz: float | None) -> int | None:
    return None if hertz is None else round(hertz / 1e6)


def _to_whole(number: float | None) -> int | None:
    return None if number is None else round(number)


def link_faults(placement: Placement, topology: Topology) -> list[str]:
    """Return sentences on NVLinks that are missing, or on why `topology` cannot tell."""
    if topology.pcie_only:
        return [
            "This matrix is from `nvidia-smi topo -mp`, which leaves NVLinks out, so it is "
            "unknown whether NVLinks connect these GPUs. Save `nvidia-smi topo -m`."
        ]
    missing, count = placement.missing, len(topology.gpus)
    if missing is None:
        return []
    have = join_or(missing.links)
    others = f"the other {count - len(missing.gpus)} GPUs"
    lines = []
    if missing.gpus:
        names = ", ".join(missing.gpus)
        lost = not any(map(nvlinks, missing.links))
        verb = "has" if len(missing.gpus) == 1 else "have"
        lines.append(
            f"{names} {verb} {'no NVLink' if lost else 'fewer NVLinks'} ({have} instead of "
            f"{missing.usual}, which {others} have among them)."
        )
    if missing.pairs:
        pairs = ", ".join(f"{a}–{b}" for a, b in missing.pairs[:_PAIRS_SHOWN])
        more = len(missing.pairs) - _PAIRS_SHOWN
        lines.append(
            f"{pairs}{f' and {more} more' if more > 0 else ''}: {have} instead of {missing.usual}, "
            "which the other pairs have."
        )
    slowest = "PCIe" if not nvlinks(missing.links[-1]) else f"the rate of {missing.links[-1]}"
    lines.append(
        f"An all-reduce over all {count} drops to {slowest}. Usually a link or GPU has failed: "
        "see `nvidia-smi nvlink --status`, `outpace doctor` and the kernel's log (Xid)."
    )
    return lines


def _tensor_parallel_sentence(placement: Placement, topology: Topology) -> str:
    best, count = placement.tensor_parallel, len(topology.gpus)
    if best is None and topology.pcie_only:
        return "Without NVLink, no two of these GPUs are connected by a PCIe switch."
    if best is None:
        pair = placement.groupings[0]
        return (
            "No group is connected by NVLink or a PCIe switch, so tensor parallelism would "
            "send through the CPU in every layer. Prefer pipeline or data parallelism; if you need "
            f"tensor parallelism, the best pairs are {_format_groups(pair)} ({pair.worst_link}, "
            f"{meaning(pair.worst_link)}). (If the matrix is from topo -mp, it leaves NVLinks "
            "out: save topo -m.)"
        )
    rate = ""
    if best.link_bytes_per_s is not None:
        rate = f", {show_count(best.link_bytes_per_s, 'B/s')} each way"
    if best.size == count:
        return f"Tensor parallelism: up to all {count} GPUs, connected by {best.worst_link}{rate}."
    left = f" {', '.join(best.left_out)} in none;" if best.left_out else ""
    return (
        f"Tensor parallelism: up to {best.size} GPUs, within {_format_groups(best)} (at worst "
        f"{best.worst_link}{rate});{left} data or pipeline parallelism between them."
    )


def _format_groups(grouping: Grouping) -> str:
    return " ".join("{" + " ".join(group) + "}" for group in grouping.groups)


def cpu_text(cpu: CpuTopology) -> Group:
    """Show a host's packages, cores, NUMA nodes and caches."""
    threads = cpu.cpu_count
    parts = [f"{threads} CPUs ({cpu.cpus})"]
    if cpu.cores:
        parts.append(f"{cpu.cores} cores" + ("" if cpu.cores == threads else " with hyper-threads"))
    if cpu.packages:
        parts.append(f"{cpu.packages} package{'s' if cpu.packages > 1 else ''}")
    lines = ["; ".join(parts) + "."]
    for node in cpu.numa:
        line = (
            f"NUMA node {node.number}: CPUs {node.cpus or 'none'}, {show_bytes(node.memory_bytes)}"
        )
        if len(cpu.numa) > 1:
            line += f", distances {' '.join(map(str, node.distances))}"
        lines.append(line + ".")
    caches = [
        f"L{one.level}{'' if one.kind == 'Unified' else one.kind[0].lower()} {one.count} × "
        f"{show_bytes(one.cache_bytes)}"
        + (f" (each for {one.shared_by} CPUs)" if one.shared_by > 1 else "")
        for one in cpu.caches
    ]
    if caches:
        lines.append(f"Caches: {', '.join(caches)}.")
    return Group(*(Text(line) for line in lines))
