"""Inputs of the step-time terms: bytes per element, a rank's parameters, and distinct layers."""

import math
from dataclasses import dataclass, replace

import numpy as np

from outpace.catalog.stacks import OUTPACE, SoftwareStack
from outpace.planner.hardware.device import DeviceRates, dtype_of, items
from outpace.planner.hardware.links import Fabric
from outpace.planner.model.outline import layer_parameters, outside_elements, weights
from outpace.planner.plan_columns import (
    MODES,
    PRECISIONS,
    Bools,
    Floats,
    Ints,
    PlanBatch,
    distinct_rows,
)
from outpace.planner.step_time.adapters import Adapters, adapter_matmuls
from outpace.planner.step_time.layer import Cells, Kernel
from outpace.records.outline import Outline
from outpace.records.precisions import AUTOCAST, SHARD_DTYPES, WEIGHTS
from outpace.records.strategies import FULLY_SHARDED

FP32 = 4.0


@dataclass(frozen=True)
class StepTimeQuestion:
    """A model on a machine and the software that trains it, whose step time is asked.

    - `kernel`: the attention kernel.
    - `loader_tokens_per_s`: the rate at which a node loads data while it computes.
    - `other_program`: the trainer is not outpace. If it shards parameters, its residual stream has
      16 bits, regardless of the dtype of stored weights (torch's FSDP without autocast,
      Megatron-LM), whereas outpace's is fp32 under autocast. Its loss is not compiled, and its
      vocabulary is not padded.
    - `stack`: the speed of the software.
    - `adapters`: adapters that are trained on frozen weights, unless the plans specify some.
    - `uneven`: some experts get most of the tokens, as with trained routers (a power law with
      exponent 1.2). Otherwise, all get the same number.
    """

    outline: Outline
    seq_len: int
    device: DeviceRates
    fabric: Fabric
    kernel: Kernel = "fused"
    loader_tokens_per_s: float = math.inf
    other_program: bool = False
    stack: SoftwareStack = OUTPACE
    adapters: Adapters | None = None
    uneven: bool = False

    @property
    def attention(self) -> Kernel:
        """Return the attention kernel that is used.

        "fused" means the kernel that the software uses by default. The result is "unfused" if the
        device has no fused kernel.
        """
        if not self.device.fused_attention:
            return "unfused"
        return self.stack.attention if self.kernel == "fused" else self.kernel


@dataclass(frozen=True)
class Numbers:
    """Bytes per element of a plan's tensors, and which plans cast them.

    `item` is for matmul operands, `wide` for the residual stream, and `kept` for stored gradients.
    Weights are cast for matmuls by `autocast`, or as shards before the gather (`casts_shards`).
    `shares_casts`: all micro-batches use the same cast.
    """

    item: Floats
    wide: Floats
    kept: Floats
    autocast: Bools
    casts_shards: Bools
    shares_casts: Bools


@dataclass(frozen=True)
class RankParameters:
    """Numbers of a rank's parameters before data parallelism shards them.

    - `present`: parameters with which the rank computes.
    - `trained`: those of them that have gradients.
    - `owned`: parameters of which the rank has a shard. They differ from `present` because ranks
      that divide experts also shard them.
    - `packed`: those of `present` that are gathered in fewer bits than matmuls use. They are the
      matrices of blocks, without biases, that are stored in 4 bits for adapters or cast to 8 bits.
    """

    present: Floats
    owned: Floats
    trained: Floats
    packed: Floats


@dataclass(frozen=True)
class StepTimeSetup:
    """Values of all plans, one entry per plan.

    `replays`: whole passes are CUDA graphs. `cells` are the distinct combinations of the values
    that a layer's time depends on, and `cell` is the index of each plan's combination. `tokens` is
    the number of tokens in a micro-batch on a rank, `micro` the number of micro-batches in a step.
    """

    question: StepTimeQuestion
    columns: PlanBatch
    numbers: Numbers
    parameters: RankParameters
    replays: Bools
    cells: Cells
    cell: Ints
    tokens: Floats
    micro: Ints

    @property
    def outline(self) -> Outline:
        return self.question.outline

    @property
    def device(self) -> DeviceRates:
        return self.question.device

    @property
    def fabric(self) -> Fabric:
        return self.question.fabric

    @property
    def layers(self) -> Floats:
        """Return the mean number of layers per rank."""
        return self.outline.layers / self.columns.pp

    @property
    def shards(self) -> Ints:
        """Return the number of ranks over which states are sharded."""
        c = self.columns
        return np.where(c.zero > 0, c.dp_shard * c.cp, 1)

    @property
    def gathers(self) -> Floats:
        """Return the number of times that a step gathers each sharded parameter."""
        c, each = self.columns, self.question.stack.stage_gathers
        in_pass: Floats = (c.microbatches + 1).astype(np.float64)
        if each != "micro-batches":
            in_pass = np.full_like(in_pass, 1.0 if each == "once" else 2.0)
        found: Floats = np.where(c.pp > 1, c.passes * in_pass, 2.0 * self.micro)
        return found

    def spread(self, values: Floats) -> Floats:
        """Return one value per plan, given one value per entry of `cells`.

        Many plans share an entry.
        """
        return np.broadcast_to(values, self.cells.rate.shape)[self.cell]

    @property
    def stops_early(self) -> Bools:
        """Return which plans do not recompute a block's last matmul if nothing reads its result.

        Blocks compiled by torch leave it out (Transformer Engine's blocks are not compiled).
        Without a compiler, a checkpoint can end once all tensors that the backward reads are saved
        again. A matmul's operands are saved before it is computed, so it is skipped; in 8 bits,
        with packed weights, or with an adapter, they are saved afterwards, so it is not.
        """
        c, stack, adapters = self.columns, self.question.stack, self.question.adapters
        if adapters is not None and ("down" in adapters.targets or adapters.base_bytes is not None):
            return np.zeros(len(c), bool)
        compiled = c.compile & (stack.elementwise != "fused")
        stops: Bools = compiled | (stack.stops_early & ~c.precision_in("fp8"))
        return stops

    def hides(self, matmuls: Floats | float) -> Floats:
        """Return the fraction of a collective's time that computation beside it hides.

        `matmuls` is the fraction of that computation spent in matmuls. A collective takes
        multiprocessors from other kernels and slows them down. Matmuls that run as persistent
        kernels then take `beside_collectives` times as long.
        """
        if not self.question.stack.overlaps:
            return np.zeros(len(self.columns))
        hides, slower = self.device.hides, self.device.beside_collectives
        shared: Floats = hides + matmuls * (np.minimum(hides, 1 / slower) - hides)
        return np.broadcast_to(shared, len(self.columns))

    @property
    def wraps_adapters(self) -> Bools:
        """Return which plans make each matrix of an adapter an FSDP unit."""
        wrapped: Bools = (self.columns.zero == 3) & self.question.stack.wraps_adapters
        return wrapped

    def exposed_s(
        self, comm_s: Floats, compute_s: Floats, units: Floats, matmuls: Floats | float = 0.0
    ) -> Floats:
        """Return the time of communication that computation does not hide.

        The communication is sent in a number of equal parts, `units`, of which all but one can
        overlap the computation of `compute_s` seconds. `matmuls` is the fraction of this
        computation spent in matmuls.
        """
        exposed = np.maximum(comm_s / units, comm_s - compute_s * (units - 1) / units)
        return comm_s - self.hides(matmuls) * (comm_s - exposed)


def set_up(question: StepTimeQuestion, columns: PlanBatch) -> StepTimeSetup:
    """Return the values of the step-time model for every plan."""
    c = columns
    planned = c.common_adapters
    if planned is not None:
        question = replace(question, adapters=adapter_matmuls(planned, question.outline))
    numbers = _make_numbers(question, c)
    cells, cell = _distinct_cells(question, c, numbers)
    return StepTimeSetup(
        question=question,
        columns=c,
        numbers=numbers,
        parameters=_count_parameters(question, c),
        replays=_replays_graphs(question, c),
        cells=cells,
        cell=cell,
        tokens=c.micro_batch * question.seq_len / c.cp,
        micro=c.microbatches * c.passes,
    )


def _make_numbers(question: StepTimeQuestion, columns: PlanBatch) -> Numbers:
    c = columns
    item = items(c.precision)
    several = c.dp_replicate * c.dp_shard * c.cp > 1
    splits = c.strategy_in(*FULLY_SHARDED) | (c.strategy_in("3d") & several)
    splits = splits | (c.offload_parameters > 0)
    casts = question.other_program & c.strategy_in(*FULLY_SHARDED, "3d")
    autocast = c.precision_in(*AUTOCAST) & ~casts
    low = c.precision_in(*WEIGHTS) & ~c.holds_masters()
    whole = c.strategy_in("single", "ddp", "zero1") & (c.offload_parameters == 0)
    plain = ~_recomputes(c) & ~c.in_backward & ~c.compile
    return Numbers(
        item=item,
        wide=np.where(autocast, FP32, item),
        kept=np.where(low, 2.0, FP32),
        autocast=autocast & ~splits,
        casts_shards=c.precision_in(*SHARD_DTYPES)
        & (splits & ~casts | casts & question.stack.copies_units & (c.zero > 1)),
        shares_casts=_trains_on_gpu(question) & whole & plain,
    )


def _replays_graphs(question: StepTimeQuestion, columns: PlanBatch) -> Bools:
    """Return which plans' passes are replayed as CUDA graphs (`graph_obstacle`)."""
    c = columns
    away = c.offload_activations + c.offload_parameters + c.offload_optimizer > 0
    drops = any(stack.dropout for stack in question.outline.stacks)
    own = _trains_on_gpu(question) & c.strategy_in("single") & c.compile & ~away & ~c.in_backward
    return own & ~(_recomputes(c) & drops) | (question.stack.graphs == "step")


def _trains_on_gpu(question: StepTimeQuestion) -> bool:
    """Return whether the trainer is outpace and the device is a GPU."""
    return question.device.kind == "cuda" and not question.other_program


def _recomputes(columns: PlanBatch) -> Bools:
    return columns.modes[:, MODES.index("none")] < 1


def _count_parameters(question: StepTimeQuestion, columns: PlanBatch) -> RankParameters:
    c, outline = columns, question.outline
    layers, more, matrices = np.zeros(len(c)), np.zeros(len(c)), np.zeros(len(c))
    for stack in outline.stacks:
        experts = sum(w.elements for w in weights(stack, outline.hidden) if w.experts)
        rest = layer_parameters(stack, outline.hidden) - experts
        layers = layers + stack.layers * (rest / c.tp + experts / (c.ep * c.etp))
        for w in weights(stack, outline.hidden):
            if w.name != "router":
                cut = c.ep * c.etp if w.experts else c.tp
                matrices = matrices + stack.layers * w.inputs * w.outputs * max(1, w.experts) / cut
        # ep is a part of the sharding ranks, and so are the tp ranks that have whole experts.
        alone = np.where(c.zero > 0, c.ep * c.etp / c.tp, 1)
        more = more + stack.layers * experts * (alone - 1) / (c.ep * c.etp)
    ends = outside_elements(outline) / c.tp
    # The first and the last stage have the embedding or the head; the larger of these counts.
    present = layers / c.pp + np.where(c.pp > 1, ends / (1 if outline.tied else 2), ends)
    if question.adapters is None:
        cast = c.precision_in("fp8") & question.stack.shards_fp8
        packed = np.where(cast, matrices / c.pp, 0.0)
        return RankParameters(present, owned=present + more / c.pp, trained=present, packed=packed)
    trained = question.adapters.parameters(outline) / (c.tp * c.pp)
    packed = matrices / c.pp * (question.adapters.base_bytes is not None)
    return RankParameters(present, owned=trained, trained=trained, packed=packed)


def _distinct_cells(
    question: StepTimeQuestion, columns: PlanBatch, numbers: Numbers
) -> tuple[Cells, Ints]:
    """Return the distinct inputs of a layer's time, and the index of each plan's inputs."""
    c, software = columns, question.stack
    rates = np.array([question.device.rate(dtype_of(name)) for name in PRECISIONS])
    split = np.where(c.sequence_parallel, c.tp, 1)
    sizes = [c.precision, numbers.wide.astype(np.int64), c.micro_batch, c.tp, c.cp, c.ep, c.etp,
             split, c.compile.astype(np.int64)]  # fmt: skip
    first, cell = distinct_rows(sizes)
    rate, item, wide, samples, tp, cp, ep, etp, norm_split = (
        np.asarray(values, float)[first]
        for values in (rates[c.precision], numbers.item, numbers.wide, c.micro_batch, c.tp, c.cp,
                       c.ep, c.etp, split)
    )  # fmt: skip
    cells = Cells(
        rate, item, wide, samples, tp, cp, ep, etp, norm_split, c.compile[first],
        elementwise=software.elementwise, fuses_dropout=software.fuses_dropout,
        dispatcher=software.dispatcher, experts=software.experts, graphs=software.graphs,
        uneven=question.uneven,
        fuses_accumulation=software.fuses_accumulation, casts=software.casts,
        adapters=question.adapters, repeats_keys=software.repeats_keys,
        shards_fp8=software.shards_fp8, pads_tokens=software.pads_tokens,
    )  # fmt: skip
    return cells, cell
