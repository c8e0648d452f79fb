"""Results of `outpace probe` for a machine: every figure, fitted models, advice."""

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from pydantic import Field, PositiveInt

from outpace.records.base import Record, entry
from outpace.records.figure import Figure, Key

SectionName = Literal[
    "matmul", "memory", "allreduce", "collectives", "storage", "loader", "steps"
]  # fmt: skip


class ProgressDisplay(Protocol):
    """Display of the progress of a probe's sections."""

    def __call__(self, section: str, share: float) -> None:
        """Show how much of a section's expected time has passed: `share` is from 0 to 1."""

    def show_stopping(self) -> None:
        """Show that the probe is about to stop, which takes a moment."""


class LinkFit(Record):
    """Latency and bandwidth of a collective on an axis of ranks, fitted to times at several sizes.

    The time is latency + traffic / bandwidth. Traffic is counted as for busbw in nccl-tests, so the
    bandwidth is that of the link, whatever the collective and the number of ranks.
    """

    collective: str = Field(description="all-reduce, all-gather, reduce-scatter, …")
    axis: str = Field(description="ranks: all, node, across, pair 0-1")
    backend: str
    device: str = Field(description="device type of the tensors")
    ranks: PositiveInt = Field(description="ranks in each group of the axis")
    latency: Figure
    bandwidth: Figure
    residual: float = Field(description="median relative distance of the points from the fit")


def network_fit(fits: Sequence[LinkFit], hosts: int) -> LinkFit | None:
    """Return the all-reduce fit that describes the network between hosts; None if there is none.

    Usually, it is the fit on the axis "across", whose groups have one rank on each host. All these
    groups communicate at the same time. With one rank per host, there is no such axis, and the fit
    on "all" describes the network.
    """
    if hosts < 2:
        return None
    of = {fit.axis: fit for fit in fits if fit.collective == "all-reduce"}
    alone = of.get("all")
    return of.get("across") or (alone if alone is not None and alone.ranks == hosts else None)


def node_bytes_per_s(fit: LinkFit, at_once: int) -> float | None:
    """Return a host's network bandwidth: the bandwidth of one group times the number of groups.

    While the times of the fit were measured, `at_once` groups shared the host's network. Returns
    None if the fit was not steady.
    """
    return None if fit.bandwidth.value is None else fit.bandwidth.value * at_once


class Advice(Record):
    """A change that speeds up training, with the gain and its uncertainty."""

    about: str = Field(description="vocabulary, heads, loader, …")
    text: str = Field(description="what to change, with the figures")
    gain: float | None = entry("0.03: 3 % faster; None: unknown")
    low: float | None = entry("lower end of the gain's interval")
    high: float | None = None
    of: tuple[Key, ...] = entry("the figures that the advice is based on", ())


class Steadiness(Record):
    """Other load on the machine during the measurement. None: unknown."""

    other_cores: float | None = entry("cores used by others, on average")
    stolen: float | None = entry("share of time the hypervisor took")
    throttled: tuple[str, ...] = entry("devices that slowed down, and why", ())
    warnings: tuple[str, ...] = ()


class ProbeRecord(Record):
    """A probe: the time, the versions, what was measured, and all results."""

    date: str
    versions: dict[str, str]
    command: str
    sections: tuple[SectionName, ...]
    quick: bool
    took_s: float
    world_size: PositiveInt = 1
    hosts: PositiveInt = 1
    figures: tuple[Figure, ...] = ()
    fits: tuple[LinkFit, ...] = ()
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = entry("what could not be probed, and why", ())
    steadiness: Steadiness = Steadiness()

    def all_figures(self) -> Iterator[Figure]:
        """Yield all figures, including the fitted ones."""
        yield from self.figures
        for fit in self.fits:
            yield fit.latency
            yield fit.bandwidth

    def find(self, kind: str, what: str, **of: str | int) -> Figure | None:
        """Return the first figure of this kind and quantity with all of the values in `of`."""
        for figure in self.figures:
            if (figure.key.kind, figure.key.what) == (kind, what) and figure.key.has(**of):
                return figure
        return None

    def best_rate(self, dtype: str) -> Figure | None:
        """Return the maximum achievable matmul FLOP/s (MAMF) of one device."""
        return self.find("matmul", "best", dtype=dtype)

    @property
    def ranks_per_host(self) -> int | None:
        """Return the ranks per host; None if hosts had different numbers of ranks."""
        return None if self.world_size % self.hosts else self.world_size // self.hosts

    def node_network_bytes_per_s(self) -> float | None:
        """Return the unidirectional bandwidth of all network cards of a host together.

        None if it was not measured or not steady, or if hosts had different numbers of ranks.
        """
        fit, ranks = network_fit(self.fits, self.hosts), self.ranks_per_host
        return None if fit is None or ranks is None else node_bytes_per_s(fit, ranks)

    def inside_bytes_per_s(self) -> float | None:
        """Return the bandwidth of a rank's link to other ranks of its host; None if unknown."""
        fit = self.fit("all-reduce", "node")
        if fit is None and self.hosts == 1:
            fit = self.fit("all-reduce", "all")
        return None if fit is None else fit.bandwidth.value

    def fit(self, collective: str, axis: str) -> LinkFit | None:
        """Return the fit of a collective on an axis; None if there is none."""
        return next((f for f in self.fits if (f.collective, f.axis) == (collective, axis)), None)
