"""Time of work on a rank's parameters: casts, the optimizer's step and offloading."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from outpace.planner.plan_columns import MODES, Floats
from outpace.planner.step_time.optimizer import optimizer_s
from outpace.planner.step_time.setup import FP32, StepTimeSetup


@dataclass(frozen=True)
class Offloading:
    """Bytes that a rank offloads and the seconds that offloading adds to a step, by plan.

    `weights_s` and `activations_s` are the times of copies over the host's link that passes do not
    hide. `optimizer_s` is the time to copy gradients and new weights, `host_step_s` the time of
    AdamW's step on the host.
    """

    SECONDS: ClassVar[tuple[str, ...]] = (
        "weights_s", "activations_s", "optimizer_s", "host_step_s", "disk_s"
    )  # fmt: skip

    weights_bytes: Floats
    weights_s: Floats
    activations_bytes: Floats
    activations_s: Floats
    optimizer_bytes: Floats
    optimizer_s: Floats
    host_step_s: Floats
    disk_bytes: Floats
    disk_s: Floats

    @property
    def seconds(self) -> Floats:
        """Return the total seconds that offloading adds to a step."""
        total: Floats = np.sum([getattr(self, name) for name in self.SECONDS], axis=0)
        return total


def weight_traffic_s(setup: StepTimeSetup) -> Floats:
    """Return the seconds per micro-batch to cast weights and to cast and accumulate gradients.

    If parameters are sharded, each rank casts its shard before the gather, and casts all gradients
    when they are copied to the reduction buffer; gathered parameters are copied out of their
    buffer. If matmuls accumulate gradients themselves, the only cost is to fill buffers with zeros.
    Frozen weights are stored in the matmul dtype or unpacked to it; outpace also casts frozen fp32
    weights, or their shards, each time.
    """
    c, numbers = setup.columns, setup.numbers
    present, rate = setup.parameters.present, setup.device.memory_bytes_per_s
    if setup.question.adapters is not None:
        each = np.where(numbers.autocast, 6.0, 0.0)
        each = np.where(numbers.casts_shards, 6.0 / setup.shards, each)
        packed, base = setup.parameters.packed, setup.question.adapters.base_bytes or 0.0
        copies = _count_buffer_copies(setup)
        each = each * (not setup.question.other_program) + copies * c.shard_bytes()[0]
        frozen_s: Floats = ((present - packed) * each + packed * copies * base) / rate
        return frozen_s
    # Weights are read in 4 bytes and written in 2, and gradients vice versa. If micro-batches
    # share the cast of weights (train.step), it happens once a step.
    once = np.where(numbers.shares_casts, setup.micro, 1)
    cast = np.where(numbers.autocast, 6.0 + 6.0 / once, 0.0)
    cast = np.where(numbers.casts_shards, 6.0 + 6.0 / setup.shards, cast)
    # Adding bf16 to fp32 reads 2 bytes of the addend, and reads and writes 4 of the sum.
    wide = c.precision_in("bf16-master") & ~c.holds_masters()
    add = np.where(setup.micro > 1, np.where(wide, 10.0, 3 * numbers.kept), 0.0)
    if setup.question.stack.fuses_accumulation:
        add = FP32 / setup.micro
    packed, width = setup.parameters.packed, c.shard_bytes()[0]  # packed: gathered in 8 bits
    copied = _count_buffer_copies(setup) * ((present - packed) * width + packed)
    seconds: Floats = (present * (cast + add) + copied) / rate
    return seconds


def _count_buffer_copies(setup: StepTimeSetup) -> Floats:
    """Return how often gathered parameters are read and written to copy them, per micro-batch.

    Each gather is copied out of its buffer, by a read and a write. In a pipeline, several
    micro-batches may use one gather.
    """
    c = setup.columns
    before_forwards = np.where(c.pp > 1, c.passes / setup.micro, 1.0)
    found = np.select(
        [c.zero == 3, c.zero == 2], [setup.gathers / setup.micro, before_forwards], 0.0
    )
    copies: Floats = 2 * found * setup.question.stack.copies_units
    return copies


def optimizer_step_s(setup: StepTimeSetup, ahead_s: Floats) -> Floats:
    """Return the seconds of the optimizer's step on a rank's shard.

    `ahead_s` is the work that a GPU still has when its host begins to launch the optimizer.
    """
    runs_ahead = setup.device.kind == "cuda" and not setup.question.other_program
    return optimizer_s(
        setup.outline, setup.device, setup.fabric, setup.columns,
        setup.parameters.owned / setup.shards, ahead_s if runs_ahead else None,
    )  # fmt: skip


def offloading_parts(setup: StepTimeSetup, free_s: Floats) -> Offloading:
    """Return the bytes and seconds of each part of offloading.

    Copies over the host's link are hidden for `free_s` of a step: first copies of weights, then, in
    the remaining time, copies of activations.
    """
    c, kept = setup.columns, setup.numbers.kept
    own = setup.parameters.owned / setup.shards
    link = setup.device.host_bytes_per_s
    weights = np.where(c.offload_parameters > 0, setup.gathers * own * kept, 0.0)
    saved = 2 * setup.micro * _offloaded_activation_bytes(setup)
    activations = np.where(c.offload_activations > 0, saved, 0.0)
    state = np.where(c.offload_optimizer > 0, own * (kept + FP32), 0.0)
    elsewhere = np.maximum(c.offload_optimizer, c.offload_parameters)
    host_step = own * 7 * FP32 / setup.device.host_memory_bytes_per_s
    disk = np.where(elsewhere > 1, own * 2 * 3 * FP32, 0.0)
    left_s = np.maximum(free_s - weights / link, 0.0)
    # Activations are copied to the host during forwards, while weights come from it; in the
    # backward, both come from it.
    one_way = np.maximum(activations - weights, 0.0) / 2
    return Offloading(
        weights_bytes=weights,
        weights_s=np.maximum(weights / link - free_s, 0.0),
        activations_bytes=activations,
        activations_s=np.maximum((activations / 2 + one_way) / link - left_s, 0.0),
        optimizer_bytes=state,
        optimizer_s=state / link,
        host_step_s=np.where(elsewhere > 0, host_step, 0.0),
        disk_bytes=disk,
        disk_s=disk / setup.device.disk_bytes_per_s,
    )


def _offloaded_activation_bytes(setup: StepTimeSetup) -> Floats:
    """Return the bytes that a rank's blocks offload per micro-batch for the backward.

    They are inputs and outputs of norms and inputs of matmuls: queries, keys, values and their
    weighted sum, and the input and output of the MLP's activation (Korthikanti et al., arXiv
    2205.05198, §4.1, without scores). A recomputed block offloads only its input: the outputs that
    "attention" and "selective" keep stay on the device
    (nn.torch_versions.without_saved_tensor_hooks).
    """
    c, hidden = setup.columns, setup.outline.hidden
    whole = c.modes[:, MODES.index("none")]
    total = np.zeros(len(c))
    for stack in setup.outline.stacks:
        a, m = stack.attention, stack.mlp
        mix = 0 if a is None else a.heads * a.value_dim
        read = 0 if a is None else a.heads * a.head_dim + a.kv_heads * (a.head_dim + a.value_dim)
        inner = 0 if m is None else m.width * (m.active if m.experts else 1) + m.shared
        inners = inner * (2 if m is not None and m.gated else 1)
        everything = 4 * hidden + (read + mix + 2 * inners) / c.tp
        each = whole * everything + (1 - whole) * hidden
        total = total + stack.layers / c.pp * each
    return total * setup.tokens * setup.numbers.item
