"""Software stacks for training, with the traits that all of their plans share (stacks.json).

Step time depends on the training program: what it fuses, how it splits and overlaps collectives,
and what its recomputation modes mean. Memory traits of the programs are in
`planner/memory/framework_traits.py`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from outpace.catalog.tables import read_table
from outpace.records.base import Record

# How norms and rotations run without a compiler: one kernel each; several torch operators; or fused
# with activations and casts, as in Transformer Engine.
Elementwise = Literal["kernels", "operators", "fused"]
Attention = Literal["fused", "flash2", "flash3", "cudnn"]
# How tokens reach experts: every rank gets all tokens of its group; or each token is sent once per
# expert; or once per rank, and across the network once per node.
Dispatcher = Literal["allgather", "alltoall", "deepep"]
# What is replayed as CUDA graphs, rather than launched by the host: routers; attention, routers and
# dense MLPs, but not experts and their all-to-alls, whose sizes the host has to know; or all.
Graphs = Literal["none", "routers", "blocks", "step"]
# How operands of matmuls in 8 bits are cast: by separate kernels for the largest number, the cast
# and the transposed copy; or by Transformer Engine's kernel, which writes both copies, with scales
# from earlier steps, from this step (the largest numbers are found first), or per block (MXFP8).
Casts = Literal["separate", "delayed", "current", "blocks"]
# Implementations of context parallelism: outpace's, torch's context_parallel, and Transformer
# Engine's.
Ring = Literal["outpace", "torch", "engine"]
# How often a pipeline gathers sharded parameters in a pass: once for all forwards and once for all
# backwards, beside them; once, in the first micro-batch's forward; or for every micro-batch and
# once more. If not "twice", gradients are summed after the last backward.
StageGathers = Literal["twice", "once", "micro-batches"]
# Matmuls of experts: all of a layer at once; by Triton's kernels (scattermoe); or one after
# another in Python, each with a slice of all experts' weights (transformers 4's GraniteMoe).
Experts = Literal["grouped", "triton", "loop"]


class SoftwareStack(Record):
    """Traits of a training program: how it computes, communicates and saves memory.

    - `attention`: the kernel used where a model allows fused attention
    - `repeats_matmuls`: the matmuls of a block that selective recomputation repeats: none, every
      second 16-bit matmul (`second_matmuls`), or all
    - `collectives`: whether a block's parameters are gathered, and its gradients summed, together
      or one by one
    - `overlaps`: collectives run during computation
    - `broadcasts`: in ZeRO-1, ranks broadcast their updated parameters one after the other
    - `fuses_dropout`: bias, dropout and the residual sum are one kernel
    - `dispatcher`: how tokens reach experts, during computation of another micro-batch if
      `overlaps_dispatch`
    - `graphs`: what is replayed as CUDA graphs
    - `sums_by_stages`: each interleaved stage reduces gradients and gathers parameters while other
      stages compute
    - `experts`: how experts' matmuls are computed
    - `gathers_for_adapters`: where tensor parallelism overlaps a matmul with the gather of its
      input, an adapter on that matmul gathers the input again
    - `fuses_accumulation`: weight-gradient matmuls accumulate directly into fp32 buffers
    - `copies_units`: gathered buffers are copied into parameters, and gradients into reduction
      buffers
    - `blocks_launches`: the host waits for each kernel before it launches the next
      (CUDA_LAUNCH_BLOCKING=1)
    - `casts`: how operands of 8-bit matmuls are cast
    - `stops_early`: recomputation stops once everything that the backward reads exists, so a
      block's last matmul is not repeated (torch's checkpoint without `use_reentrant`, since torch
      2.1: torch/utils/checkpoint.py, set_checkpoint_early_stop). Blocks compiled by torch never
      recompute unread results
    - `gathers_fp8`: tensor parallelism casts inputs of 8-bit matmuls before it gathers them
    - `shards_fp8`: weights are cast before they are gathered
    - `scatters_sums`: overlapped tensor parallelism also overlaps the reduce-scatter of an input
      gradient to which several matmuls contribute
    - `ring`: the implementation of context parallelism
    - `gathers_keys`: context parallelism gathers the keys and values of all ranks at once instead
      of passing them around a ring
    - `repeats_keys`: before that gather, keys and values are repeated for all query heads
    - `stage_gathers`: how often pipelines gather sharded parameters in a pass
    - `copies_hidden`: sequence parallelism splits hidden states along their second dimension, so
      gathers and reduce-scatters copy them into and out of rank order
    - `pads_tokens`: for 8-bit matmuls, each expert's tokens are copied into padded buffers, and the
      results are copied back
    - `wraps_adapters`: each matrix of an adapter is a unit of FSDP
    """

    name: str
    attention: Attention = "fused"
    elementwise: Elementwise = "kernels"
    repeats_matmuls: Literal["none", "second", "all"] = "none"
    collectives: Literal["blocks", "parameters"] = "blocks"
    overlaps: bool = True
    broadcasts: bool = False
    fuses_dropout: bool = False
    dispatcher: Dispatcher = "alltoall"
    overlaps_dispatch: bool = False
    graphs: Graphs = "none"
    sums_by_stages: bool = False
    experts: Experts = "grouped"
    gathers_for_adapters: bool = False
    fuses_accumulation: bool = False
    copies_units: bool = False
    blocks_launches: bool = False
    casts: Casts = "separate"
    stops_early: bool = False
    gathers_fp8: bool = False
    shards_fp8: bool = False
    scatters_sums: bool = True
    ring: Ring = "outpace"
    gathers_keys: bool = False
    repeats_keys: bool = False
    stage_gathers: StageGathers = "twice"
    copies_hidden: bool = False
    pads_tokens: bool = False
    wraps_adapters: bool = False
    source: str


def _make_stack(name: str, source: list[str], **traits: Any) -> SoftwareStack:
    return SoftwareStack.parse({"name": name, "source": "; ".join(source), **traits}, name)


STACKS: Mapping[str, SoftwareStack] = MappingProxyType(
    {name: _make_stack(name, **values) for name, values in read_table("stacks").items()}
)
OUTPACE = STACKS["outpace"]
