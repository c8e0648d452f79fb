"""Seconds of a micro-batch's passes through a layer, the embedding and the head, on one rank."""

from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from outpace.catalog import efficiency
from outpace.planner.model.outline import weights
from outpace.planner.plan_columns import MODES, Floats
from outpace.planner.step_time.layer import LayerWork, embedding, head, layer
from outpace.planner.step_time.setup import StepTimeSetup
from outpace.records.outline import Stack

# Additional operators when a block is recomputed: the states of the host's and the device's random
# generators are saved, set and restored (torch.utils.checkpoint).
_CHECKPOINT_OPERATORS = 6


@dataclass(frozen=True)
class PassTime:
    """One pass (forward or backward) of a micro-batch: its seconds on the device and on the host.

    `tensor_s` is the exposed communication of tensor parallelism. If the schedule defers weight
    gradients to a pass of their own, `weights_s` and `weights_host_s` are their part of the
    device's and the host's time. A host launches kernels ahead of its accelerator, so a pass takes
    the time of the slower of the two. If the device is the host itself, or the host waits for each
    kernel (`alone`), it takes the sum.
    """

    device_s: Floats
    host_s: Floats
    tensor_s: Floats
    products_s: Floats
    attention_s: Floats
    weights_s: Floats
    weights_host_s: Floats
    alone: bool

    @property
    def seconds(self) -> Floats:
        return self.deferred_s + self._pass_s(
            self.device_s + self.tensor_s - self.weights_s, self.host_s - self.weights_host_s
        )

    @property
    def idle_s(self) -> Floats:
        """Return the seconds in which the device waits for the host."""
        if self.alone:
            return np.zeros_like(self.device_s)
        return self.seconds - self.device_s - self.tensor_s

    @property
    def deferred_s(self) -> Floats:
        """Return the seconds of a pass for deferred weight gradients; 0 if there are none."""
        return self._pass_s(self.weights_s, self.weights_host_s)

    def _pass_s(self, device_s: Floats, host_s: Floats) -> Floats:
        return device_s + host_s if self.alone else np.maximum(device_s, host_s)


@dataclass(frozen=True)
class _TensorCollectives:
    """Seconds of one layer's collectives over tp ranks.

    - `sums_s`: the collectives that sum partial results, and `calls` the number that the host
      launches.
    - `gather_s`, `scatter_s`: one all-gather of hidden states, and one reduce-scatter.
    - `last_s`: the collective that sums a layer's output.
    - `gathers_s`, `gathers_copied_s`: the gathers that selective recomputation repeats, and the
      copies that they need.
    - `alone_s`: reduce-scatters of the backward that no matmul overlaps.
    - `copied_s`, `copied_back_s`: copies of hidden states before and after the collectives of a
      forward and of a backward.
    - `last_copied_s`: the copies for the collective that sums a layer's output.
    """

    sums_s: Floats
    calls: Floats
    gather_s: Floats
    scatter_s: Floats
    last_s: Floats
    gathers_s: Floats
    gathers_copied_s: Floats
    alone_s: Floats
    copied_s: Floats
    copied_back_s: Floats
    last_copied_s: Floats


@dataclass(frozen=True)
class EndPasses:
    """Passes of one micro-batch through everything before the layers and after them."""

    embedding: PassTime
    embedding_back: PassTime
    head: PassTime
    head_back: PassTime

    @property
    def first_s(self) -> Floats:
        """Return the seconds of the embedding's forward and backward."""
        return self.embedding.seconds + self.embedding_back.seconds

    @property
    def last_s(self) -> Floats:
        """Return the seconds of the head's forward and backward."""
        return self.head.seconds + self.head_back.seconds


@dataclass(frozen=True)
class StepPasses:
    """Passes of one micro-batch through a layer of each stack, the embedding and the head.

    `shares` are the stacks' fractions of the layers. Backwards include recomputation.
    """

    shares: Floats
    forwards: list[PassTime]
    backwards: list[PassTime]
    ends: EndPasses

    def forward(self, name: str) -> Floats:
        """Return one field of `PassTime`, by name, for an average layer's forward."""
        return _mean_over_layers(self.forwards, self.shares, name)

    def backward(self, name: str) -> Floats:
        """Return one field of `PassTime`, by name, for an average layer's backward."""
        return _mean_over_layers(self.backwards, self.shares, name)

    def ends_part(self, name: str) -> Floats:
        """Return one field of `PassTime`, by name, summed over embedding and head."""
        ends = self.ends
        passes = (ends.embedding, ends.embedding_back, ends.head, ends.head_back)
        found: Floats = np.sum([getattr(one, name) for one in passes], axis=0)
        return found


def step_passes(setup: StepTimeSetup) -> StepPasses:
    """Return the passes of one micro-batch for every plan."""
    counts = np.array([stack.layers for stack in setup.outline.stacks], float)
    forwards, backwards, one = [], [], _tensor_collectives(setup)
    for stack in setup.outline.stacks:
        work = layer(
            setup.device, setup.outline, stack, setup.cells, setup.question.seq_len,
            setup.question.attention,
        )  # fmt: skip
        w = LayerWork(**{f.name: setup.spread(getattr(work, f.name)) for f in fields(work)})
        count, inputs = _count_tp_reductions(setup, stack), _count_adapter_gathers(setup, stack)
        alone = _count_unoverlapped_scatters(setup, stack)
        gathers = count * _repeats_gathers(setup)
        gathered_s, beside_s, whole_s = _hidden_state_copies_s(setup)
        tensor = _TensorCollectives(
            sums_s=count * one.sums_s,
            calls=count * one.calls + inputs,
            gather_s=inputs * one.gather_s,
            scatter_s=inputs * one.scatter_s,
            last_s=one.last_s,
            gathers_s=gathers * one.gather_s,
            gathers_copied_s=gathers * gathered_s,
            alone_s=alone * one.scatter_s,
            copied_s=count * (gathered_s + beside_s),
            copied_back_s=count * gathered_s + (count - alone) * beside_s + alone * whole_s,
            last_copied_s=beside_s,
        )
        forwards.append(_forward_pass(setup, w, tensor))
        backwards.append(_backward_pass(setup, w, tensor))
    return StepPasses(counts / counts.sum(), forwards, backwards, _end_passes(setup))


def _mean_over_layers(passes: list[PassTime], shares: Floats, name: str) -> Floats:
    found: Floats = np.sum(
        [share * getattr(one, name) for share, one in zip(shares, passes, strict=True)], axis=0
    )
    return found


def _count_tp_reductions(setup: StepTimeSetup, stack: Stack) -> Floats:
    mlp, c = stack.mlp, setup.columns
    cut = np.full(len(c), mlp is not None)
    if mlp is not None and mlp.experts and not mlp.shared:
        cut = c.etp == c.tp
    attention = 0.0 if stack.attention is None else 1.0
    return attention + np.where(cut, 1.0, 0.0)


def _repeats_gathers(setup: StepTimeSetup) -> Floats:
    """Return the fraction of blocks whose recomputation repeats the gathers of matmuls' inputs.

    These are blocks with selective recomputation under sequence parallelism. Stacks whose selective
    mode repeats matmuls list the operators whose results are saved, and the list has
    reduce-scatters but no gathers (torchtitan 820504e, models/llama3/infra/parallelize.py,
    _save_list).
    """
    selective = setup.columns.modes[:, MODES.index("selective")]
    repeats = setup.question.stack.repeats_matmuls != "none"
    found: Floats = selective * setup.columns.sequence_parallel * repeats
    return found


def _count_unoverlapped_scatters(setup: StepTimeSetup, stack: Stack) -> Floats:
    """Return the number of reduce-scatters in a layer's backward that no matmul can overlap.

    Input gradients are sums over several matmuls: queries, keys and values, or both matmuls of a
    gated MLP. Some programs overlap a reduce-scatter only with the matmul whose result it sends.
    """
    c = setup.columns
    if setup.question.stack.scatters_sums:
        return np.zeros(len(c))
    gated = stack.mlp is not None and stack.mlp.gated
    cut = _count_tp_reductions(setup, stack) - (stack.attention is not None)
    count = (stack.attention is not None) + (cut if gated else 0.0)
    return np.where(c.async_tp & c.sequence_parallel, count, 0.0)


def _count_adapter_gathers(setup: StepTimeSetup, stack: Stack) -> Floats:
    c, adapters = setup.columns, setup.question.adapters
    if adapters is None or not setup.question.stack.gathers_for_adapters:
        return np.zeros(len(c))
    own = weights(stack, setup.outline.hidden)
    names = [weight.name for weight in own if weight.cut == "outputs"]
    count = sum(adapters.targets[name].number for name in names if name in adapters.targets)
    return np.where(c.sequence_parallel & c.async_tp, float(count), 0.0)


def _forward_pass(setup: StepTimeSetup, w: LayerWork, tensor: _TensorCollectives) -> PassTime:
    return PassTime(
        device_s=w.forward_s + tensor.copied_s + setup.wraps_adapters * w.units_s,
        host_s=_launch_s(setup, w.forward_operators + tensor.calls),
        tensor_s=_exposed_tensor_s(setup, tensor.sums_s, w.products_s) + tensor.gather_s,
        products_s=w.products_s,
        attention_s=w.attention_s,
        weights_s=np.zeros_like(w.forward_s),
        weights_host_s=np.zeros_like(w.forward_s),
        alone=_alternates_with_host(setup),
    )


def _backward_pass(setup: StepTimeSetup, w: LayerWork, tensor: _TensorCollectives) -> PassTime:
    """Return a layer's backward, including recomputation, by the fractions of recomputation modes.

    "full" blocks recompute everything, "attention" blocks everything except attention, and
    "selective" blocks memory-bound operators, such as norms and activations, and the matmuls that
    the stack's selective mode repeats. Some stacks do not recompute a block's last matmul and its
    tp reduction.
    """
    modes = {name: setup.columns.modes[:, place] for place, name in enumerate(MODES)}
    full, dense = modes["full"], modes["attention"]
    most, stack = full + dense, setup.question.stack
    last_s = np.where(setup.stops_early, w.last_s, 0.0)
    light_s = np.maximum(w.forward_s - w.products_s - w.inner_s, 0.0)
    none_s = np.zeros_like(last_s)
    repeated = {"none": none_s, "second": w.second_s, "all": w.products_s - last_s}
    second_s = modes["selective"] * repeated[stack.repeats_matmuls]
    again_s = most * (w.forward_s - last_s) - dense * w.inner_s + modes["selective"] * light_s
    copied_s = tensor.copied_s - np.where(last_s > 0, tensor.last_copied_s, 0.0)
    again_s = again_s + second_s + most * copied_s + tensor.copied_back_s
    again_s = again_s + tensor.gathers_copied_s
    again = most * (w.forward_operators + _CHECKPOINT_OPERATORS) - dense * w.inner_operators
    sums_s = tensor.sums_s - np.where(last_s > 0, tensor.last_s, 0.0)
    again_tensor_s = _exposed_tensor_s(setup, sums_s, w.products_s - last_s) + tensor.gather_s
    # Frozen weights have no gradients.
    own = 2.0 if setup.question.adapters is None else 1.0
    beside_s = tensor.sums_s - tensor.alone_s
    tensor_s = (
        _exposed_tensor_s(setup, beside_s, own * w.products_s) + tensor.alone_s + tensor.scatter_s
    )
    launched = w.backward_operators * efficiency.BACKWARD_SHARE + again + tensor.calls * (1 + most)
    splits = setup.columns.splits_backward()
    deferred = np.where(splits, w.weights_operators * efficiency.BACKWARD_SHARE, 0.0)
    units_s = setup.wraps_adapters * (w.units_back_s + most * w.units_s)
    return PassTime(
        device_s=w.backward_s + again_s + units_s,
        host_s=_launch_s(setup, launched),
        tensor_s=tensor_s
        + most * again_tensor_s
        + _exposed_tensor_s(setup, tensor.gathers_s, second_s),
        products_s=(own + most) * w.products_s - most * last_s + second_s,
        attention_s=w.attention_back_s + full * w.attention_s,
        weights_s=np.where(splits, w.weights_s, 0.0),
        weights_host_s=_launch_s(setup, deferred),
        alone=_alternates_with_host(setup),
    )


def _alternates_with_host(setup: StepTimeSetup) -> bool:
    """Return whether the device is the host itself, or the host waits for every kernel."""
    return setup.device.kind == "cpu" or setup.question.stack.blocks_launches


def _launch_s(setup: StepTimeSetup, operators: Floats) -> Floats:
    return np.where(setup.replays, 0.0, operators * setup.device.operator_s)


def _tensor_collectives(setup: StepTimeSetup) -> _TensorCollectives:
    """Return the tp collectives that sum the partial results of one matmul, such as the MLP's last.

    With sequence parallelism, they are an all-gather and a reduce-scatter with the same total bytes
    as an all-reduce (Korthikanti et al., arXiv 2205.05198, §4.2); the gathered tensor may have been
    cast to 8 bits. All other times in the result are 0.
    """
    c, fabric = setup.columns, setup.fabric
    nbytes = setup.tokens * setup.outline.hidden * setup.numbers.item
    near = np.ones_like(c.tp)
    whole = fabric.sum_s(nbytes, c.tp, near)
    eight = c.precision_in("fp8") & setup.question.stack.gathers_fp8
    gather_s, scatter_s = (
        fabric.gather_s(nbytes / np.where(eight, setup.numbers.item, 1.0), c.tp, near),
        fabric.scatter_s(nbytes, c.tp, near),
    )
    calls = np.where(c.tp > 1, np.where(c.sequence_parallel, 2.0, 1.0), 0.0)
    sums_s = np.where(c.sequence_parallel, gather_s + scatter_s, whole)
    last_s = np.where(c.sequence_parallel, scatter_s, whole)
    none = np.zeros_like(sums_s)
    return _TensorCollectives(sums_s, calls, gather_s, scatter_s, last_s, *[none] * 6)


def _hidden_state_copies_s(setup: StepTimeSetup) -> tuple[Floats, Floats, Floats]:
    """Return the seconds to copy hidden states for one gather or reduce-scatter over tp ranks.

    In order: a gather; a reduce-scatter that overlaps a matmul, after which ranks add up what they
    received; a reduce-scatter without overlap. A gather that overlaps a matmul copies only one
    rank's part. A gather without overlap copies nothing if a micro-batch has one sample.
    """
    c, rate = setup.columns, setup.device.memory_bytes_per_s
    if not setup.question.stack.copies_hidden:
        none = np.zeros(len(c))
        return none, none, none
    nbytes = np.where(c.sequence_parallel & (c.tp > 1), setup.tokens * setup.outline.hidden, 0.0)
    nbytes = nbytes * setup.numbers.item
    eight = c.precision_in("fp8") & setup.question.stack.gathers_fp8
    gathered = 2 * nbytes / np.where(eight, setup.numbers.item, 1.0)
    gathered = np.where(c.async_tp, gathered / c.tp, np.where(c.micro_batch > 1, gathered, 0.0))
    beside = np.where(c.async_tp, 1 + 1 / c.tp, 2.0) * nbytes
    return gathered / rate, beside / rate, 2 * nbytes / rate


def _exposed_tensor_s(setup: StepTimeSetup, sums_s: Floats, products_s: Floats) -> Floats:
    """Return the time of a layer's tp collectives that matmuls do not hide.

    Only with async_tp do matmuls hide them: each collective is then sent in as many parts as there
    are tp ranks, while its matmul computes.
    """
    c = setup.columns
    beside_s = setup.exposed_s(sums_s, products_s, c.tp.astype(float))
    return np.where(c.async_tp, beside_s, sums_s)


def _end_passes(setup: StepTimeSetup) -> EndPasses:
    zero = np.zeros(len(setup.columns))
    found = []
    for part in (embedding, partial(head, outpace_loss=not setup.question.other_program)):
        work = part(setup.device, setup.outline, setup.cells, setup.question.seq_len)
        for seconds, matmuls, share in (
            (work.forward_s, work.products_s, 1.0),
            (work.backward_s, work.products_back_s, efficiency.BACKWARD_SHARE),
        ):
            device_s, products_s = setup.spread(seconds), setup.spread(matmuls)
            host_s = _launch_s(setup, setup.spread(work.operators) * share)
            alone = _alternates_with_host(setup)
            found.append(PassTime(device_s, host_s, zero, products_s, zero, zero, zero, alone))
    return EndPasses(*found)
