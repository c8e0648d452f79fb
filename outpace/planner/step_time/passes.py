"""Seconds of a micro-batch's passes through a layer, the embedding and the head, on one rank."""

from dataclasses import fields
from functools import partial

import numpy as np

from outpace.catalog import efficiency
from outpace.planner.model.outline import weights
from outpace.planner.plan_batch import MODES, Floats
from outpace.planner.step_time.layer import LayerWork, embedding, head, layer
from outpace.planner.step_time.setup import PassTime, StepTimeSetup
from outpace.records.outline import Stack

# Of a block that is computed again: states of random numbers are kept, set, and set back, on the
# host and the device (torch.utils.checkpoint).
_CHECKPOINT_OPERATORS = 6


class Passes(StepTimeSetup):
    """Forward and backward passes, with recomputation and the waits of tensor parallelism."""

    def layer_passes(self) -> tuple[list[PassTime], list[PassTime]]:
        """Return each stack's layer: a forward, and a backward with what it recomputes."""
        forwards, backwards = [], []
        for stack in self.outline.stacks:
            work = layer(self.device, self.outline, stack, self.cells, self.q.seq_len,
                         self.q.attention)  # fmt: skip
            w = LayerWork(**{f.name: self.spread(getattr(work, f.name)) for f in fields(work)})
            sums = self._sums(stack)
            whole = self._adapter_inputs(stack)
            forwards.append(self._forward(w, sums, whole))
            backwards.append(self._backward(w, sums, whole))
        return forwards, backwards

    def _sums(self, stack: Stack) -> Floats:
        """Return a layer's sums over tp: of attention, and of an MLP that tp cuts."""
        mlp = stack.mlp
        cut = np.full(len(self.c), float(mlp is not None))
        if mlp is not None and mlp.experts and not mlp.shared:
            cut = (self.c.etp == self.c.tp).astype(float)
        return float(stack.attention is not None) + cut

    def _adapter_inputs(self, stack: Stack) -> Floats:
        """Return how many adapters gather their inputs from tp's ranks for themselves."""
        adapters, none = self.q.adapters, np.zeros(len(self.c))
        if adapters is None or not self.q.stack.gathers_for_adapters:
            return none
        own = weights(stack, self.outline.hidden)
        names = [weight.name for weight in own if weight.cut == "outputs"]
        count = sum(adapters.targets[name].number for name in names if name in adapters.targets)
        return np.where(self.c.sequence_parallel & self.c.async_tp, float(count), none)

    def _forward(self, w: LayerWork, sums: Floats, whole: Floats) -> PassTime:
        tensor_s, calls = self._tensor(sums, w.products_s)
        tensor_s, calls = tensor_s + whole * self._halves()[0], calls + whole
        host_s = self._launched_s(w.forward_operators + calls)
        none = np.zeros_like(w.forward_s)
        return PassTime(
            w.forward_s, host_s, tensor_s, w.products_s, w.attention_s, none, self.alone
        )

    def _backward(self, w: LayerWork, sums: Floats, whole: Floats) -> PassTime:
        """Recomputation by its shares of the blocks: all of a block, or all but attention itself.

        What "selective" computes again moves memory, as norms and activations do; of products it
        has none, or what the stack's own mode has.
        """
        modes = {name: self.c.modes[:, place] for place, name in enumerate(MODES)}
        full, dense = modes["full"], modes["attention"]
        most = full + dense
        light_s = np.maximum(w.forward_s - w.products_s - w.inner_s, 0.0)
        some = modes["selective"] * self.q.stack.recomputed_products
        again_s = most * w.forward_s - dense * w.inner_s + modes["selective"] * light_s
        again_s = again_s + some * w.products_s
        again = most * (w.forward_operators + _CHECKPOINT_OPERATORS) - dense * w.inner_operators
        again_tensor_s, calls = self._tensor(sums, w.products_s)
        gather_s, scatter_s = self._halves()
        again_tensor_s, calls = again_tensor_s + whole * gather_s, calls + whole
        # Frozen weights have no gradients of their own.
        own = 2.0 if self.q.adapters is None else 1.0
        tensor_s = self._tensor(sums, own * w.products_s)[0] + whole * scatter_s
        launched = w.backward_operators * efficiency.BACKWARD_SHARE + again + calls * (1 + most)
        return PassTime(
            w.backward_s + again_s,
            self._launched_s(launched),
            tensor_s + most * again_tensor_s,
            (own + most + some) * w.products_s,
            w.attention_back_s + full * w.attention_s,
            w.weights_s,
            self.alone,
        )

    def _launched_s(self, operators: Floats) -> Floats:
        """Return the host's time to launch operators; a CUDA graph is launched at once."""
        seconds: Floats = np.where(self.replays, 0.0, operators * self.device.operator_s)
        return seconds

    def _tensor(self, sums: Floats, products_s: Floats) -> tuple[Floats, Floats]:
        """Return collectives of tensor parallelism in a layer's forward, and how many.

        A sum after attention and one after the MLP; with sequence parallelism each is a gather and
        a scattering sum, of the same bytes together (Korthikanti et al., arXiv 2205.05198, §4.2).
        With async_tp each proceeds in tp parts beside the product that it is for.
        """
        c = self.c
        nbytes = self.tokens * self.outline.hidden * self.item
        whole = self.fabric.sum_s(nbytes, c.tp, np.ones_like(c.tp))
        gather_s, scatter_s = self._halves()
        halves = gather_s + scatter_s
        calls = np.where(c.tp > 1, np.where(c.sequence_parallel, 2.0, 1.0), 0.0)
        all_to_all_s = sums * np.where(c.sequence_parallel, halves, whole)
        exposed_s = np.where(
            c.async_tp, self.exposed_s(all_to_all_s, products_s, c.tp.astype(float)), all_to_all_s
        )
        return exposed_s, sums * calls

    def _halves(self) -> tuple[Floats, Floats]:
        """Return seconds to gather a micro-batch's hidden states over tp, and to sum and spread."""
        nbytes = self.tokens * self.outline.hidden * self.item
        near = np.ones_like(self.c.tp)
        gather_s = self.fabric.gather_s(nbytes, self.c.tp, near)
        return gather_s, self.fabric.scatter_s(nbytes, self.c.tp, near)

    def end_passes(self) -> tuple[PassTime, PassTime, PassTime, PassTime]:
        """Return embedding and head, forward and backward."""
        zero = np.zeros(len(self.c))
        found = []
        for part in (embedding, partial(head, outpace_loss=not self.q.other_program)):
            work = part(self.device, self.outline, self.cells, self.q.seq_len)
            for seconds, products, share in (
                (work.forward_s, work.products_s, 1.0),
                (work.backward_s, work.products_back_s, efficiency.BACKWARD_SHARE),
            ):
                device_s, products_s = self.spread(seconds), self.spread(products)
                host_s = self._launched_s(self.spread(work.operators) * share)
                found.append(PassTime(device_s, host_s, zero, products_s, zero, zero, self.alone))
        return found[0], found[1], found[2], found[3]
