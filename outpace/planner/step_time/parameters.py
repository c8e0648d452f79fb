"""Time that a rank's parameters cost: casts, the optimizer's step, offloading."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from outpace.planner.plan_batch import MODES, Floats
from outpace.planner.step_time.optimizer import optimizer_s
from outpace.planner.step_time.setup import FP32, StepTimeSetup


@dataclass(frozen=True)
class Offloading:
    """A rank's bytes and seconds of a step that offloading takes, one entry a plan.

    `weights_s` and `activations_s` are what passes do not hide of copies over the host's link,
    `optimizer_s` is gradients and new weights on it, `host_step_s` the step of AdamW on the host.
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


class Parameters(StepTimeSetup):
    """Work on parameters beside the passes, or on a pipeline's ranks within them."""

    def weight_traffic_s(self) -> Floats:
        """Return, of a micro-batch: weights cast for products, gradients cast back and added up.

        Where ranks split parameters each casts its shard before it is gathered, and all gradients
        as they are copied to the buffer that they are reduced in. Frozen weights are kept as they
        are multiplied, or unpacked; but outpace's autocast casts those of 32 bits each time.
        """
        if self.q.adapters is not None:
            whole = self.q.adapters.base_bytes is None and not self.q.other_program
            cast = np.where(self.autocast & whole, 6.0, 0.0)
            frozen_s: Floats = self.parameters * cast / self.device.memory_bytes_per_s
            return frozen_s
        # Weights are read in 4 bytes and written in 2, gradients the other way round; of weights
        # that micro-batches share the cast of (train.step), once a step.
        once = np.where(self.shares_casts, self.micro, 1)
        cast = np.where(self.autocast, 6.0 + 6.0 / once, 0.0)
        shards = np.where(self.c.zero > 0, self.c.dp_shard * self.c.cp, 1)
        cast = np.where(self.cast_shards, 6.0 + 6.0 / shards, cast)
        # Of bf16 into fp32: what is added is read in 2 bytes, the sum read and written in 4.
        wide = self.c.precision_in("bf16-master") & ~self.c.holds_masters()
        add = np.where(self.micro > 1, np.where(wide, 10.0, 3 * self.kept), 0.0)
        seconds: Floats = self.parameters * (cast + add) / self.device.memory_bytes_per_s
        return seconds

    def optimizer_step_s(self, ahead_s: Floats) -> Floats:
        """Return the time of the optimizer's traffic, launches and products for a shard.

        `ahead_s`: what a GPU has still to do when its host begins to launch the optimizer.
        """
        shards = np.where(self.c.zero > 0, self.c.dp_shard * self.c.cp, 1)
        return optimizer_s(
            self.outline, self.device, self.fabric, self.c, self.owned / shards,
            ahead_s if self.device.kind == "cuda" and not self.q.other_program else None,
        )  # fmt: skip

    def offloading_s(self, busy: Floats) -> Floats:
        """Return the time of copies over the host's link that passes do not hide."""
        found = self.offloading(busy)
        total: Floats = np.sum([getattr(found, name) for name in Offloading.SECONDS], axis=0)
        return total

    def offloading(self, busy: Floats) -> "Offloading":
        """Return the parts of `offloading_s`. `busy`: seconds of passes, which hide copies."""
        c = self.c
        shards = np.where(c.zero > 0, c.dp_shard * c.cp, 1)
        own = self.owned / shards
        link = self.device.host_bytes_per_s
        gathers = np.where(c.pp > 1, c.passes, self.micro)
        weights = np.where(c.offload_parameters > 0, 2 * gathers * own * self.kept, 0.0)
        activations = np.where(c.offload_activations > 0, 2 * self.micro * self._saved_bytes(), 0.0)
        state = np.where(c.offload_optimizer > 0, own * (self.kept + FP32), 0.0)
        elsewhere = np.maximum(c.offload_optimizer, c.offload_parameters)
        host_step = own * 7 * FP32 / self.device.host_memory_bytes_per_s
        disk = np.where(elsewhere > 1, own * 2 * 3 * FP32, 0.0)
        return Offloading(
            weights_bytes=weights,
            weights_s=np.maximum(weights / link - busy, 0.0),
            activations_bytes=activations,
            activations_s=np.maximum(activations / link - busy, 0.0),
            optimizer_bytes=state,
            optimizer_s=state / link,
            host_step_s=np.where(elsewhere > 0, host_step, 0.0),
            disk_bytes=disk,
            disk_s=disk / self.device.disk_bytes_per_s,
        )

    def _saved_bytes(self) -> Floats:
        """Bytes that a rank's blocks keep of a micro-batch for the backward.

        Inputs and outputs of norms and what products read: queries, keys, values and their mix,
        and of the MLP what its activation reads and gives (Korthikanti et al., arXiv 2205.05198,
        §4.1, without scores). A block that is computed again keeps its input alone; with
        "attention" the mix as well, with "selective" what products gave.
        """
        c, hidden = self.c, self.outline.hidden
        modes = {name: c.modes[:, place] for place, name in enumerate(MODES)}
        total = np.zeros(len(c))
        for stack in self.outline.stacks:
            a, m = stack.attention, stack.mlp
            mix = 0 if a is None else a.heads * a.value_dim
            read = (
                0 if a is None else a.heads * a.head_dim + a.kv_heads * (a.head_dim + a.value_dim)
            )
            inner = 0 if m is None else m.width * (m.active if m.experts else 1) + m.shared
            products = (read + mix + inner * (2 if m is not None and m.gated else 1)) / c.tp
            activated = inner * (2 if m is not None and m.gated else 1) / c.tp
            everything = 4 * hidden + products + activated
            each = (
                modes["none"] * everything
                + modes["selective"] * (2 * hidden + products)
                + modes["attention"] * (hidden + mix / c.tp)
                + modes["full"] * hidden
            )
            total = total + stack.layers / c.pp * each
        saved: Floats = total * self.tokens * self.item
        return saved
