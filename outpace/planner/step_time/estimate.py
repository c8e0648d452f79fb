"""Step times of many plans at once, and where the time goes, in closed form.

A step is the pipeline's passes (compute and what it waits for, the bubble), the reduction of
gradients as far as no backward hides it, and the optimizer. docs/concepts/planner.md derives each
term.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from outpace.planner.plan_batch import Floats, PlanBatch
from outpace.planner.step_time.collectives import CollectiveTimes
from outpace.planner.step_time.parameters import Offloading
from outpace.planner.step_time.pipeline import Pipelines, Stages
from outpace.planner.step_time.setup import StepTimeQuestion, of_stacks


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step by purpose, one entry per plan; they add up to the step.

    `host_s` is what the device waits for the host, and what uneven stages wait for the slowest.
    `data_s` is exposed of gradients' and parameters' collectives, and what all devices wait in them
    for the slowest; `tensor_s`, `context_s`, `pipeline_s` and `expert_s` of those axes'.
    `loading_s` is waiting for samples.
    """

    products_s: Floats
    attention_s: Floats
    memory_s: Floats
    host_s: Floats
    bubble_s: Floats
    tensor_s: Floats
    context_s: Floats
    pipeline_s: Floats
    expert_s: Floats
    data_s: Floats
    optimizer_s: Floats
    offload_s: Floats
    loading_s: Floats

    @property
    def step_s(self) -> Floats:
        """Return the sum of all parts."""
        total: Floats = np.sum([getattr(self, f.name) for f in fields(self)], axis=0)
        return total


def estimate(question: StepTimeQuestion, columns: PlanBatch) -> StepTimes:
    """Return the step times of all plans."""
    return _Step(question, columns).times()


def stages_of(question: StepTimeQuestion, columns: PlanBatch) -> Stages:
    """Return the stages of the first plan, to be simulated."""
    return _Step(question, columns.take([0])).stages()


def offloading(question: StepTimeQuestion, columns: PlanBatch) -> Offloading:
    """Return the parts of each plan's offloading time."""
    return _Step(question, columns).offloading_parts()


class _Step(Pipelines, CollectiveTimes):
    def offloading_parts(self) -> Offloading:
        """Bytes and seconds, less what passes hide."""
        counts = np.array([stack.layers for stack in self.outline.stacks], float)
        shares = counts / counts.sum()
        forwards, backwards = self.layer_passes()
        passes_s = of_stacks(forwards, shares, "seconds") + of_stacks(backwards, shares, "seconds")
        return self.offloading(self.micro * self.pipeline(passes_s, self.end_passes()).pace_s)

    def times(self) -> StepTimes:
        """Put together."""
        c = self.c
        counts = np.array([stack.layers for stack in self.outline.stacks], float)
        shares = counts / counts.sum()
        forwards, backwards = self.layer_passes()
        ahead_s, back_s = (of_stacks(p, shares, "seconds") for p in (forwards, backwards))
        ends = self.end_passes()
        pipeline = self.pipeline(ahead_s + back_s, ends)
        busy = self.micro * pipeline.pace_s
        own = self.outline.layers / c.pp

        def mean_s(name: str) -> Floats:
            """A rank's seconds in the mean."""
            layers = of_stacks(forwards, shares, name) + of_stacks(backwards, shares, name)
            outside: Floats = np.sum([getattr(end, name) for end in ends], axis=0)
            return self.micro * (own * layers + outside / c.pp)

        products, attention, tensor = (
            mean_s("products_s"),
            mean_s("attention_s"),
            mean_s("tensor_s"),
        )
        moved = np.maximum(mean_s("device_s") - products - attention, 0.0)
        moved = moved + self.micro * self.weight_traffic_s()
        known = products + attention + tensor + moved
        fit = np.minimum(1.0, busy / np.maximum(known, 1e-30))
        put_off = of_stacks(backwards, shares, "weights_s") / np.maximum(ahead_s + back_s, 1e-30)
        found = StepTimes(
            products_s=products * fit,
            attention_s=attention * fit,
            memory_s=moved * fit,
            host_s=np.maximum(busy - known, 0.0),
            bubble_s=c.passes * self.bubble_s(pipeline, put_off),
            tensor_s=tensor * fit,
            context_s=self.ring_s(forwards, backwards, shares, own),
            pipeline_s=self.sends_s(),
            expert_s=self.experts_s(busy),
            data_s=self.exposed_data_s(ahead_s, back_s, pipeline)
            + self.slowest_s((products + attention) * fit),
            optimizer_s=np.zeros(len(c)),
            offload_s=self.offloading_s(busy),
            loading_s=np.zeros(len(c)),
        )
        # A GPU's host is so far ahead of what is queued when it comes to the optimizer.
        ahead_s = np.maximum(found.step_s - mean_s("host_s"), 0.0)
        found = replace(found, optimizer_s=self.optimizer_step_s(ahead_s))
        return replace(found, loading_s=self._loading_s(found.step_s))

    def _loading_s(self, step_s: Floats) -> Floats:
        """Loaders work ahead of the step, so that what is waited for is what takes longer."""
        c = self.c
        samples = c.micro_batch * self.micro * c.data_parallel
        nodes = np.clip(c.ranks / self.fabric.per_node, 1, c.data_parallel)
        loaded_s = samples * self.q.seq_len / nodes / self.q.loader_tokens_per_s
        return np.maximum(loaded_s - step_s, 0.0)
