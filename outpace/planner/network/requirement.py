"""Bandwidth that a plan needs: its communication compared with the computation that can hide it.

The derivation, with its sources, is in docs/concepts/network.md.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from outpace.planner.communication.flows import Flow, Part, Where, flows
from outpace.planner.communication.node_placement import Crossing, place
from outpace.planner.communication.volume import StepOnRank
from outpace.planner.memory.optimizer_bytes import optimizer_bytes
from outpace.planner.model.shapes import parameter_shapes
from outpace.planner.network.roofline import Roof, RooflineTimes, times
from outpace.planner.pipeline.schedules import schedule_graph
from outpace.planner.pipeline.simulator import StageTime
from outpace.records.model import ModelSpec
from outpace.records.network import Need, Network, NetworkCost, Traffic
from outpace.records.plan import Plan
from outpace.records.precisions import PRECISION_TRAITS
from outpace.records.strategies import FULLY_SHARDED

_LEAST = 1e3  # bytes/s: slower links are not told apart
_UNPLAYED = 2e-3  # what a message takes, as a share of a forward, while a schedule is played
_NOTHING = "nothing"


@dataclass(frozen=True)
class NetworkProblem:
    """A plan on nodes of `per_node` devices whose links within a node carry `inside_bytes_per_s`.

    `memory_bytes` of a device, None where it is not known.
    """

    plan: Plan
    spec: ModelSpec
    global_batch: int
    seq_len: int
    per_node: int
    roof: Roof
    inside_bytes_per_s: float
    memory_bytes: int | None = None


def answer(
    question: NetworkProblem,
    networks: Iterable[Network],
    present: Network | None,
    tolerance: float,
    title: str | None = None,
    device_links: Iterable[Network] = (),
    present_link: Network | None = None,
) -> Need:
    """Return what the plan needs so that the network costs at most `tolerance` of a step.

    `device_links` are what a device could have to the others of its node, `present_link` what it
    has;
    both are taken into account as if the network between nodes took no time. Raises BadInputError
    for plans whose traffic is not known, or that do not divide the batch.
    """
    step = NetworkStep(question)
    inside = question.inside_bytes_per_s
    ladder = tuple(map(step.cost, networks))
    device_ladder = tuple(map(step.device_cost, device_links))
    states, memory = states_bytes(question.plan, question.spec), question.memory_bytes
    by_node, by_device = (1 + tolerance) * step.ideal_s, (1 + tolerance) * step.compute_s
    return Need(
        title=title or question.plan.strategy,
        plan=question.plan,
        global_batch=question.global_batch,
        identity=question.plan.identity(question.global_batch),
        compute_s=step.compute_s,
        traffic=tuple(map(step.record_traffic, step.crossings)),
        node_bytes=sum(c.node_bytes for c in step.crossings),
        least_node_bytes_per_s=_least(lambda rate: step.seconds(inside, rate) <= by_node),
        least_device_bytes_per_s=_least(lambda rate: step.seconds(rate, math.inf) <= by_device),
        costs=ladder,
        cheapest=_cheapest(ladder, tolerance),
        present_cost=None if present is None else step.cost(present),
        device_costs=device_ladder,
        cheapest_inside=_cheapest(device_ladder, tolerance),
        present_device_cost=None if present_link is None else step.device_cost(present_link),
        states_bytes=states,
        fits=None if memory is None or states <= memory else False,
    )


def _cheapest(ladder: Iterable[NetworkCost], tolerance: float) -> Network | None:
    """The slowest that is enough; None where none is."""
    enough = [cost.network for cost in ladder if cost.slowdown <= tolerance]
    return min(enough, key=lambda network: network.bytes_per_s, default=None)


def _least(enough: Callable[[float], bool]) -> float:
    """The least rate that is enough, to a millionth; 0 where any is. An endless one has to be."""
    if enough(_LEAST):
        return 0.0
    most = _LEAST
    while not enough(most):
        most *= 10
    low, high = math.log(most / 10), math.log(most)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(math.exp(middle)) else (middle, high)
    return math.exp(high)


class NetworkStep:
    """A step of a plan: its compute times, and its communication placed on nodes."""

    def __init__(self, question: NetworkProblem) -> None:
        self.plan, self.spec = question.plan, question.spec
        self._question = question
        work = self._work(0)
        self.passes = work.passes
        self.micro_batches = work.passes * self.plan.pp_microbatches
        self.times: RooflineTimes = times(work, question.roof)
        self.crossings = [place(self.plan, flow, question.per_node) for flow in self._flows()]
        # Of a rank: its layers, and what lies outside of them.
        self._units = self.spec.layers // self.plan.pp + 1
        self._laps = self.plan.stages_per_rank

    def _work(self, rank: int) -> StepOnRank:
        asked = self._question
        return StepOnRank(asked.plan, asked.spec, asked.global_batch, asked.seq_len, rank)

    def _flows(self) -> list[Flow]:
        """The most of any stage, for each purpose and axis."""
        apart = self.plan.world_size // self.plan.pp
        most: dict[tuple[Part, Where], Flow] = {}
        for stage in sorted({0, self.plan.pp // 2, self.plan.pp - 1}):
            mine: dict[tuple[Part, Where], Flow] = {}
            for flow in flows(self._work(stage * apart)):
                sent, link = flow.sent_bytes, flow.link_bytes
                if (flow.part, flow.axis) in mine:
                    before = mine[flow.part, flow.axis]
                    sent, link = sent + before.sent_bytes, link + before.link_bytes
                mine[flow.part, flow.axis] = Flow(flow.part, flow.axis, sent, link)
            for key, flow in mine.items():
                if key not in most or flow.link_bytes > most[key].link_bytes:
                    most[key] = flow
        return list(most.values())

    @property
    def _pass_s(self) -> float:
        """Time of one micro-batch, forwards and backwards."""
        return self.times.forward_s + self.times.backward_s

    @property
    def busy_s(self) -> float:
        """Return the time in which a device computes."""
        return self.micro_batches * self._pass_s

    @property
    def compute_s(self) -> float:
        """Return the step time without communication: with the pipeline's bubble and the
        optimizer.
        """
        ranks, schedule = self.plan.pp, self.plan.schedule
        waiting = self.passes * (ranks - 1) / self._laps * self._pass_s
        if schedule == "mp":
            waiting = self.busy_s * (ranks - 1)
        return self.busy_s + waiting + self.times.optimizer_s

    @cached_property
    def _hops(self) -> float:
        """Number of messages between stages that a pass waits for, one after the other.

        gpipe waits while it fills and drains. 1f1b has no micro-batch to spare and waits for two
        messages a micro-batch besides; both are simulated. mp waits for all. Schedules with two
        stages on a rank have micro-batches to spare: taken as waiting while they fill and drain.
        """
        ranks, schedule, count = self.plan.pp, self.plan.schedule, self.plan.pp_microbatches
        if schedule not in ("gpipe", "1f1b"):
            return 2 * (self._laps * ranks - 1)
        stages = [StageTime(1.0, 1.0, 1.0)] * ranks
        alone, sent = (
            schedule_graph(schedule, ranks, count).makespan_s(stages, s) for s in (0.0, _UNPLAYED)
        )
        return (sent - alone) / _UNPLAYED

    @cached_property
    def ideal_s(self) -> float:
        """Return the step time with an infinitely fast network between nodes, and present links
        within them.
        """
        return self.seconds(self._question.inside_bytes_per_s, math.inf)

    def cost(self, network: Network) -> NetworkCost:
        """Return the cost of a network between nodes, compared with an infinitely fast one."""
        step_s = self.seconds(self._question.inside_bytes_per_s, network.bytes_per_s)
        return NetworkCost(
            network=network, step_s=step_s, slowdown=max(0.0, step_s / self.ideal_s - 1)
        )

    def device_cost(self, link: Network) -> NetworkCost:
        """Return the cost of a device's link within a node, compared with an infinitely fast
        one.
        """
        step_s = self.seconds(link.bytes_per_s, math.inf)
        slowdown = max(0.0, step_s / self.compute_s - 1)
        return NetworkCost(network=link, step_s=step_s, slowdown=slowdown)

    def seconds(self, inside: float, across: float) -> float:
        """A step with device links of `inside` bytes/s and nodes' cards of `across` together."""
        took: dict[Part, float] = {}
        sends = 0.0
        for crossing in self.crossings:
            part = crossing.flow.part
            took[part] = took.get(part, 0.0) + crossing.seconds(inside, across)
            if part == "sends":
                sends = self._sends_exposed(crossing, inside, across)
        waited = [took.get(part, 0.0) for part in ("activations", "updates", "tied", "control")]
        exposed = sum(waited) + sends + self._shards_exposed(took) + self._ring_exposed(took)
        # However well it hides, a link cannot be busy for longer than the step.
        return max(self.compute_s + exposed, sum(took.values()))

    def _sends_exposed(self, crossing: Crossing, inside: float, across: float) -> float:
        message_s = crossing.way_seconds(inside, across) / self.micro_batches
        each_s = crossing.seconds(inside, across) / self.micro_batches
        late_s = self.micro_batches * max(0.0, each_s - self._pass_s)
        return self.passes * self._hops * message_s + late_s

    def _ring_exposed(self, took: dict[Part, float]) -> float:
        """Keys and values go round while attention is computed with those that came before."""
        return max(0.0, took.get("ring", 0.0) - self.times.attention_share * self.busy_s)

    def _shards_exposed(self, took: dict[Part, float]) -> float:
        """Gathers and gradients, a unit at a time: a block's go while its neighbour computes.

        Of U units that take g each beside computing of f each, the first has nothing to go behind:
        U·max(f, g) and the lesser of the two, where it would have been U·f.
        """
        gathers, gradients = took.get("gathers", 0.0), took.get("gradients", 0.0)
        forward_s = self.micro_batches * self.times.forward_s
        backward_s = self.micro_batches * self.times.backward_s
        if not self._shards:  # in the last backward, bucket by bucket
            return self._exposed_s(gradients, self.times.backward_s, self._buckets)
        if self.plan.pp > 1:  # one gather of all micro-batches' is for backwards
            first = gathers * self.plan.pp_microbatches / (self.plan.pp_microbatches + 1)
            hidden = self._exposed_s(first, forward_s, self._units)
            return hidden + self._exposed_s(gathers - first, backward_s, self._units) + gradients
        first = gathers if self.plan.strategy == "zero2" else gathers / 2
        beside_backward = gathers - first + gradients
        return self._exposed_s(first, forward_s, self._units) + self._exposed_s(
            beside_backward, backward_s, self._units
        )

    @property
    def _shards(self) -> bool:
        return self.plan.strategy in (*FULLY_SHARDED, "3d")

    @property
    def _buckets(self) -> int:
        work = self._work(0)
        return max(1, sum(work.sizes) * work.item // (self.plan.bucket_mib * 2**20))

    def _exposed_s(self, comm_s: float, compute_s: float, units: int) -> float:
        """Return what is exposed of communication in equal parts, all but one with company."""
        return max(comm_s / units, comm_s - compute_s * (units - 1) / units)

    def record_traffic(self, crossing: Crossing) -> Traffic:
        """Return a crossing's record, with what it hides behind."""
        flow = crossing.flow
        behind, hide_s = self._hiding_pass(flow.part)
        return Traffic(
            part=flow.part,
            axis=flow.axis,
            sent_bytes=flow.sent_bytes,
            link_bytes=crossing.link_bytes,
            node_bytes=crossing.node_bytes,
            behind=behind,
            hide_s=hide_s,
        )

    def _hiding_pass(self, part: Part) -> tuple[str, float]:
        forward_s = self.micro_batches * self.times.forward_s
        backward_s = self.micro_batches * self.times.backward_s
        if part == "gathers":
            first = self.plan.strategy == "zero2"
            return ("forwards", forward_s) if first else ("forwards and backwards", self.busy_s)
        if part == "gradients":
            if not self._shards:
                return "the last backward", self.times.backward_s
            return (_NOTHING, 0.0) if self.plan.pp > 1 else ("backwards", backward_s)
        if part == "sends" and self.plan.schedule not in ("mp", "1f1b"):
            return "other micro-batches", self.busy_s
        if part == "ring":
            return "attention", self.times.attention_share * self.busy_s
        return _NOTHING, 0.0


def states_bytes(plan: Plan, spec: ModelSpec) -> int:
    """Return bytes of weights, gradients and optimizer state on a device: less than it needs."""
    item = PRECISION_TRAITS[plan.precision].weight_bytes
    shapes = parameter_shapes(spec)
    weights = sum(math.prod(shape) for shape in shapes.values()) * item
    kept = sum(
        optimizer_bytes(shape, plan.optimizer, plan.precision, hidden=name.startswith("blocks."))
        for name, shape in shapes.items()
    )
    parts = plan.tp * plan.pp
    shards = plan.dp_shard * (plan.cp if plan.strategy == "3d" else 1)
    if plan.strategy == "zero1":
        return round((2 * weights + kept / shards) / parts)
    if plan.strategy == "zero2":  # parameters are whole between forward and backward
        return round((weights + (weights + kept) / shards) / parts)
    return round((2 * weights + kept) / shards / parts)
