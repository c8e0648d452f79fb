"""Planning problem: a model, a batch and a machine."""

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
    """A model, a batch and a machine, and requirements for the answer.

    `idle`: nodes may stay idle if fewer nodes are faster or not all can be used. `hints`: whether
    to report gains of settings that are not searched. `traits`: how the trainer uses memory,
    `stack`: how it trains.
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
        """Return the bytes of device memory available to processes; infinite if unknown."""
        return float(self.cluster.device.memory_bytes or sys.float_info.max)

    def with_nodes(self, nodes: int) -> "PlanningProblem":
        """Return the same problem on another number of nodes."""
        cluster = replace(self.cluster, nodes=nodes)
        return replace(self, cluster=cluster, wanted=replace(self.wanted, world=cluster.devices))

    @property
    def question(self) -> StepTimeQuestion:
        """Return the problem as the input of the step-time model."""
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
        """Return the problem as the input of the memory formula."""
        device = self.cluster.device
        return MemoryQuestion(
            self.outline, self.wanted.seq_len, device.kind, device.fused_attention, self.traits
        )

    def required_bytes(self, columns: PlanBatch) -> Floats:
        """Return the bytes that each plan's fullest rank needs."""
        return peak.reserved_bytes(self.memory_question, columns)

    def least_bytes(self, columns: PlanBatch) -> Floats:
        """Return a lower bound of each plan's bytes, which is much faster to compute."""
        return peak.least_bytes(self.memory_question, columns)

    def checked_bytes(self, columns: PlanBatch) -> Floats:
        """Return `required_bytes`, or just more than the limit if the host lacks memory to offload.

        Such a plan does not fit, but is closer to fitting than those that are too large for a
        device.
        """
        needs = self.required_bytes(columns)
        host_bytes = self.cluster.host_bytes
        if host_bytes is None:
            return needs
        away = np.flatnonzero((needs <= self.limit) & _on_host(columns))
        if len(away):
            short = self.offloads(columns.select(away)) > host_bytes
            needs[away[short]] = np.nextafter(self.limit, np.inf)
        return needs

    def by_assumption(self) -> "tuple[PlanningProblem, ...]":
        """Return versions of the problem, to be searched in turn until a plan fits.

        If the host's memory is not known, plans that offload nothing come before all others.
        """
        if not self.wanted.may_offload_to_host or self.cluster.host_bytes is not None:
            return (self,)
        return replace(self, wanted=replace(self.wanted, offloads=False)), self

    def offloads(self, columns: PlanBatch) -> Floats:
        """Return the bytes that each plan's ranks offload to a node's host memory."""
        return self.offloaded_bytes(columns)[0]

    def offloaded_bytes(self, columns: PlanBatch) -> tuple[Floats, Floats]:
        """Return the maximum bytes that a node's ranks offload to host memory and to disks."""
        host, disk = peak.offloaded_bytes(self.memory_question, columns)
        ranks = np.minimum(self.cluster.fabric.per_node, columns.ranks)
        return host * ranks, disk * ranks


def _on_host(columns: PlanBatch) -> Bools:
    """Return which plans offload to the host's memory."""
    host = OFFLOADS.index("cpu")
    found: Bools = (
        (columns.offload_activations == host)
        | (columns.offload_parameters == host)
        | (columns.offload_optimizer == host)
    )
    return found
