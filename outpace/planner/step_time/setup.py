"""Inputs of a step's terms: bytes per number, a rank's parameters, distinct layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outpace.catalog.stacks import OUTPACE, SoftwareStack
from outpace.planner.hardware.device import DeviceRates, dtype_of, items
from outpace.planner.hardware.links import Fabric
from outpace.planner.model.outline import layer_parameters, outside_elements, weights
from outpace.planner.plan_batch import PRECISIONS, Floats, PlanBatch
from outpace.planner.step_time.adapters import Adapters, adapter_products
from outpace.planner.step_time.layer import Cells, Kernel
from outpace.records.outline import Outline
from outpace.records.precisions import AUTOCAST, SHARD_DTYPES, WEIGHTS
from outpace.records.strategies import FULLY_SHARDED

FP32 = 4.0


@dataclass(frozen=True)
class StepTimeQuestion:
    """A model on a machine, and the attention kernel there.

    `loader_tokens_per_s` is what a node loads beside computing. `other_program`: it is
    not outpace that trains. Ranks that split parameters have their residual stream in 16 bits
    whatever keeps the weights (torch's FSDP without autocast, Megatron-LM), where outpace's is fp32
    under autocast; and the loss is taken eagerly, of a vocabulary that is not padded. `stack` is
    the software that trains. `adapters` are what is trained where weights are frozen, if the
    plans do not say.
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

    @property
    def attention(self) -> Kernel:
        """Return the attention kernel: the stack's, if it is fused."""
        return self.stack.attention if self.kernel == "fused" else self.kernel


@dataclass(frozen=True)
class PassTime:
    """Pass of one micro-batch: seconds on the device, on the host, and waiting for other ranks.

    `weights_s` are the device's for gradients of weights, which some schedules put off.

    A host runs ahead of its accelerator, so that a pass takes what the slower of them takes; where
    both are one (`alone`), it takes what both take.
    """

    device_s: Floats
    host_s: Floats
    tensor_s: Floats
    products_s: Floats
    attention_s: Floats
    weights_s: Floats
    alone: bool

    @property
    def seconds(self) -> Floats:
        if self.alone:
            return self.device_s + self.tensor_s + self.host_s
        return np.maximum(self.device_s + self.tensor_s, self.host_s)


def of_stacks(passes: Sequence[PassTime], shares: Floats, name: str) -> Floats:
    """Return a sum over all stacks, each by its share of the layers."""
    found: Floats = np.sum(
        [share * getattr(one, name) for share, one in zip(shares, passes, strict=True)], axis=0
    )
    return found


class StepTimeSetup:
    """Values of all plans at once, one entry each."""

    def __init__(self, question: StepTimeQuestion, columns: PlanBatch) -> None:
        planned = columns.common_adapters
        if planned is not None:
            adapters = adapter_products(planned, question.outline)
            question = replace(question, adapters=adapters)
        self.q, self.c = question, columns
        self.outline, self.device, self.fabric = question.outline, question.device, question.fabric
        self._sizes()
        self._cells()
        self.micro = columns.microbatches * columns.passes

    def _sizes(self) -> None:
        """Bytes of numbers, and parameters of a rank before data parallelism shards them."""
        c = self.c
        self.item = items(c.precision)
        replicas = c.dp_replicate * c.dp_shard * c.cp
        splits = c.strategy_in(*FULLY_SHARDED) | (c.strategy_in("3d") & (replicas > 1))
        splits = splits | (c.offload_parameters > 0)
        casts = self.q.other_program & c.strategy_in(*FULLY_SHARDED, "3d")
        autocast = c.precision_in(*AUTOCAST) & ~casts
        self.wide = np.where(autocast, FP32, self.item)
        # Replayed as CUDA graphs by outpace (records.compiled.graph_obstacle), and micro-batches
        # of which all read one cast of the weights.
        own = (self.device.kind == "cuda") & (not self.q.other_program)
        away = c.offload_activations + c.offload_parameters + c.offload_optimizer > 0
        again = c.modes[:, 0] < 1
        drops = any(stack.dropout for stack in self.outline.stacks)
        self.replays = own & c.strategy_in("single") & c.compile & ~away & ~c.in_backward
        self.replays = self.replays & ~(again & drops) | self.q.stack.graphs
        shared = c.strategy_in("single", "ddp", "zero1") & (c.offload_parameters == 0)
        self.shares_casts = own & shared & ~again & ~c.in_backward & ~c.compile
        # Weights are cast for products by autocast, or where they lie before they are gathered.
        self.autocast = autocast & ~splits
        self.cast_shards = c.precision_in(*SHARD_DTYPES) & splits & ~casts
        low = c.precision_in(*WEIGHTS) & ~c.holds_masters()
        self.kept = np.where(low, 2.0, FP32)
        layers, more = np.zeros(len(c)), np.zeros(len(c))
        for stack in self.outline.stacks:
            experts = sum(w.elements for w in weights(stack, self.outline.hidden) if w.experts)
            rest = layer_parameters(stack, self.outline.hidden) - experts
            layers = layers + stack.layers * (rest / c.tp + experts / (c.ep * c.etp))
            # Who shares out experts shards as well: of what is sharded ep is a part, with as many
            # of tp's ranks as have whole experts.
            alone = np.where(c.zero > 0, c.ep * c.etp / c.tp, 1)
            more = more + stack.layers * experts * (alone - 1) / (c.ep * c.etp)
        ends = outside_elements(self.outline) / c.tp
        # A pipeline's ends have the embedding and the head; the fuller one decides.
        self.parameters = layers / c.pp + np.where(
            c.pp > 1, ends / (1 if self.outline.tied else 2), ends
        )
        self.owned = self.parameters + more / c.pp
        self.trained = self.parameters
        if self.q.adapters is not None:
            self.trained = self.q.adapters.parameters(self.outline) / (c.tp * c.pp)
            self.owned = self.trained

    @property
    def alone(self) -> bool:
        return self.device.kind == "cpu"

    def _cells(self) -> None:
        c = self.c
        rates = np.array([self.device.rate(dtype_of(name)) for name in PRECISIONS])
        split = np.where(c.sequence_parallel, c.tp, 1)
        keys = np.stack(
            [rates[c.precision], self.item, self.wide, c.micro_batch, c.tp, c.cp, c.ep, c.etp,
             split, c.compile], axis=1,
        ).astype(float)  # fmt: skip
        unique, self.of = np.unique(keys, axis=0, return_inverse=True)
        software = self.q.stack
        self.cells = replace(
            Cells(*unique.T), elementwise=software.elementwise,
            fuses_dropout=software.fuses_dropout, dispatcher=software.dispatcher,
            experts=software.experts, adapters=self.q.adapters,
        )  # fmt: skip
        self.tokens = c.micro_batch * self.q.seq_len / c.cp

    def spread(self, values: Floats) -> Floats:
        """Return each plan's value from its cell."""
        return np.broadcast_to(values, self.cells.rate.shape)[self.of]

    def exposed_s(self, comm_s: Floats, compute_s: Floats, units: Floats) -> Floats:
        """Return what is exposed of communication in equal parts, all but one with company."""
        exposed = np.maximum(comm_s / units, comm_s - compute_s * (units - 1) / units)
        hides = self.device.hides if self.q.stack.overlaps else 0.0
        found: Floats = comm_s - hides * (comm_s - exposed)
        return found
