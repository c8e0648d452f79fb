"""Device and links of a machine, from the catalog or from a probe."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from outpace.catalog import efficiency
from outpace.catalog.accelerators import ACCELERATORS, find_accelerator
from outpace.catalog.links import LINKS
from outpace.catalog.processors import flops_per_cycle
from outpace.catalog.references import Kind, references
from outpace.planner.calibration.fit_rates import RateFit, SeenStep, calibrate, steps_s
from outpace.planner.hardware.device import DeviceRates, MeasuredMatmul, matmul_s, of_accelerator
from outpace.planner.hardware.links import Fabric, Protocol
from outpace.planner.hardware.networks import of_node
from outpace.planner.model.outline import outline
from outpace.planner.plan_columns import of_plans
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.records.errors import BadInputError
from outpace.records.estimate import RateSource
from outpace.records.figure import Figure, Key
from outpace.records.hardware import Accelerator, Architecture, Bundle, Node
from outpace.records.host_rates import HostRates
from outpace.records.machine import Machine
from outpace.records.network import Network
from outpace.records.probed import ProbeRecord
from outpace.records.units import show_share


@dataclass(frozen=True)
class Cluster:
    """Equal nodes with their known rates and properties.

    `probed`: the rates were measured; `calibrated`: also with complete steps. `residuals` are the
    ratios of measured to predicted times of those steps, if rates are not fitted to them.

    `loader_tokens_per_s` is a node's data loading rate; infinite if it was not probed. `host_bytes`
    is the host memory that devices may offload to; None if it is unknown, or if the host is the
    device.
    """

    name: str
    nodes: int
    device: DeviceRates
    fabric: Fabric
    probed: bool
    notes: tuple[str, ...] = ()
    loader_tokens_per_s: float = math.inf
    calibrated: bool = False
    residuals: tuple[float, ...] = ()
    host_bytes: int | None = None

    @property
    def devices(self) -> int:
        """Return the number of devices on all nodes."""
        return self.nodes * self.fabric.per_node

    @property
    def guessed(self) -> bool:
        """Return whether the rates come neither from the catalog's measurements nor from steps."""
        return not self.calibrated and not self.device.peak_flops_per_s

    @property
    def source(self) -> RateSource:
        """Return the origin of the rates."""
        return "probed" if self.probed else "guessed" if self.guessed else "catalog"


# Without probed collectives: gloo copies into and out of its buffers.
_GLOO_BYTES_PER_S, _GLOO_LATENCY_S = 2e9, 200e-6
# Typical network of machines with such accelerators, one card for each.
DEFAULT_NETWORKS: Mapping[Architecture, str] = MappingProxyType(
    {
        "pascal": "InfiniBand EDR",
        "volta": "InfiniBand EDR",
        "turing": "InfiniBand EDR",
        "ampere": "InfiniBand HDR",
        "ada": "InfiniBand EDR",
        "hopper": "InfiniBand NDR",
        "blackwell": "InfiniBand NDR",
        "cdna2": "Slingshot 11",
        "cdna3": "InfiniBand NDR",
        "cdna4": "InfiniBand NDR",
        "apple": "Ethernet 10",
    }
)
# A direct link between two of n devices has an equal share of each device's links.
_DIRECT = ("mesh", "cube-mesh", "pairs")


def of_catalog(
    node: Node, nodes: int, network: Network | None = None, devices: int | None = None
) -> Cluster:
    """Return a machine of the catalog. `network` replaces the total network of a node.

    `devices` is the number used per node; None means all.

    Raises BadInputError for a machine without accelerators, or for several nodes without a network.
    """
    chip = ACCELERATORS.get(node.accelerator or "")
    if chip is None:
        raise BadInputError(
            f"machine {node.name} has no accelerator from the catalog, so its rates are not known. "
            "Measure it with outpace probe --out machine.json, and use --machine machine.json."
        )
    if nodes > 1 and not chip.has_collectives:
        raise BadInputError(
            f"{nodes} nodes of {node.name}: torch has no collectives for Apple's GPUs, so a Mac "
            "trains alone. Leave --nodes out, or name another machine."
        )
    across = network or of_node(node)
    notes: tuple[str, ...] = () if node.assumed is None else (node.assumed,)
    assumed = across is None
    across = across or default_network(node)
    if nodes > 1 and assumed:
        notes += (assumed_network_note(node, across),)
    fabric = _fabric(node, node.processes, across)
    return Cluster(
        name=node.name,
        nodes=nodes,
        device=of_accelerator(chip),
        fabric=fabric if devices is None else _use_devices(fabric, node, devices),
        probed=False,
        notes=notes,
        host_bytes=0 if chip.shares_host_memory else node.host_memory_bytes,
    )


def assumed_network_note(node: Node, network: Network) -> str:
    """Return the note on a network that is assumed for a machine."""
    several = f" A node is then one device: if yours have 8, use --machine 8x{node.name}."
    return (
        f"{node.name} is sold without network cards: {network.name} is assumed. Name another with "
        "--network, such as --network 8xinfiniband-ndr." + several * (node.processes == 1)
    )


def default_network(node: Node) -> Network:
    """Return one network card per device, which machines with such accelerators usually have."""
    chip = ACCELERATORS[node.accelerator or ""]
    link = LINKS[DEFAULT_NETWORKS[chip.architecture]]
    return Network(
        name=f"{node.processes} × {link.name}",
        bytes_per_s=link.bytes_per_s * node.processes,
        origin="catalog",
        source=link.source,
    )


def _fabric(node: Node, per_node: int, network: Network | None) -> Fabric:
    link = node.device_link or Bundle(link=node.host_link or "PCIe 4 x16", count=1)
    kind = LINKS[link.link].kind
    whole = LINKS[link.link].bytes_per_s * link.count
    share = efficiency.LINK_SHARE[kind]
    if node.topology == "none" and per_node > 1:
        # Through the host: to it and from it, over a bridge that all devices share.
        share = efficiency.HOST_BRIDGE_SHARE
    elif node.topology == "pairs":
        share = efficiency.BRIDGE_SHARE
    direct = node.topology in _DIRECT and per_node > 2
    pair = whole / (per_node - 1) if direct else whole
    slow = kind == "pcie" or node.topology == "none"
    across_share = 1.0 if network is None else network_share(network)
    across = 0.0 if network is None else network.bytes_per_s * across_share
    protocols = [
        Protocol(one.base_s, one.pcie_s if slow else one.nvlink_s, one.network_s, one.bandwidth,
                 one.by_size)
        for one in (*efficiency.NCCL.values(), *efficiency.NCCL_TREES.values())
    ]  # fmt: skip
    dispatch = _dispatch_rate(node, share, across_share) if kind == "nvlink" else None
    return Fabric(
        per_node=per_node,
        inside_bytes_per_s=whole * share if per_node > 1 else math.inf,
        across_bytes_per_s=across or math.inf,
        pair_bytes_per_s=pair * share if per_node > 1 else math.inf,
        protocols=tuple(protocols),
        sources=(
            efficiency.LINK_SOURCE,
            efficiency.NCCL_SOURCE,
            efficiency.GROUP_SOURCE,
            efficiency.ALL_TO_ALL_SOURCE,
            *(() if dispatch is None else (dispatch.source,)),
        ),
        gather_share=1.0 if slow else efficiency.GATHER_SHARE,
        scatter_share=1.0 if slow else efficiency.SCATTER_SHARE,
        group_shares={} if slow else efficiency.GROUP_SHARE,
        all_to_all_share=efficiency.ALL_TO_ALL_SHARE / share if kind == "nvlink" else 1.0,
        all_to_all_network_share=efficiency.ALL_TO_ALL_NETWORK_SHARE / across_share,
        dispatch=dispatch,
    )


def _dispatch_rate(node: Node, share: float, across_share: float) -> efficiency.DispatchRate:
    """Return a dispatcher's rate, with shares relative to the rate that a ring reaches."""
    found = efficiency.dispatch_rate(ACCELERATORS[node.accelerator or ""])
    return found.model_copy(
        update={"link_share": found.link_share / share,
                "card_share": found.card_share / across_share}
    )  # fmt: skip


def _use_devices(fabric: Fabric, node: Node, devices: int) -> Fabric:
    """Return the links between some of a node's devices; in a mesh, only the links among them."""
    found = replace(fabric, per_node=devices)
    if node.topology != "mesh" or node.device_link is None or devices == 1:
        return found
    links, others = node.device_link.count, node.processes - 1
    if links % others:  # unequal numbers of links
        return found
    return replace(found, inside_bytes_per_s=fabric.inside_bytes_per_s * (devices - 1) / others)


def of_probe(machine: Machine, ranks: int) -> Cluster:
    """Return a machine as `outpace probe` measured it, for `ranks` processes on each of its hosts.

    For unstable figures, the median of their samples is used and a note says so. Raises
    BadInputError if a necessary figure was not probed.
    """
    probed = machine.probed
    if probed is None:
        raise BadInputError(
            "this machine.json has no measurements. Make one with outpace probe --out machine.json."
        )
    known = _ProbeFigures(probed)
    chip = None
    if machine.devices:
        chip = find_accelerator(machine.devices[0].name, machine.devices[0].memory_bytes)
    device = _probed_device(machine, known, ranks, chip)
    rates = RateFit(device, _probed_fabric(known, ranks, device.kind))
    world = ranks * probed.hosts
    seen = list(_reference_steps(known, world, rates.device.kind))
    said: list[str] = []
    residuals: tuple[float, ...] = ()
    if seen and chip is not None:
        residuals = _residuals(rates, seen)
        said = [
            f"its rates of matmuls, memory and launches are measured; {len(seen)} steps of the "
            f"probe differ by {show_share(_median_off(residuals))} in the median, and widen the "
            "range"
        ]
    elif seen:
        found = calibrate({world: _with_all_rates(rates)}, seen)
        rates = found.rates[world]
        said = [
            f"its rates are those that predict {len(seen)} steps of the probe best, with a median "
            f"error of {show_share(found.off)}"
        ]
    return Cluster(
        name=machine.cpu if not machine.devices else machine.devices[0].name,
        nodes=probed.hosts,
        device=rates.device,
        fabric=rates.fabric,
        probed=True,
        notes=(*said, *known.notes),
        loader_tokens_per_s=known.loader_tokens_per_s(ranks, machine.host_cores),
        calibrated=bool(seen),
        residuals=residuals,
        host_bytes=machine.host_memory_bytes if machine.devices else None,
    )


def _residuals(rates: RateFit, seen: Sequence[SeenStep]) -> tuple[float, ...]:
    """Return the ratio of measured to predicted time of each step."""
    found = []
    for one in seen:
        question = StepTimeQuestion(one.outline, one.seq_len, rates.device, rates.fabric)
        columns = of_plans([one.plan], one.global_batch, one.outline.layers)
        found.append(one.step_time_s / float(steps_s(question, columns)[0]))
    return tuple(found)


def _median_off(residuals: Sequence[float]) -> float:
    """Return the median relative error of steps."""
    return math.expm1(statistics.median(abs(math.log(ratio)) for ratio in residuals))


def _probed_fabric(known: "_ProbeFigures", ranks: int, kind: Kind) -> Fabric:
    probed = known.probed
    inside, across = probed.inside_bytes_per_s(), probed.node_network_bytes_per_s()
    fit = probed.fit("all-reduce", "all") or probed.fit("all-reduce", "node")
    latency = known.value_of(fit.latency) if fit is not None else None
    carried = inside or (known.value_of(fit.bandwidth) if fit is not None else None)
    rate = carried or _GLOO_BYTES_PER_S
    each = (latency or _GLOO_LATENCY_S) / 2
    protocol = Protocol(each, each, 1e-3, 1.0)
    found = Fabric(ranks, rate, across or rate, rate, (protocol,), ("outpace probe",))
    return _by_gloo(found) if kind == "cpu" else found


def _by_gloo(fabric: Fabric) -> Fabric:
    """Double the reduce-scatter's rounds: gloo sums the whole array on every rank (torch 2.13)."""
    return replace(fabric, scatter_rounds=2)


def _with_all_rates(rates: RateFit) -> RateFit:
    """Add rates that the catalog lacks for accelerators, for measured steps to correct."""
    device = rates.device
    if device.kind == "cpu":
        return rates
    low = device.rate("bf16")
    attention = {"bf16": low, "fp32": min(low, device.rate("fp32"))}
    device = replace(device, unit_s=efficiency.CUDA_UNIT_S, attention_rates=attention)
    return replace(rates, device=device)


def _reference_steps(known: "_ProbeFigures", ranks: int, kind: Kind) -> Iterator[SeenStep]:
    """Yield this version's reference steps on `ranks` ranks of all hosts."""
    catalog = references(ranks, kind)
    for figure in known.probed.figures:
        key = figure.key
        one = catalog.get(str(key.of.get("reference")))
        if key.kind != "step" or one is None or not key.has(ranks=ranks, device=kind):
            continue
        if key.of.get("digest", one.digest) != one.digest:
            continue
        step_time_s = known.value_of(figure)
        if step_time_s:
            model = outline(one.spec, "reference")
            yield SeenStep(model, one.seq_len, one.global_batch, one.plan, step_time_s)


_GUESSED = (
    "this CPU's rates are guessed from its vector width. For a reliable plan, measure first: "
    "outpace probe --out machine.json."
)
_BRIEFLY = (
    "rates of matmuls and of memory were measured in a few seconds; everything else is guessed. "
    "For a reliable plan, measure first: outpace probe --out machine.json."
)


def of_host(machine: Machine, ranks: int, measured: HostRates | None = None) -> Cluster:
    """Return a host that was not probed: its accelerators from the catalog, or a guess.

    A CPU's rates are those `measured` for its cores, or guessed from its vector width. Raises
    BadInputError for an accelerator that is not in the catalog.
    """
    if machine.devices:
        first = machine.devices[0]
        chip = find_accelerator(first.name, first.memory_bytes)
        if chip is None:
            raise BadInputError(
                f"{first.name} is not in the catalog, so its rates are not known. Measure it: "
                "outpace probe --out machine.json."
            )
        node = Node(name=chip.name, accelerator=chip.name, devices=ranks, host_link=chip.host_link,
                    source="this host")  # fmt: skip
        found = of_catalog(node, 1)
        held = first.memory_bytes or found.device.memory_bytes
        device = replace(found.device, memory_bytes=held)
        return replace(found, device=device, host_bytes=machine.host_memory_bytes)
    each = machine.host_cores / ranks * efficiency.CPU_CLOCK_HZ * efficiency.CPU_SHARE
    rates = {}
    for dtype in ("fp32", "bf16"):
        span = flops_per_cycle(machine.cpu_features, dtype)
        if span is not None:
            rates[dtype] = span.least * each
    rate = efficiency.CPU_MEMORY_BYTES_PER_S / ranks
    if measured is not None:
        rates = {dtype: value / ranks for dtype, value in measured.flops_per_s.items()}
        rate = measured.memory_bytes_per_s / ranks
    device = _cpu(machine, ranks, rates or {"fp32": 8 * each}, rate, ())
    protocol = Protocol(150e-6, 150e-6, 1e-3, 1.0)
    return Cluster(
        name=machine.cpu,
        nodes=1,
        device=device,
        fabric=_by_gloo(Fabric(ranks, rate / 4, rate / 4, rate / 4, (protocol,), ())),
        probed=False,
        notes=(_GUESSED if measured is None else _BRIEFLY,),
    )


class _ProbeFigures:
    """Figures of a probe, by what they measure."""

    def __init__(self, probed: ProbeRecord) -> None:
        self.probed = probed
        self._unstable: set[Key] = set()

    def value_of(self, figure: Figure | None) -> float | None:
        """Return a figure's value; if it is unstable, the median of its measurements."""
        if figure is None:
            return None
        if figure.value is None and figure.samples:
            self._unstable.add(figure.key)
            return statistics.median(figure.samples)
        return figure.value

    def matmuls(self, dtype: str) -> dict[float, float]:
        """Return the best FLOP/s of nearly square matmuls for each number of FLOPs."""
        best: dict[float, float] = {}
        for figure in self.probed.figures:
            key = figure.key
            if key.kind != "matmul" or key.what not in ("candidate", "curve", "best"):
                continue
            sizes = [key.of.get(name) for name in "mnk"]
            rate = self.value_of(figure)
            if key.has(dtype=dtype) and rate and all(isinstance(size, int) for size in sizes):
                flops = 2.0 * math.prod(int(size) for size in sizes if size is not None)
                best[flops] = max(best.get(flops, 0.0), rate)
        return best

    def matmul_points(self, dtype: str) -> dict[tuple[int, int, int], float]:
        """Return the seconds of each measured matmul, by its dimensions."""
        found: dict[tuple[int, int, int], list[float]] = {}
        for figure in self.probed.figures:
            key = figure.key
            sides = tuple(key.of.get(name) for name in "mnk")
            if key.kind != "matmul" or not key.has(dtype=dtype):
                continue
            rate = self.value_of(figure)
            if rate and all(isinstance(side, int) for side in sides):
                m, n, k = (int(side) for side in sides if side is not None)
                found.setdefault((m, n, k), []).append(2.0 * m * n * k / rate)
        return {shape: statistics.median(seconds) for shape, seconds in found.items()}

    def launch_s(self) -> float | None:
        """Return the time to launch an operator, in seconds: the time of the smallest matmuls."""
        small = [
            seconds
            for dtype in _DTYPES
            for sides, seconds in self.matmul_points(dtype).items()
            if max(sides) <= _SMALL_SIDE
        ]
        return statistics.median(small) if small else None

    def memory_bytes_per_s(self, what: str) -> float | None:
        """Return the rate of one kind of memory access, for the largest array."""
        own = [f for f in self.probed.figures if (f.key.kind, f.key.what) == ("memory", what)]
        return self.value_of(max(own, key=lambda f: f.key.number("bytes"), default=None))

    def pinned_bytes_per_s(self) -> float | None:
        """Return the rate of copies between pinned memory and device, the slower direction."""
        rates = [
            self.value_of(f) for f in self.probed.figures
            if f.key.kind == "memory" and f.key.what in ("to device", "to host")
            and f.key.has(memory="pinned")
        ]  # fmt: skip
        return min((rate for rate in rates if rate), default=None)

    def loader_tokens_per_s(self, ranks: int, cores: int) -> float:
        """Return the tokens/s that the loaders of `ranks` ranks reach at most; infinite if unknown.

        Loaders were probed one at a time; several reach the same speed as long as each worker has a
        core.
        """
        found = []
        for figure in self.probed.figures:
            key, rate = figure.key, self.value_of(figure)
            if (key.kind, key.what) == ("loader", "tokens") and key.has(loader="outpace") and rate:
                at_once = cores / max(1, key.number("workers"))
                found.append(rate * max(1.0, min(ranks, at_once)))
        return max(found, default=math.inf)

    @property
    def notes(self) -> list[str]:
        """Return notes on the figures for the user."""
        if not self._unstable:
            return []
        return [
            f"{len(self._unstable)} figures of the probe were not stable; the median of their "
            "samples is used. For a better plan, probe again on a quiet machine."
        ]


def _probed_device(
    machine: Machine, known: _ProbeFigures, ranks: int, chip: Accelerator | None
) -> DeviceRates:
    """Return the catalog's device with measured rates; a CPU's cores are shared by the ranks."""
    curves = {dtype: known.matmuls(dtype) for dtype in _DTYPES}
    best = {dtype: max(points.values()) for dtype, points in curves.items() if points}
    if not best:
        raise BadInputError(
            "this machine.json has no matmuls. Probe them: outpace probe matmul --out "
            "machine.json, or outpace probe all."
        )
    copies = [f for f in known.probed.figures if (f.key.kind, f.key.what) == ("memory", "copy")]
    largest = max(copies, key=lambda f: f.key.number("bytes"), default=None)
    memory = known.value_of(largest)
    if chip is not None:
        return _measured_accelerator(machine, known, chip, memory)
    main = max(curves, key=lambda dtype: len(curves[dtype]))
    curve = sorted((flops, rate / best[main]) for flops, rate in curves[main].items())
    if machine.devices:
        return _unknown(machine, best, memory, tuple(curve))
    share = 1 / ranks
    rates = {dtype: value * share for dtype, value in best.items()}
    found = _cpu(machine, ranks, rates, (memory or 10e9) * share, tuple(curve))
    disk = known.value_of(known.probed.find("storage", "sequential write"))
    return found if disk is None else replace(found, disk_bytes_per_s=disk)


_DTYPES = ("fp32", "bf16", "fp16", "tf32", "fp8")
_EVEN = 8  # 16-bit numbers, so that rows are multiples of 16 bytes
_SMALL_SIDE = 64  # size of matmuls that take as long as their launch


def _measured_accelerator(
    machine: Machine, known: _ProbeFigures, chip: Accelerator, memory: float | None
) -> DeviceRates:
    """Return the catalog's device with measured rates instead of typical ones.

    Measured matmuls correct the predictions for similar shapes, unaligned rows get the measured
    rate, and a launch takes as long as the smallest matmul.
    """
    base = of_accelerator(chip)
    launch_s = known.launch_s()
    ratios, unaligned = _compare_matmuls(base, known, 2 * (launch_s or 0.0))
    rate = memory or base.memory_bytes_per_s
    adamw = known.memory_bytes_per_s("AdamW step")
    return replace(
        base,
        memory_bytes=machine.devices[0].memory_bytes or base.memory_bytes,
        measured_ratios=ratios,
        unaligned=statistics.geometric_mean(unaligned) if unaligned else base.unaligned,
        memory_bytes_per_s=rate,
        optimizer_share=min(adamw / rate, 1.0) if adamw else base.optimizer_share,
        operator_s=launch_s or base.operator_s,
        host_bytes_per_s=known.pinned_bytes_per_s() or base.host_bytes_per_s,
        sources=("outpace probe", *base.sources),
    )


def _compare_matmuls(
    base: DeviceRates, known: _ProbeFigures, least_s: float
) -> tuple[dict[str, tuple[MeasuredMatmul, ...]], list[float]]:
    """Return the ratios of measured to predicted time by dtype, and the rates of unaligned rows.
    Matmuls shorter than `least_s` are limited by their launch and ignored.
    """
    ratios, unaligned = {}, []
    for dtype in _DTYPES:
        even = []
        for (m, n, k), seconds in known.matmul_points(dtype).items():
            if n % _EVEN or k % _EVEN:  # by tiles, without the cost of unaligned rows
                unaligned.append(_by_tiles(replace(base, unaligned=1.0), dtype, m, n, k) / seconds)
            elif seconds > least_s:
                took = _by_tiles(base, dtype, m, n, k)
                even.append((float(m), float(n), float(k), seconds / took))
        if even and dtype in base.best_flops_per_s:
            ratios[dtype] = tuple(even)
    return ratios, unaligned


def _by_tiles(device: DeviceRates, dtype: str, m: int, n: int, k: int) -> float:
    """Return the time of a matmul at the catalog's rates, s."""
    item = np.array([{"fp32": 4.0, "tf32": 4.0}.get(dtype, 2.0)])
    one, other, inner = (np.array([float(side)]) for side in (m, n, k))
    rate = np.array([device.rate(dtype)])
    return float(matmul_s(device, rate, one, other, inner, item)[0])


def _unknown(
    machine: Machine,
    rates: dict[str, float],
    bytes_per_s: float | None,
    curve: tuple[tuple[float, float], ...],
) -> DeviceRates:
    """Return an accelerator that the catalog lacks, with measured rates, or typical ones."""
    if bytes_per_s is None:
        raise BadInputError(
            f"{machine.devices[0].name} is not in the catalog, and this machine.json does not say "
            "how fast its memory is. Probe it: outpace probe memory --out machine.json."
        )
    attention, share = efficiency.ATTENTION["ampere"]["flash2"], efficiency.MATMULS["ampere"].share
    first = machine.devices[0]
    return replace(
        _measured_cluster(first.name, first.memory_bytes, rates, bytes_per_s, curve),
        kind="cuda",
        operator_s=efficiency.OPERATOR_S,
        attention_forward=attention.forward / share,
        attention_backward=attention.backward / share,
        attention_narrow=attention.narrow,
        host_bytes_per_s=LINKS["PCIe 4 x16"].bytes_per_s * efficiency.HOST_LINK_SHARE,
        host_memory_bytes_per_s=efficiency.HOST_MEMORY_BYTES_PER_S,
        sources=("outpace probe", attention.source, efficiency.OPERATOR_SOURCE),
    )


def _cpu(
    machine: Machine,
    ranks: int,
    rates: dict[str, float],
    bytes_per_s: float,
    curve: tuple[tuple[float, float], ...],
) -> DeviceRates:
    """Return the rates of one of `ranks` processes that share a host's cores and memory."""
    share = machine.host_memory_bytes // ranks
    found = _measured_cluster(machine.cpu, share, rates, bytes_per_s, curve)
    # The same cores communicate and compute.
    sharers = max(1.0, ranks / machine.host_cores)
    # Its attention is no faster in 16 bits than in fp32 (docs/development/log.md).
    rate = found.rate("fp32")
    return replace(
        found, hides=0.0, sharers=sharers, unit_s=efficiency.CPU_UNIT_S, piecewise=True,
        attention_rates={"fp32": rate, "bf16": rate},
    )  # fmt: skip


def _measured_cluster(
    name: str,
    memory_bytes: int | None,
    rates: dict[str, float],
    bytes_per_s: float,
    curve: tuple[tuple[float, float], ...],
) -> DeviceRates:
    """Return a machine whose device has no known tiles; a CPU unless the caller changes that."""
    return DeviceRates(
        name=name,
        kind="cpu",
        memory_bytes=memory_bytes,
        peak_flops_per_s={},
        best_flops_per_s=rates,
        multiprocessors=1,
        tiles=((64, 64, 1.0),),
        fixed_s=0.0,
        memory_bytes_per_s=bytes_per_s,
        operator_s=efficiency.CPU_OPERATOR_S,
        attention_forward=0.5,
        attention_backward=0.5,
        attention_narrow=1.0,
        host_bytes_per_s=bytes_per_s,
        host_memory_bytes_per_s=bytes_per_s,
        disk_bytes_per_s=efficiency.DISK_BYTES_PER_S,
        curve=curve,
        sources=("outpace probe" if curve else "vector width", efficiency.CPU_OPERATOR_SOURCE),
    )


def network_share(network: Network) -> float:
    """Return the fraction of its nominal rate that a network reaches, by kind of link."""
    if network.origin == "measured":
        return 1.0
    for link in LINKS.values():
        if link.name in network.name:
            return efficiency.LINK_SHARE[link.kind]
    return efficiency.LINK_SHARE["ethernet"]
