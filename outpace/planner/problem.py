"""Planning problem: a model, a batch, a machine, and requirements."""

import sys
from dataclasses import dataclass, replace

import numpy as np

from outpace.catalog.stacks import OUTPACE as OUTPACE_STACK
from outpace.catalog.stacks import SoftwareStack
from outpace.planner.calibration.cluster import Cluster
from outpace.planner.memory import peak
from outpace.planner.memory.framework_traits import OUTPACE, FrameworkTraits
from outpace.planner.memory.setup import MemoryQuestion
from outpace.planner.plan_columns import OFFLOADS, Bools, Floats, PlanBatch
from outpace.planner.search.search_request import SearchRequest
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.records.outline import Outline


@dataclass(frozen=True)
class PlanningProblem:
    """A model, a batch and a machine, with requirements for the plans.

    `idle`: nodes may stay idle if fewer are faster or not all can be used. `hints`: report the
    gains of options that are not searched by default. `traits` describes the trainer's use of
    memory, `stack` its speed.
    """

    outline: Outline
    cluster: Cluster
    wanted: SearchRequest
    tokens: int | None = None
    price: float | None = None  # per device and hour
    count: int = 5
    idle: bool = False
    traits: FrameworkTraits = OUTPACE
    stack: SoftwareStack = OUTPACE_STACK
    hints: bool = False

    @property
    def limit(self) -> float:
        """Return a device's memory in bytes, or the largest float if it is unknown."""
        return float(self.cluster.device.memory_bytes or sys.float_info.max)

    def with_nodes(self, nodes: int) -> "PlanningProblem":
        """Return the same problem on another number of nodes."""
        cluster = replace(self.cluster, nodes=nodes)
        return replace(self, cluster=cluster, wanted=replace(self.wanted, world=cluster.devices))

    @property
    def question(self) -> StepTimeQuestion:
        """Return the problem as input of the step-time model."""
        return StepTimeQuestion(
            self.outline,
            self.wanted.seq_len,
            self.cluster.device,
            self.cluster.fabric,
            loader_tokens_per_s=self.cluster.loader_tokens_per_s,
            other_program=self.stack.name != OUTPACE_STACK.name,
            stack=self.stack,
        )

    @property
    def memory_question(self) -> MemoryQuestion:
        """Return the problem as input of the memory formula."""
        device = self.cluster.device
        return MemoryQuestion(
            self.outline, self.wanted.seq_len, device.kind, device.fused_attention, self.traits
        )

    def required_bytes(self, columns: PlanBatch) -> Floats:
        """Return the memory that the fullest rank of each plan needs, in bytes."""
        return peak.reserved_bytes(self.memory_question, columns)

    def least_bytes(self, columns: PlanBatch) -> Floats:
        """Return a lower bound on `required_bytes` that is much faster to compute."""
        return peak.least_bytes(self.memory_question, columns)

    def checked_bytes(self, columns: PlanBatch) -> Floats:
        """Return `required_bytes`, with a value above the limit if host memory is too small.

        For plans that offload more than host memory can hold, the value is just above the limit.

        Such plans do not fit, but are closer to fitting than plans that exceed a device's memory.
        """
        needs = self.required_bytes(columns)
        host_bytes = self.cluster.host_bytes
        if host_bytes is None:
            return needs
        away = np.flatnonzero((needs <= self.limit) & _offloads_to_host(columns))
        if len(away):
            short = self.offloads(columns.select(away)) > host_bytes
            needs[away[short]] = np.nextafter(self.limit, np.inf)
        return needs

    def by_assumption(self) -> "tuple[PlanningProblem, ...]":
        """Return variants of the problem, to be searched in turn until a plan fits.

        If the host's memory is unknown, the first variant allows no offloading.
        """
        if not self.wanted.may_offload_to_host or self.cluster.host_bytes is not None:
            return (self,)
        return replace(self, wanted=replace(self.wanted, offloads=False)), self

    def offloads(self, columns: PlanBatch) -> Floats:
        """Return the bytes of host memory that each plan's offloading needs on a node."""
        return self.offloaded_bytes(columns)[0]

    def offloaded_bytes(self, columns: PlanBatch) -> tuple[Floats, Floats]:
        """Return the bytes that each plan offloads on a node, to host memory and to disk."""
        host, disk = peak.offloaded_bytes(self.memory_question, columns)
        ranks = np.minimum(self.cluster.fabric.per_node, columns.ranks)
        return host * ranks, disk * ranks


def _offloads_to_host(columns: PlanBatch) -> Bools:
    host = OFFLOADS.index("cpu")
    found: Bools = (
        (columns.offload_activations == host)
        | (columns.offload_parameters == host)
        | (columns.offload_optimizer == host)
    )
    return found
