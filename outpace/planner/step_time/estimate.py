"""Step times of many plans, by purpose, in closed form.

A step consists of the pipeline's passes (computation, waits within it, and the bubble), the part of
gradient reduction that no backward hides, and the optimizer. docs/concepts/planner.md derives these
terms.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from outpace.planner.plan_columns import Floats, PlanBatch
from outpace.planner.step_time.collectives import (
    Ring,
    experts_s,
    exposed_data_s,
    ring,
    slowest_s,
    whole_data_s,
)
from outpace.planner.step_time.parameters import (
    Offloading,
    offloading_parts,
    optimizer_step_s,
    weight_traffic_s,
)
from outpace.planner.step_time.passes import StepPasses, step_passes
from outpace.planner.step_time.pipeline import (
    PipelineTime,
    Stages,
    bubble_s,
    pipeline_time,
    sends_s,
    stages_of_plan,
)
from outpace.planner.step_time.setup import StepTimeQuestion, StepTimeSetup, set_up


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step by purpose, one entry per plan; they add up to the step time.

    `host_s` is the time that devices wait for the host, and that faster stages of an uneven
    pipeline wait for the slowest. `data_s` is the exposed time of gradient and parameter
    collectives, including the wait of all devices for the slowest one; `tensor_s`, `context_s`,
    `pipeline_s` and `expert_s` are the exposed communication times of tensor, context, pipeline and
    expert parallelism. `loading_s` is the wait for samples.
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
        """Return the step time in seconds, the sum of all parts."""
        total: Floats = np.sum([getattr(self, f.name) for f in fields(self)], axis=0)
        return total


@dataclass(frozen=True)
class _Passes:
    """Seconds of device work in all forwards and backwards of a step, as the mean over ranks.

    `busy` is not a mean: it is the time of the slowest rank.
    """

    matmuls: Floats
    attention: Floats
    tensor: Floats
    memory: Floats
    busy: Floats

    @property
    def device_s(self) -> Floats:
        return self.matmuls + self.attention + self.tensor + self.memory

    @property
    def fit(self) -> Floats:
        """Return the factor that scales the parts down if their sum exceeds `busy`; else 1."""
        return np.minimum(1.0, self.busy / np.maximum(self.device_s, 1e-30))


def estimate(question: StepTimeQuestion, columns: PlanBatch) -> StepTimes:
    """Return the step times of all plans by purpose."""
    setup = set_up(question, columns)
    passes = step_passes(setup)
    pipeline = pipeline_time(setup, passes)
    parts = _sum_passes(setup, passes, pipeline)
    products_s, attention_s = parts.matmuls * parts.fit, parts.attention * parts.fit
    slowest = slowest_s(setup, (parts.matmuls + parts.attention) * parts.fit)
    keys = ring(setup, passes)
    nothing, exposed_s = np.zeros(len(columns)), exposed_data_s(setup, passes, pipeline, keys)
    found = StepTimes(
        products_s=products_s,
        attention_s=attention_s,
        memory_s=parts.memory * parts.fit,
        host_s=np.maximum(parts.busy - parts.device_s, 0.0),
        bubble_s=columns.passes * bubble_s(setup, pipeline, _weight_gradient_share(passes)),
        tensor_s=parts.tensor * parts.fit,
        context_s=setup.micro * keys.exposed_s,
        pipeline_s=sends_s(setup),
        expert_s=experts_s(setup, parts.busy),
        data_s=exposed_s + slowest,
        optimizer_s=nothing,
        offload_s=offloading_parts(
            setup, _free_host_link_s(setup, parts.busy, exposed_s, keys)
        ).seconds,
        loading_s=nothing,
    )
    # How far the host is ahead of the GPU when it reaches the optimizer.
    ahead_s = np.maximum(found.step_s - _mean_over_ranks_s(setup, passes, "host_s"), 0.0)
    found = replace(found, optimizer_s=optimizer_step_s(setup, ahead_s))
    return replace(found, loading_s=_loader_wait_s(setup, found.step_s))


def stages_of(question: StepTimeQuestion, columns: PlanBatch) -> Stages:
    """Return the pipeline stages of the first plan, for simulation."""
    setup = set_up(question, columns.select([0]))
    return stages_of_plan(setup, step_passes(setup))


def offloading(question: StepTimeQuestion, columns: PlanBatch) -> Offloading:
    """Return the bytes that each plan offloads and the seconds that this adds to its step."""
    setup = set_up(question, columns)
    passes = step_passes(setup)
    pipeline = pipeline_time(setup, passes)
    keys = ring(setup, passes)
    busy, exposed_s = setup.micro * pipeline.pace_s, exposed_data_s(setup, passes, pipeline, keys)
    return offloading_parts(setup, _free_host_link_s(setup, busy, exposed_s, keys))


def _free_host_link_s(setup: StepTimeSetup, busy: Floats, exposed_s: Floats, keys: Ring) -> Floats:
    """Return the seconds of a step during which the host's link is free for copies.

    `busy` is the seconds of passes, `exposed_s` those of collectives that neither passes nor
    context parallelism's `keys` hide. If collectives use the same link as copies, only the time in
    which no collective runs is free.
    """
    c = setup.columns
    if not (c.offload_parameters + c.offload_activations).any():
        return busy
    busy = busy + setup.micro * keys.exposed_s
    if setup.fabric.inside_bytes_per_s > setup.device.host_bytes_per_s:
        return busy + exposed_s
    sent_s = setup.micro * (keys.sent_s + keys.sent_back_s)
    return busy - np.clip(whole_data_s(setup) - exposed_s + sent_s, 0.0, busy)


def _sum_passes(setup: StepTimeSetup, passes: StepPasses, pipeline: PipelineTime) -> _Passes:
    matmuls, attention, tensor, device = (
        _mean_over_ranks_s(setup, passes, name)
        for name in ("products_s", "attention_s", "tensor_s", "device_s")
    )
    moved = np.maximum(device - matmuls - attention, 0.0)
    return _Passes(
        matmuls=matmuls,
        attention=attention,
        tensor=tensor,
        memory=moved + setup.micro * weight_traffic_s(setup),
        busy=setup.micro * pipeline.pace_s,
    )


def _mean_over_ranks_s(setup: StepTimeSetup, passes: StepPasses, name: str) -> Floats:
    """Return the seconds of one part of all passes, as the mean over ranks.

    `name` is the part's field in `PassTime`.
    """
    layers = passes.forward(name) + passes.backward(name)
    return setup.micro * (setup.layers * layers + passes.ends_part(name) / setup.columns.pp)


def _weight_gradient_share(passes: StepPasses) -> Floats:
    both_s = passes.forward("seconds") + passes.backward("seconds")
    return passes.backward("deferred_s") / np.maximum(both_s, 1e-30)


def _loader_wait_s(setup: StepTimeSetup, step_s: Floats) -> Floats:
    """Return the seconds that a step waits for loaders, which prefetch samples during the step."""
    c = setup.columns
    samples = c.micro_batch * setup.micro * c.data_parallel
    nodes = np.clip(c.ranks / setup.fabric.per_node, 1, c.data_parallel)
    loaded_s = samples * setup.question.seq_len / nodes / setup.question.loader_tokens_per_s
    return np.maximum(loaded_s - step_s, 0.0)
