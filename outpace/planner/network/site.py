"""The machine that `outpace network` considers, from the catalog, a probe, or both."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outpace.catalog.accelerators import ACCELERATORS, find_accelerator
from outpace.catalog.links import LINKS, bytes_per_s
from outpace.catalog.node_names import find_node
from outpace.planner.calibration.cluster import (
    Cluster,
    assumed_network_note,
    default_network,
    network_share,
    of_catalog,
    of_probe,
)
from outpace.planner.hardware.device import DeviceRates, dtype_of
from outpace.planner.hardware.networks import of_node, read_network
from outpace.planner.network.requirement import link_share
from outpace.records.errors import BadInputError
from outpace.records.figure import Figure, Key, Unit
from outpace.records.hardware import Accelerator, Node
from outpace.records.machine import Device, Machine
from outpace.records.network import Network
from outpace.records.plan import Checkpointing
from outpace.records.precisions import Precision
from outpace.records.probe_results import ProbeRecord

# Precisions, the simplest to train with first. The first of those about equally fast is used.
_MIXED: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
_ALIKE = 1.05
TOLERANCE = 0.05


@dataclass(frozen=True)
class NetworkQuestion:
    """A question about the network that a training run needs.

    - `machine`, `probe`: the machine, by a name in the catalog or by a file from outpace probe.
    - `networks`: descriptions of networks between nodes, such as the user types; the machine has
      the last one.
    - `inside`: the description of a device's link to others in its node.
    - `plan`: a file with the only plan to consider, whose sequence length and batch are the
      defaults. Without it, several strategies with `micro_batch` are compared.
    - `share`: the fraction of the catalog's peak FLOP/s that matmuls reach; None means the measured
      fraction, where published.
    - `tolerance`: the largest acceptable slowdown of a step by the network, as a fraction.
    """

    model: str
    machine: str | None = None
    probe: Path | None = None
    nodes: int = 1
    devices_per_node: int | None = None
    networks: Sequence[str] = ()
    inside: str | None = None
    plan: Path | None = None
    global_batch: int | None = None
    micro_batch: int = 1
    seq_len: int | None = None
    tp: int | None = None
    pp: int | None = None
    precision: Precision | None = None
    checkpointing: Checkpointing = "none"
    share: float | None = None
    tolerance: float = TOLERANCE


class Site:
    """The machine for which a network is chosen, described by the catalog, a probe, or both."""

    def __init__(self, asked: NetworkQuestion) -> None:
        self._asked = asked
        self.node: Node | None = None
        self.probe: Machine | None = None
        if asked.machine is None and asked.probe is None:
            raise BadInputError(
                "no machine is given. Name one from the catalog (--machine hgx-h100), or pass the "
                "file that `outpace probe --out` wrote (--probe machine.json)."
            )
        if asked.machine is not None:
            self.node = find_node(asked.machine)
        if asked.probe is not None:
            self.probe = Machine.load(asked.probe, option="--probe ")
        assumed = None if self.node is None else self.node.assumed
        self.notes: list[str] = [] if assumed is None else [assumed]
        self.nodes: int = asked.nodes
        self.per_node: int = asked.devices_per_node or self._count_devices()
        self.own = self._default_network()

    def _count_devices(self) -> int:
        if self.node is not None:
            return self.node.processes
        assert self.probe is not None
        if self.probe.devices or self._probe_record is None:
            return len(self.probe.devices) or 1
        if self._probe_record.ranks_per_host is None:
            raise BadInputError(
                f"{self._asked.probe} is from {self._probe_record.world_size} ranks on "
                f"{self._probe_record.hosts} hosts, not the same number on each. Give "
                "--devices-per-node."
            )
        return self._probe_record.ranks_per_host

    def _default_network(self) -> Network | None:
        if self._asked.networks:
            return read_network(self._asked.networks[-1])
        rate = None if self._probe_record is None else self._probe_record.node_network_bytes_per_s()
        if rate is not None:
            return Network(name="measured (all-reduce)", bytes_per_s=rate,
                           origin="measured", source="outpace probe")  # fmt: skip
        if self.node is None:
            return None
        own = of_node(self.node)
        if own is None and self.nodes > 1 and self.accelerator is not None:
            own = default_network(self.node)
            self.notes.append(assumed_network_note(self.node, own))
        return own

    @property
    def _probe_record(self) -> ProbeRecord | None:
        return None if self.probe is None else self.probe.probed

    @property
    def accelerator(self) -> Accelerator | None:
        """Return the accelerator; None on a CPU or if the catalog has no entry."""
        if self.node is not None:
            return ACCELERATORS.get(self.node.accelerator or "")
        first = self.probe.devices[0] if self.probe is not None and self.probe.devices else None
        return None if first is None else find_accelerator(first.name, first.memory_bytes)

    def cluster(self, precision: Precision) -> Cluster:
        """Return the machine as the planner's `Cluster`, with the links of this site.

        Raises BadInputError if the rates of the machine or of its links are unknown.
        """
        if precision == "fp64":
            raise BadInputError(
                "--precision fp64: no machine's fp64 rate is known, since fp64 is only used to "
                "verify strategies. Use the precision that you train in."
            )
        found = None
        if self.node is not None and self.accelerator is not None:
            found = of_catalog(self.node, self.nodes, None, self.per_node)
        if self.probe is not None:
            probed = of_probe(self._machine_with_devices(self.accelerator), self.per_node)
            found = probed if found is None else replace(found, device=probed.device)
        if found is None:
            assert self.node is not None
            raise BadInputError(
                f"the rates of {self.node.name} are unknown: it has no accelerator from the "
                "catalog. Measure it with outpace probe matmul memory --out machine.json, and name "
                "that file with --probe."
            )
        if self._asked.share is not None and self.probe is None:
            found = replace(found, device=self._use_share_of_peak(found.device, precision))
        link, fabric = self.device_network(), found.fabric
        told = link is None or link.origin != "catalog" or self._asked.inside is not None
        if told or self.node is None:
            inside = math.inf if link is None else link.bytes_per_s * link_share(link)
            fabric = fabric.with_rates(inside, fabric.across_bytes_per_s)
        across = math.inf if self.own is None else self.own.bytes_per_s * network_share(self.own)
        fabric = replace(fabric, per_node=self.per_node, across_bytes_per_s=across)
        return replace(found, nodes=self.nodes, fabric=fabric)

    def _machine_with_devices(self, chip: Accelerator | None) -> Machine:
        assert self.probe is not None
        if chip is None or self.probe.devices:
            return self.probe
        device = Device(name=chip.driver_name, memory_bytes=chip.usable_bytes)
        return self.probe.model_copy(update={"devices": (device,) * self.per_node})

    def _use_share_of_peak(self, device: DeviceRates, precision: Precision) -> DeviceRates:
        """Return the device with all matmuls at the requested fraction of the peak.

        Such a fraction describes a whole pass, so norms, memory traffic and launches take no
        additional time.
        """
        share = self._asked.share
        assert share is not None
        rates = {dtype: share * peak for dtype, peak in device.peak_flops_per_s.items()}
        own = rates.get(dtype_of(precision), share * device.rate(dtype_of(precision)))
        return replace(
            device, best_flops_per_s=rates, curve=((1.0, 1.0),), sustained=1.0, sustained_fp8=1.0,
            attention_forward=1.0, attention_backward=1.0, attention_narrow=1.0,
            attention_half=0.0, attention_kernels={},
            attention_rates={"bf16": own, "fp32": own},
            memory_bytes_per_s=math.inf, operator_s=0.0, fixed_s=0.0, unit_s=0.0,
        )  # fmt: skip

    def precision(self, asked: Precision | None) -> Precision:
        """Return the requested precision, or else the fastest whose matmuls were measured.

        If none was measured, the result is bf16 where the catalog says that the device supports it,
        else fp32. On a GPU, bf16 means bf16 with master weights, outpace's default there.
        """
        if asked is not None:
            return asked
        chip = self.accelerator
        on_gpu = chip is not None or (self.probe is not None and bool(self.probe.devices))
        low: Precision = "bf16-master" if on_gpu else "bf16"
        measured = self._measured_rates()
        if measured:
            best = max(measured.values())
            found = next(one for one in _MIXED if measured.get(one, 0.0) >= best / _ALIKE)
            return low if found == "bf16" else found
        return low if chip is not None and "bf16" in chip.peak.flops_per_s else "fp32"

    def _measured_rates(self) -> dict[Precision, float]:
        if self._probe_record is None:
            return {}
        best = {dtype: self._probe_record.best_rate(dtype) for dtype in _MIXED}
        return {dtype: figure.value for dtype, figure in best.items() if figure and figure.value}

    def rates(self, precision: Precision, device: DeviceRates) -> tuple[Figure, Figure]:
        """Return the matmul FLOP/s and memory bytes/s used for time estimates, with sources."""
        dtype, probed = dtype_of(precision), self._probe_record
        source = "outpace probe" if self.accelerator is None else self.accelerator.peak.source
        rate = None if probed is None else probed.best_rate(dtype)
        if rate is None or rate.value is None:
            rate = _figure("rate", dtype, "FLOP/s", device.rate(dtype) * device.sustained, source)
        chip = self.accelerator
        bytes_per_s = device.memory_bytes_per_s if chip is None else chip.memory_bytes_per_s
        memory = _figure("memory", "all", "B/s", bytes_per_s, source)
        copies = [] if probed is None else [
            figure for figure in probed.figures
            if (figure.key.kind, figure.key.what) == ("memory", "copy")
        ]  # fmt: skip
        # For the largest array, which exceeds all caches.
        return rate, max(copies, key=lambda figure: figure.key.number("bytes"), default=memory)

    def device_network(self) -> Network | None:
        """Return a device's link to others in its node, or None for a single device.

        Raises BadInputError if the link is unknown.
        """
        if self._asked.inside is not None:
            return read_network(self._asked.inside, "--inside ")
        if self.per_node == 1:
            return None
        measured = None if self._probe_record is None else self._probe_record.inside_bytes_per_s()
        if measured is not None:
            return Network(name="measured within the node", bytes_per_s=measured,
                           origin="measured", source="outpace probe")  # fmt: skip
        if self.node is not None and self.node.device_link is not None:
            bundle, rate = self.node.device_link, bytes_per_s(self.node.device_link)
            return Network(name=f"{bundle.count} × {bundle.link}", bytes_per_s=rate,
                           origin="catalog", source=LINKS[bundle.link].source)  # fmt: skip
        chip = self.accelerator
        link = None if self.node is None else self.node.host_link
        link = link or (None if chip is None else chip.host_link)
        if link is None:
            raise BadInputError(
                "the links within a node are not known. Measure them with outpace probe allreduce "
                "and use --probe machine.json, or give the rate of a device's link, as in --inside "
                "25GB/s."
            )
        return Network(name=link, bytes_per_s=LINKS[link].bytes_per_s, origin="catalog",
                       source=LINKS[link].source)  # fmt: skip


def _figure(kind: str, dtype: str, unit: Unit, value: float, source: str) -> Figure:
    key = Key(kind=kind, what="catalog", of={"dtype": dtype})
    return Figure(key=key, unit=unit, value=value, origin="catalog", source=source)
