"""Network bandwidth that plans need, from step times on other networks.

Step times come from the planner's time model; docs/concepts/network.md explains what is counted.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from outpace.catalog import collective_rates
from outpace.planner.calibration.cluster import Cluster, network_share
from outpace.planner.calibration.fit_rates import steps_s
from outpace.planner.communication.flows import Flow, Part, Where, flows
from outpace.planner.communication.node_placement import Crossing, place_flow
from outpace.planner.communication.volume import StepOnRank
from outpace.planner.memory import peak
from outpace.planner.memory.setup import MemoryQuestion
from outpace.planner.plan_columns import Floats, PlanBatch, of_plans
from outpace.planner.step_time.estimate import estimate, stages_of
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.records.memory import Kind
from outpace.records.model import ModelSpec
from outpace.records.network import Need, Network, NetworkCost, Traffic
from outpace.records.outline import Outline
from outpace.records.plan import Plan
from outpace.records.strategies import FULLY_SHARDED

_LEAST, _MOST = 1e3, 1e18  # bytes/s: slower links count as this slow, and faster links as free
_ROUNDS, _RATES = 4, 64  # rounds to narrow the range to a millionth, and rates per round
_NOTHING = "nothing"
_STATES: tuple[Kind, ...] = ("weights", "gradients", "optimizer state")


@dataclass(frozen=True)
class NetworkEntry:
    """A plan with its title and global batch."""

    title: str
    plan: Plan
    global_batch: int


@dataclass(frozen=True)
class NetworkProblem:
    """A model on a machine, and the networks to compare.

    `networks` are networks between nodes; the machine has `present`. `device_links` are links
    between devices of a node; the machine has `present_link`. `tolerance` is the largest acceptable
    slowdown of a step by the network, as a fraction.
    """

    spec: ModelSpec
    outline: Outline
    seq_len: int
    cluster: Cluster
    tolerance: float
    networks: Sequence[Network] = ()
    present: Network | None = None
    device_links: Sequence[Network] = ()
    present_link: Network | None = None

    def fits(self, columns: PlanBatch) -> list[bool | None]:
        """Return whether each plan fits on a device; None if the device's memory is unknown."""
        device = self.cluster.device
        if device.memory_bytes is None:
            return [None] * len(columns)
        question = MemoryQuestion(self.outline, self.seq_len, device.kind, device.fused_attention)
        needed = peak.reserved_bytes(question, columns)
        found: list[bool | None] = (needed <= device.memory_bytes).tolist()
        return found


def link_share(link: Network) -> float:
    """Return the fraction of its nominal rate that a link between devices of a node reaches."""
    return collective_rates.HOST_BRIDGE_SHARE if _is_pcie(link) else network_share(link)


def _is_pcie(link: Network) -> bool:
    return link.name.startswith("PCIe")


def network_needs(problem: NetworkProblem, entries: Sequence[NetworkEntry]) -> list[Need]:
    """Return the network requirements of each plan.

    They contain the step time on each network, and the slowest network that slows a step by no more
    than the tolerance. To compare links between devices, the network between nodes is assumed to be
    infinitely fast. Raises BadInputError if a plan's traffic is unknown or a plan does not divide
    the batch.
    """
    steps = NetworkSteps(problem, entries)
    node, device = steps.node_costs(), steps.device_costs()
    least_node, least_device = steps.least_node(), steps.least_device()
    question = MemoryQuestion(problem.outline, problem.seq_len, problem.cluster.device.kind)
    anatomy = peak.anatomy(question, steps.columns)
    states = np.sum([anatomy[kind] for kind in _STATES], axis=0)
    fits = problem.fits(steps.columns)
    found = []
    for at, entry in enumerate(entries):
        traffic = PlanTraffic(entry, steps, at)
        found.append(Need(
            title=entry.title,
            plan=entry.plan,
            global_batch=entry.global_batch,
            identity=entry.plan.identity(entry.global_batch),
            compute_s=float(steps.compute_s[at]),
            traffic=tuple(map(traffic.record, traffic.crossings)),
            node_bytes=sum(c.node_bytes for c in traffic.crossings),
            least_node_bytes_per_s=float(least_node[at]),
            least_device_bytes_per_s=float(least_device[at]),
            costs=node[at],
            cheapest=_slowest_sufficient_network(node[at], problem.tolerance),
            present_cost=_present_cost(problem.present, node[at]),
            device_costs=device[at],
            cheapest_inside=_slowest_sufficient_network(device[at], problem.tolerance),
            present_device_cost=_present_cost(problem.present_link, device[at]),
            states_bytes=round(float(states[at])),
            fits=fits[at],
        ))  # fmt: skip
    return found


def _slowest_sufficient_network(ladder: Iterable[NetworkCost], tolerance: float) -> Network | None:
    enough = [cost.network for cost in ladder if cost.slowdown <= tolerance]
    return min(enough, key=lambda network: network.bytes_per_s, default=None)


def _present_cost(present: Network | None, ladder: Iterable[NetworkCost]) -> NetworkCost | None:
    """Return the cost of the machine's own network, or None if it was not compared.

    Networks are matched by their rate; the cost names the machine's.
    """
    for cost in ladder:
        if present is not None and cost.network.bytes_per_s == present.bytes_per_s:
            return cost.model_copy(update={"network": present})
    return None


class NetworkSteps:
    """Step times of each plan on each of several networks."""

    def __init__(self, problem: NetworkProblem, entries: Sequence[NetworkEntry]) -> None:
        self._problem = problem
        self.question = StepTimeQuestion(
            problem.outline, problem.seq_len, problem.cluster.device, problem.cluster.fabric
        )
        rows = [of_plans([e.plan], e.global_batch, problem.outline.layers) for e in entries]
        self.columns = PlanBatch(**{
            field.name: np.concatenate([getattr(row, field.name) for row in rows])
            for field in fields(PlanBatch)
        })  # fmt: skip
        # What the simulation adds on the present network is added on every network.
        self.times = estimate(self.question, self.columns)
        simulated_s = steps_s(self.question, self.columns) - self.times.step_s
        self._simulated_s = simulated_s[:, None]
        self.crossings = [_place_traffic(problem, entry) for entry in entries]
        counts = [[(one.link_bytes, one.node_bytes) for one in placed] for placed in self.crossings]
        sums = np.array([np.sum(placed, axis=0) if placed else (0, 0) for placed in counts])
        self._link_bytes, self._node_bytes = sums.astype(float).T[..., None]

    @property
    def inside_bytes_per_s(self) -> float:
        """Return the rate of the machine's own device links in bytes/s."""
        return self._problem.cluster.fabric.inside_bytes_per_s

    def seconds(self, inside: Floats | float, across: Floats | float) -> Floats:
        """Return each plan's step times in seconds if links reach the given rates in bytes/s.

        `inside` is the rate of a device's link within its node, `across` the rate of all network
        cards of a node. Each is a number, or an array of shape (plans, n) or (1, n) with n rates to
        try. The result has the shape (plans, n). A step takes at least as long as the transfers on
        its busiest link.
        """
        shape = (len(self.columns), np.broadcast(np.zeros((1, 1)), inside, across).shape[1])
        plans = np.repeat(np.arange(shape[0]), shape[1])
        rates = [np.broadcast_to(rate, shape).reshape(-1) for rate in (inside, across)]
        question = replace(self.question, fabric=self.question.fabric.with_rates(*rates))
        steps = estimate(question, self.columns.select(plans)).step_s.reshape(shape)
        busy_s = np.maximum(self._link_bytes / inside, self._node_bytes / across)
        found: Floats = np.maximum(steps + self._simulated_s, busy_s)
        return found

    @cached_property
    def ideal_s(self) -> Floats:
        """Return step times with an infinitely fast network and the machine's own device links."""
        return self.seconds(self.inside_bytes_per_s, math.inf)[:, 0]

    @cached_property
    def compute_s(self) -> Floats:
        """Return step times on infinitely fast links, with pipeline bubbles and the optimizer."""
        return self.seconds(math.inf, math.inf)[:, 0]

    @property
    def node_share(self) -> float:
        """Return the fraction of its nominal rate that the machine's network reaches."""
        return 1.0 if self._problem.present is None else network_share(self._problem.present)

    def device_share(self, link: Network) -> float:
        """Return the fraction of its nominal rate that a device link reaches on this machine."""
        own = self._problem.present_link
        if own is None or _is_pcie(own) != _is_pcie(link):
            return link_share(link)
        return self.inside_bytes_per_s / own.bytes_per_s

    def least_node(self) -> Floats:
        """Return the lowest nominal rate of a node's network that stays within the tolerance.

        The network is assumed to reach the same fraction of its rate as the machine's.
        """
        found = self._least_rates(self.ideal_s, lambda r: self.seconds(self.inside_bytes_per_s, r))
        return found / self.node_share

    def least_device(self) -> Floats:
        """Return the lowest nominal rate of a device link that stays within the tolerance.

        The link is assumed to reach the same fraction of its rate as the machine's.
        """
        own = self._problem.present_link
        found = self._least_rates(self.compute_s, lambda rates: self.seconds(rates, math.inf))
        return found if own is None else found / self.device_share(own)

    def _least_rates(self, of_s: Floats, seconds: Callable[[Floats], Floats]) -> Floats:
        """Return the lowest rate per plan that keeps its step within the tolerance; 0 if any does.

        `seconds` takes an array of rates of shape (plans, n) and returns the step times, in the
        same shape. A plan is within the tolerance if its step takes at most 1 + tolerance times
        `of_s`.
        """
        allowed = (1 + self._problem.tolerance) * of_s[:, None]
        low, high = np.full_like(of_s, math.log(_LEAST)), np.full_like(of_s, math.log(_MOST))
        for _ in range(_ROUNDS):
            rates = np.linspace(low, high, _RATES, axis=1)
            enough = seconds(np.exp(rates)) <= allowed
            enough[:, -1] = True
            first = np.argmax(enough, axis=1)[:, None]
            low = np.take_along_axis(rates, np.maximum(first - 1, 0), axis=1)[:, 0]
            high = np.take_along_axis(rates, first, axis=1)[:, 0]
        return np.where(high == math.log(_LEAST), 0.0, np.exp(high))

    def node_costs(self) -> list[tuple[NetworkCost, ...]]:
        """Return the cost of each network between nodes for every plan."""
        rates = [one.bytes_per_s * network_share(one) for one in self._problem.networks]
        steps = self.seconds(self.inside_bytes_per_s, np.array([rates or [math.inf]]))
        return self._make_costs(self._problem.networks, steps, self.ideal_s)

    def device_costs(self) -> list[tuple[NetworkCost, ...]]:
        """Return the cost of each link between devices of a node for every plan."""
        links = self._problem.device_links
        rates = [one.bytes_per_s * self.device_share(one) for one in links]
        steps = self.seconds(np.array([rates or [math.inf]]), math.inf)
        return self._make_costs(links, steps, self.compute_s)

    def _make_costs(
        self, networks: Sequence[Network], steps: Floats, ideal: Floats
    ) -> list[tuple[NetworkCost, ...]]:
        return [
            tuple(
                NetworkCost(network=one, step_s=step_s, slowdown=max(0.0, step_s / least_s - 1))
                for one, step_s in zip(networks, row, strict=False)
            )
            for row, least_s in zip(steps.tolist(), ideal.tolist(), strict=True)
        ]


class PlanTraffic:
    """Bytes that a plan's step sends within and between nodes, and what can hide them.

    A computation hides traffic that is sent while it runs.
    """

    def __init__(self, entry: NetworkEntry, steps: NetworkSteps, at: int) -> None:
        self.plan, self.crossings = entry.plan, steps.crossings[at]
        stages = stages_of(steps.question, steps.columns.select([at])).times
        count = self.plan.accumulation(entry.global_batch) * self.plan.pp_microbatches
        self._last_s = max(stage.seconds("B") for stage in stages)
        self._forward_s = count * max(stage.seconds("F") for stage in stages)
        self._backward_s = count * self._last_s
        self._attention_s = float(steps.times.attention_s[at])

    def record(self, crossing: Crossing) -> Traffic:
        """Return the record of one kind of traffic, with the computation that can hide it."""
        flow = crossing.flow
        behind, hide_s = self._hiding_computation(flow.part)
        return Traffic(
            part=flow.part,
            axis=flow.axis,
            sent_bytes=flow.sent_bytes,
            link_bytes=crossing.link_bytes,
            node_bytes=crossing.node_bytes,
            behind=behind,
            hide_s=hide_s,
        )

    def _hiding_computation(self, part: Part) -> tuple[str, float]:
        """Return the name and the seconds of the computation that can hide this traffic."""
        busy_s = self._forward_s + self._backward_s
        if part == "gathers":
            first = self.plan.strategy == "zero2"
            return ("forwards", self._forward_s) if first else ("forwards and backwards", busy_s)
        if part == "gradients":
            if self.plan.strategy not in (*FULLY_SHARDED, "3d"):
                return "the last backward", self._last_s
            return (_NOTHING, 0.0) if self.plan.pp > 1 else ("backwards", self._backward_s)
        if part == "sends" and self.plan.schedule not in ("mp", "1f1b"):
            return "other micro-batches", busy_s
        return ("attention", self._attention_s) if part == "ring" else (_NOTHING, 0.0)


def _place_traffic(problem: NetworkProblem, entry: NetworkEntry) -> list[Crossing]:
    """Return the bytes that a plan's step sends within and between nodes, by purpose and mesh axis.

    For each purpose and axis, they are those of the pipeline stage with the most bytes on a link.
    """
    plan = entry.plan
    apart = plan.world_size // plan.pp
    most: dict[tuple[Part, Where], Flow] = {}
    for stage in sorted({0, plan.pp // 2, plan.pp - 1}):
        mine: dict[tuple[Part, Where], Flow] = {}
        work = StepOnRank(plan, problem.spec, entry.global_batch, problem.seq_len, stage * apart)
        for flow in flows(work):
            sent, link = flow.sent_bytes, flow.link_bytes
            if (flow.part, flow.axis) in mine:
                before = mine[flow.part, flow.axis]
                sent, link = sent + before.sent_bytes, link + before.link_bytes
            mine[flow.part, flow.axis] = Flow(flow.part, flow.axis, sent, link)
        for key, flow in mine.items():
            if key not in most or flow.link_bytes > most[key].link_bytes:
                most[key] = flow
    return [place_flow(plan, flow, problem.cluster.fabric.per_node) for flow in most.values()]
