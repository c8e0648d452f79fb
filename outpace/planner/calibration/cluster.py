"""A machine's device and link rates, from the catalog or from a probe."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from outpace.catalog import collective_rates, efficiency
from outpace.catalog.accelerators import ACCELERATORS, find_accelerator
from outpace.catalog.links import LINKS
from outpace.catalog.processors import flops_per_cycle
from outpace.catalog.references import Kind, references
from outpace.planner.calibration.fit_rates import RateFit, SeenStep, calibrate, steps_s
from outpace.planner.calibration.probed_device import ProbeFigures, cpu_device, probed_device
from outpace.planner.hardware.device import DeviceRates, of_accelerator
from outpace.planner.hardware.links import Fabric, Protocol
from outpace.planner.hardware.networks import of_node
from outpace.planner.model.outline import outline
from outpace.planner.plan_columns import of_plans
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.records.errors import BadInputError
from outpace.records.estimate import RateSource
from outpace.records.hardware import Architecture, Bundle, Node
from outpace.records.host_rates import HostRates
from outpace.records.machine import Machine
from outpace.records.network import Network
from outpace.records.units import show_share


@dataclass(frozen=True)
class Cluster:
    """Identical nodes with their rates and properties.

    `probed`: the rates were measured. `calibrated`: complete steps were measured as well.
    `residuals`: those steps' ratios of measured to predicted time, if the rates were not fitted to
    them. `loader_tokens_per_s`: a node's data loading rate; infinite if it was not probed.
    `host_bytes`: the host memory available for offloading; None if it is unknown or if the host is
    the device.
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
        """Return whether the rates are guesses rather than published or measured."""
        return not self.calibrated and not self.device.peak_flops_per_s

    @property
    def source(self) -> RateSource:
        """Return the origin of the rates."""
        return "probed" if self.probed else "guessed" if self.guessed else "catalog"


# Assumed if no collectives were probed. Gloo copies into and out of its buffers.
_GLOO_BYTES_PER_S, _GLOO_LATENCY_S = 2e9, 200e-6
# Typical networks of machines with these accelerators, with one card per accelerator.
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
# Topologies in which each device divides its links equally among the other devices.
_DIRECT = ("mesh", "cube-mesh", "pairs")


def of_catalog(
    node: Node, nodes: int, network: Network | None = None, devices: int | None = None
) -> Cluster:
    """Return a machine from the catalog as a cluster of `nodes` nodes.

    `network` replaces the nodes' own network. `devices` is the number of devices to use per node;
    None means all.

    Raises BadInputError if the machine has no accelerator from the catalog, or if several nodes are
    requested and the accelerator has no collectives.
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
    fabric = _build_fabric(node, node.processes, across)
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
    """Return a note that names the network assumed for a machine without network cards."""
    several = f" Each node has one device. If yours have 8, use --machine 8x{node.name}."
    return (
        f"{node.name} is sold without network cards: {network.name} is assumed. Name another with "
        "--network, such as --network 8xinfiniband-ndr." + several * (node.processes == 1)
    )


def default_network(node: Node) -> Network:
    """Return the usual network for a node's accelerator, with one card per device."""
    chip = ACCELERATORS[node.accelerator or ""]
    link = LINKS[DEFAULT_NETWORKS[chip.architecture]]
    return Network(
        name=f"{node.processes} × {link.name}",
        bytes_per_s=link.bytes_per_s * node.processes,
        origin="catalog",
        source=link.source,
    )


def _build_fabric(node: Node, per_node: int, network: Network | None) -> Fabric:
    link = node.device_link or Bundle(link=node.host_link or "PCIe 4 x16", count=1)
    kind = LINKS[link.link].kind
    whole = LINKS[link.link].bytes_per_s * link.count
    share = collective_rates.LINK_SHARE[kind]
    if node.topology == "none" and per_node > 1:
        # Traffic passes through the host, over a bridge that all devices share.
        share = collective_rates.HOST_BRIDGE_SHARE
    elif node.topology == "pairs":
        share = collective_rates.BRIDGE_SHARE
    direct = node.topology in _DIRECT and per_node > 2
    pair = whole / (per_node - 1) if direct else whole
    slow = kind == "pcie" or node.topology == "none"
    across_share = 1.0 if network is None else network_share(network)
    across = 0.0 if network is None else network.bytes_per_s * across_share
    protocols = [
        Protocol(one.base_s, one.pcie_s if slow else one.nvlink_s, one.network_s, one.bandwidth,
                 one.by_size)
        for one in (*collective_rates.NCCL.values(), *collective_rates.NCCL_TREES.values())
    ]  # fmt: skip
    dispatch = _dispatch_rate(node, share, across_share) if kind == "nvlink" else None
    return Fabric(
        per_node=per_node,
        inside_bytes_per_s=whole * share if per_node > 1 else math.inf,
        across_bytes_per_s=across or math.inf,
        pair_bytes_per_s=pair * share if per_node > 1 else math.inf,
        protocols=tuple(protocols),
        sources=(
            collective_rates.LINK_SOURCE,
            collective_rates.NCCL_SOURCE,
            collective_rates.GROUP_SOURCE,
            collective_rates.ALL_TO_ALL_SOURCE,
            *(() if dispatch is None else (dispatch.source,)),
        ),
        gather_share=1.0 if slow else collective_rates.GATHER_SHARE,
        scatter_share=1.0 if slow else collective_rates.SCATTER_SHARE,
        group_shares={} if slow else collective_rates.GROUP_SHARE,
        all_to_all_share=collective_rates.ALL_TO_ALL_SHARE / share if kind == "nvlink" else 1.0,
        all_to_all_network_share=collective_rates.ALL_TO_ALL_NETWORK_SHARE / across_share,
        dispatch=dispatch,
    )


def _dispatch_rate(node: Node, share: float, across_share: float) -> collective_rates.DispatchRate:
    """Return the rates of dispatching tokens to experts, as fractions of the fabric's rates.

    The published fractions refer to nominal rates. The fabric's rates are already reduced to the
    fractions `share` within a node and `across_share` across nodes, so the published fractions are
    divided by these.
    """
    published = collective_rates.dispatch_rate(ACCELERATORS[node.accelerator or ""])
    return published.model_copy(
        update={"link_share": published.link_share / share,
                "card_share": published.card_share / across_share}
    )  # fmt: skip


def _use_devices(fabric: Fabric, node: Node, devices: int) -> Fabric:
    """Return the fabric of a node of which only `devices` devices are used.

    In a full mesh, every pair of devices has its own links, so those to unused devices are lost.
    """
    reduced = replace(fabric, per_node=devices)
    if node.topology != "mesh" or node.device_link is None or devices == 1:
        return reduced
    links, others = node.device_link.count, node.processes - 1
    if links % others:  # devices have unequal numbers of links
        return reduced
    return replace(reduced, inside_bytes_per_s=fabric.inside_bytes_per_s * (devices - 1) / others)


def of_probe(machine: Machine, ranks: int) -> Cluster:
    """Return a machine with the rates from `outpace probe`, for `ranks` processes per host.

    For an unstable figure, the median of its samples is used, and a note says so.

    Raises BadInputError if a required figure was not probed.
    """
    probed = machine.probed
    if probed is None:
        raise BadInputError(
            "this machine.json has no measurements. Measure with outpace probe --out machine.json."
        )
    known = ProbeFigures(probed)
    chip = None
    if machine.devices:
        chip = find_accelerator(machine.devices[0].name, machine.devices[0].memory_bytes)
    device = probed_device(machine, known, ranks, chip)
    rates = RateFit(device, _probed_fabric(known, ranks, device.kind))
    world = ranks * probed.hosts
    seen = list(_reference_steps(known, world, rates.device.kind))
    said: list[str] = []
    residuals: tuple[float, ...] = ()
    if seen and chip is not None:
        residuals = _time_ratios(rates, seen)
        said = [
            f"its rates of matmuls, memory and launches are measured; {len(seen)} steps of the "
            "probe differ from predictions by "
            f"{show_share(_median_relative_error(residuals))} in the median, "
            "which widens the interval"
        ]
    elif seen:
        found = calibrate({world: _fill_missing_rates(rates)}, seen)
        rates = found.rates[world]
        said = [
            f"its rates are fitted to {len(seen)} steps of the probe, with a median error of "
            f"{show_share(found.off)}"
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


def _time_ratios(rates: RateFit, steps: Sequence[SeenStep]) -> tuple[float, ...]:
    """Return each step's ratio of measured to predicted time."""
    ratios = []
    for step in steps:
        question = StepTimeQuestion(step.outline, step.seq_len, rates.device, rates.fabric)
        columns = of_plans([step.plan], step.global_batch, step.outline.layers)
        ratios.append(step.step_time_s / float(steps_s(question, columns)[0]))
    return tuple(ratios)


def _median_relative_error(ratios: Sequence[float]) -> float:
    return math.expm1(statistics.median(abs(math.log(ratio)) for ratio in ratios))


def _probed_fabric(figures: ProbeFigures, ranks: int, kind: Kind) -> Fabric:
    probed = figures.probed
    inside, across = probed.inside_bytes_per_s(), probed.node_network_bytes_per_s()
    fit = probed.fit("all-reduce", "all") or probed.fit("all-reduce", "node")
    latency = figures.value_of(fit.latency) if fit is not None else None
    carried = inside or (figures.value_of(fit.bandwidth) if fit is not None else None)
    rate = carried or _GLOO_BYTES_PER_S
    each = (latency or _GLOO_LATENCY_S) / 2
    protocol = Protocol(each, each, 1e-3, 1.0)
    fabric = Fabric(ranks, rate, across or rate, rate, (protocol,), ("outpace probe",))
    return _double_scatter_rounds(fabric) if kind == "cpu" else fabric


def _double_scatter_rounds(fabric: Fabric) -> Fabric:
    """Count two rounds per reduce-scatter, because gloo (torch 2.13) reduces whole arrays."""
    return replace(fabric, scatter_rounds=2)


def _fill_missing_rates(rates: RateFit) -> RateFit:
    """Fill in typical rates for an accelerator that is not in the catalog.

    The measured steps correct them later.
    """
    device = rates.device
    if device.kind == "cpu":
        return rates
    low = device.rate("bf16")
    attention = {"bf16": low, "fp32": min(low, device.rate("fp32"))}
    device = replace(device, unit_s=efficiency.CUDA_UNIT_S, attention_rates=attention)
    return replace(rates, device=device)


def _reference_steps(figures: ProbeFigures, ranks: int, kind: Kind) -> Iterator[SeenStep]:
    """Yield the measured reference steps of a probe on `ranks` ranks.

    Steps that this version of outpace defines differently are left out.
    """
    catalog = references(ranks, kind)
    for figure in figures.probed.figures:
        key = figure.key
        case = catalog.get(str(key.of.get("reference")))
        if key.kind != "step" or case is None or not key.has(ranks=ranks, device=kind):
            continue
        if key.of.get("digest", case.digest) != case.digest:
            continue
        step_time_s = figures.value_of(figure)
        if step_time_s:
            model = outline(case.spec, "reference")
            yield SeenStep(model, case.seq_len, case.global_batch, case.plan, step_time_s)


_GUESSED = (
    "this CPU's rates are guessed from its vector width. For a reliable plan, measure first: "
    "outpace probe --out machine.json."
)
_BRIEFLY = (
    "matmuls and memory were measured for a few seconds; all other rates are guessed. "
    "For a reliable plan, measure first: outpace probe --out machine.json."
)


def of_host(machine: Machine, ranks: int, measured: HostRates | None = None) -> Cluster:
    """Return the cluster of a host that was not probed.

    An accelerator gets the catalog's rates. A CPU gets the `measured` rates, or else rates guessed
    from its vector width. Raises BadInputError for an accelerator that is not in the catalog.
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
    device = cpu_device(machine, ranks, rates or {"fp32": 8 * each}, rate, ())
    protocol = Protocol(150e-6, 150e-6, 1e-3, 1.0)
    return Cluster(
        name=machine.cpu,
        nodes=1,
        device=device,
        fabric=_double_scatter_rounds(Fabric(ranks, rate / 4, rate / 4, rate / 4, (protocol,), ())),
        probed=False,
        notes=(_GUESSED if measured is None else _BRIEFLY,),
    )


def network_share(network: Network) -> float:
    """Return the fraction of its nominal rate that a network reaches; 1 if it was measured."""
    if network.origin == "measured":
        return 1.0
    for link in LINKS.values():
        if link.name in network.name:
            return collective_rates.LINK_SHARE[link.kind]
    return collective_rates.LINK_SHARE["ethernet"]
