"""Site of `outpace network`: a machine of the catalog, a probed one, or both."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outpace.catalog.accelerators import ACCELERATORS, find_accelerator
from outpace.catalog.links import LINKS, bytes_per_s
from outpace.catalog.nodes import find_node
from outpace.planner.hardware.networks import of_node, read_network
from outpace.records.errors import BadInputError
from outpace.records.figure import Figure, Key, Unit
from outpace.records.hardware import Accelerator, Node
from outpace.records.machine import Machine
from outpace.records.network import Network
from outpace.records.precisions import Precision
from outpace.records.probed import ProbeRecord

# Of products that are about as fast, those that are less trouble to train with come first.
_MIXED: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
_ALIKE = 1.05


@dataclass(frozen=True)
class NetworkOptions:
    """Options of the user; the last of the `networks` is the machine's own."""

    machine: str | None
    probe: Path | None
    nodes: int
    devices_per_node: int | None
    networks: Sequence[str]
    inside: str | None
    share: float


class Site:
    """Machine of a run: one of the catalog, or the one that was probed."""

    def __init__(self, asked: NetworkOptions) -> None:
        self._asked = asked
        self.node: Node | None = None
        self.probe: Machine | None = None
        if asked.machine is None and asked.probe is None:
            raise BadInputError(
                "where would it train? Name a machine of the catalog, as in --machine hgx-h100, or "
                "give what outpace probe wrote: --probe machine.json."
            )
        if asked.machine is not None:
            self.node = find_node(asked.machine, ACCELERATORS)
        if asked.probe is not None:
            self.probe = Machine.load(asked.probe, option="--probe ")
        self.nodes: int = asked.nodes
        self.per_node: int = asked.devices_per_node or self._devices()
        self.own = self._default_network()

    def _devices(self) -> int:
        if self.node is not None:
            return self.node.processes
        assert self.probe is not None
        if self.probe.devices or self._results is None:
            return len(self.probe.devices) or 1
        if self._results.ranks_per_host is None:
            raise BadInputError(
                f"{self._asked.probe} is of {self._results.world_size} ranks on "
                f"{self._results.hosts} hosts, not equally many on each. Say --devices-per-node."
            )
        return self._results.ranks_per_host

    def _default_network(self) -> Network | None:
        """The machine's: as asked last, as measured across nodes, or of the catalog."""
        if self._asked.networks:
            return read_network(self._asked.networks[-1])
        rate = None if self._results is None else self._results.node_network_bytes_per_s()
        if rate is not None:
            return Network(name="measured (all-reduce)", bytes_per_s=rate,
                           origin="measured", source="outpace probe")  # fmt: skip
        return None if self.node is None else of_node(self.node)

    @property
    def _results(self) -> ProbeRecord | None:
        return None if self.probe is None else self.probe.probed

    @property
    def accelerator(self) -> Accelerator | None:
        """Return the accelerator; None on CPUs, and if the catalog has no entry."""
        if self.node is not None:
            return ACCELERATORS.get(self.node.accelerator or "")
        first = self.probe.devices[0] if self.probe is not None and self.probe.devices else None
        return None if first is None else find_accelerator(first.name, first.memory_bytes)

    @property
    def memory_bytes(self) -> int | None:
        """Return the memory of a device that its driver leaves free."""
        return None if self.accelerator is None else self.accelerator.usable_bytes

    def precision(self, asked: Precision | None) -> Precision:
        """Return the requested precision, else the fastest in which matrix products were measured.

        Where none was measured, bf16 if they have it by the catalog. On a GPU that is over master
        weights, as outpace trains there.
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
        """The best rate of each precision that can be trained in, where it was steady."""
        if self._results is None:
            return {}
        best = {dtype: self._results.best_rate(dtype) for dtype in _MIXED}
        return {dtype: figure.value for dtype, figure in best.items() if figure and figure.value}

    def rate(self, precision: Precision) -> Figure:
        """Return the FLOP/s of a device: measured, or a share of the peak."""
        dtype = precision.split("-")[0]
        probed = self._results
        figure = None if probed is None else probed.best_rate(dtype)
        if figure is not None:
            return figure
        peaks = {} if self.accelerator is None else dict(self.accelerator.peak.flops_per_s)
        peak = {str(name): value for name, value in peaks.items()}.get(dtype)
        if (peak is None or self.accelerator is None) and probed is not None:
            raise BadInputError(
                f"{self._asked.probe} has no steady {dtype} rate of matrix products, and the "
                "catalog has no peak of this machine. Probe again while nothing else runs: outpace "
                "probe matmul memory --out machine.json."
            )
        if peak is None or self.accelerator is None:
            raise BadInputError(
                f"no {dtype} rate is known of this machine: the catalog has no peak for it. "
                "Measure it with outpace probe matmul --out machine.json, and give that as --probe."
            )
        return _figure("rate", dtype, "FLOP/s", peak * self._asked.share,
                       f"{self._asked.share:g} of {self.accelerator.peak.source}")  # fmt: skip

    def memory_rate(self) -> Figure:
        """Return the bandwidth of a device's memory in bytes/s."""
        probed = self._results
        copies = [] if probed is None else [
            figure for figure in probed.figures
            if (figure.key.kind, figure.key.what) == ("memory", "copy")
        ]  # fmt: skip
        if copies:  # the largest: no cache holds it
            return max(copies, key=lambda figure: figure.key.number("bytes"))
        if self.accelerator is None:
            raise BadInputError(
                "the machine's memory bandwidth is not known. Measure it with outpace probe all "
                "--out machine.json, and give --probe machine.json."
            )
        return _figure("memory", "all", "B/s", self.accelerator.memory_bytes_per_s,
                       self.accelerator.source)  # fmt: skip

    def device_network(self) -> Network | None:
        """Return a device's link to the others of its node; None if it is alone there.

        Raises BadInputError if it is unknown.
        """
        if self._asked.inside is not None:
            return read_network(self._asked.inside, "--inside ")
        if self.per_node == 1:
            return None
        measured = None if self._results is None else self._results.inside_bytes_per_s()
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
                "and give --probe machine.json, or say what a device's carries, as in --inside "
                "25GB/s."
            )
        return Network(name=link, bytes_per_s=LINKS[link].bytes_per_s, origin="catalog",
                       source=LINKS[link].source)  # fmt: skip


def _figure(kind: str, dtype: str, unit: Unit, value: float, source: str) -> Figure:
    key = Key(kind=kind, what="catalog", of={"dtype": dtype})
    return Figure(key=key, unit=unit, value=value, origin="catalog", source=source)


def value_of(figure: Figure) -> float:
    """Return a figure's value. Raises BadInputError where the measurement was unstable."""
    if figure.value is None:
        raise BadInputError(f"{figure.key} was not measured: {figure.unstable}. Probe again.")
    return figure.value
