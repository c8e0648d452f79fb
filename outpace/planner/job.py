"""Planning problem: a model, a batch and a machine."""

import sys
from dataclasses import dataclass, replace

import numpy as np

from outpace.planner import memory
from outpace.planner.columns import OFFLOADS, Bools, Columns, Floats
from outpace.planner.habits import OUTPACE, Habits
from outpace.planner.machines import Cluster
from outpace.planner.space import Wanted
from outpace.planner.step_setup import Question
from outpace.records.outline import Outline


@dataclass(frozen=True)
class Job:
    """A model, a batch and a machine, and what is asked of the answer.

    `idle`: nodes may stay idle, where fewer are faster or all cannot be used. `hints`: whether to
    say what a setting that is not searched would gain. `habits`: what the trainer holds in memory.
    """

    outline: Outline
    cluster: Cluster
    wanted: Wanted
    tokens: int | None = None
    price: float | None = None  # of a device and hour
    count: int = 5
    idle: bool = False
    habits: Habits = OUTPACE
    hints: bool = False

    @property
    def limit(self) -> float:
        """Bytes of a device's memory, as its driver leaves it; the largest number: not known."""
        return float(self.cluster.device.memory_bytes or sys.float_info.max)

    def with_nodes(self, nodes: int) -> "Job":
        """Return the same problem on another number of nodes."""
        cluster = replace(self.cluster, nodes=nodes)
        return replace(self, cluster=cluster, wanted=replace(self.wanted, world=cluster.devices))

    @property
    def question(self) -> Question:
        """Problem as the time model takes it."""
        return Question(
            self.outline,
            self.wanted.seq_len,
            self.cluster.device,
            self.cluster.fabric,
            loader_tokens_per_s=self.cluster.loader_tokens_per_s,
        )

    def required_bytes(self, columns: Columns) -> Floats:
        """Bytes of each plan's fullest rank."""
        return memory.reserved_bytes(
            self.outline, self.wanted.seq_len, columns, self.cluster.device.kind,
            habits=self.habits,
        )  # fmt: skip

    def checked_bytes(self, columns: Columns) -> Floats:
        """`needs`, but just above the limit where a node's host cannot take what is offloaded.

        Such a plan does not fit, and is nearer to it than those that are too large for a device.
        """
        needs = self.required_bytes(columns)
        host_bytes = self.cluster.host_bytes
        if host_bytes is None:
            return needs
        away = np.flatnonzero((needs <= self.limit) & _on_host(columns))
        if len(away):
            short = self.offloads(columns.take(away)) > host_bytes
            needs[away[short]] = np.nextafter(self.limit, np.inf)
        return needs

    def offloads(self, columns: Columns) -> Floats:
        """Bytes of a node's host memory that its ranks offload to, of each plan."""
        host = OFFLOADS.index("cpu")
        # What goes to a disk, or to the host of a device that is the host, takes none of it.
        kept = {
            name: np.where(getattr(columns, name) == host, host, 0)
            for name in ("offload_activations", "offload_parameters", "offload_optimizer")
        }
        return self.offloaded_total_bytes(replace(columns, **kept))

    def offloaded_total_bytes(self, columns: Columns) -> Floats:
        """Bytes that the ranks of a node keep on its host or its disks, of each plan."""
        device = self.cluster.device.kind
        each = memory.anatomy(self.outline, self.wanted.seq_len, columns, device)["offloaded"]
        found: Floats = each * np.minimum(self.cluster.fabric.per_node, columns.ranks)
        return found


def _on_host(columns: Columns) -> Bools:
    """Return which plans offload to the host's memory."""
    host = OFFLOADS.index("cpu")
    found: Bools = (
        (columns.offload_activations == host)
        | (columns.offload_parameters == host)
        | (columns.offload_optimizer == host)
    )
    return found
