"""Software stacks for training: traits that are the same for every plan, with sources.

A step's time depends on the program that runs it: what it fuses, how its collectives are split and
overlapped, and what its modes of recomputation mean. Its use of memory is in
`planner/memory/framework_traits.py`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

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
    """Traits of a training program.

    `attention`: the kernel that it uses where a model allows fused attention. `repeats_matmuls`:
    which of a block's matmuls its selective recomputation repeats: none, every second one in 16
    bits (`second_matmuls`), or all. `collectives`: whether a block's parameters are gathered, and
    its gradients summed, together or one by one. `overlaps`: these run during computation.
    `broadcasts`: under ZeRO-1, ranks send new parameters one after the other. `fuses_dropout`:
    bias, dropout and the residual sum are one kernel. `dispatcher`: how tokens reach experts,
    during computation of another micro-batch if `overlaps_dispatch`. `graphs`: what is replayed as
    CUDA graphs. `sums_by_stages`: each interleaved stage sums gradients and gathers parameters
    during passes of the others. `experts`: how their matmuls are computed. `gathers_for_adapters`:
    if a matmul overlaps the gather of its input over tensor parallelism, an adapter on it gathers
    the input again. `fuses_accumulation`: matmuls that give weights' gradients add them to fp32
    buffers. `copies_units`: gathered buffers are copied into parameters, and gradients into buffers
    to reduce. `blocks_launches`: the host waits for each kernel before it launches the next
    (CUDA_LAUNCH_BLOCKING=1). `casts`: how operands of matmuls in 8 bits are cast. `stops_early`:
    recomputation ends as soon as everything that the backward reads exists, so that a block's last
    matmul is not repeated (torch's checkpoint without `use_reentrant`, since torch 2.1:
    torch/utils/checkpoint.py, set_checkpoint_early_stop). Blocks compiled by torch never repeat
    what nothing reads. `gathers_fp8`: inputs of matmuls in 8 bits are cast before they are gathered
    over tensor parallelism, and `shards_fp8`: weights before they are gathered. `scatters_sums`:
    overlapped tensor parallelism also overlaps the scatter of an input's gradient that several
    matmuls add up to. `ring`: the implementation of its context parallelism. `gathers_keys`: keys
    and values of all ranks are gathered together, instead of passed on after each part;
    `repeats_keys`: before that, they are repeated for the heads of all queries. `stage_gathers`:
    how often pipelines gather sharded parameters in a pass. `copies_hidden`: sequence parallelism
    splits hidden states along their second dimension, so that gathers and reduce-scatters copy them
    into and from the order of ranks.
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
    source: str


def _stacks(*found: SoftwareStack) -> Mapping[str, SoftwareStack]:
    return MappingProxyType({stack.name: stack for stack in found})


STACKS: Mapping[str, SoftwareStack] = _stacks(
    SoftwareStack(
        name="outpace", broadcasts=True, copies_units=True, stops_early=True, copies_hidden=True,
        stage_gathers="micro-batches",
        source="outpace/nn (model_options.py: torch's checkpoint, use_reentrant=False), "
        "outpace/parallel; torch's fully_shard, as torchtitan; tensor.py: sequence parallelism "
        "splits the second dimension (Shard(1)); in pipelines blocks reshard after each forward, "
        "and torch/distributed/pipelining/stage.py keeps them whole after backwards",
    ),
    SoftwareStack(
        name="torchtitan", elementwise="operators", repeats_matmuls="second", copies_units=True,
        gathers_fp8=True, scatters_sums=False, ring="torch", gathers_keys=True,
        stage_gathers="once", copies_hidden=True,
        source="pytorch/torchtitan b5bcd76c66: torchtitan/models/llama/model.py (nn.RMSNorm, "
               "rotations by complex numbers in fp32, F.scaled_dot_product_attention), "
               "distributed/activation_checkpoint.py: selective recomputation (op) saves every "
               "second aten.mm of a block, attention and 8-bit matmuls; early_stop is False "
               "since 2025-08-29 (25413d224); FSDP2 gathers and sums by blocks, with prefetching "
               "(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: "
               "foreach_all_gather_copy_out by split_with_sizes_copy, "
               "foreach_reduce_scatter_copy_in by chunk_cat into the dtype of the sum); experts' "
               "tokens are sent by all_to_all_single (its standard dispatcher; DeepEP's is an "
               "option); float8.md: tensor parallelism gathers inputs in 8 bits by default; "
               "pytorch/pytorch, pull request 149946: torch's asynchronous tensor parallelism "
               "fuses no reduce-scatter of a backward, whose input is a sum of matmuls; "
               "torch/distributed/tensor/experimental/_attention.py: _AllGatherRotater by "
               "default; in pipelines reshard_after_forward is False, and "
               "torch/distributed/pipelining/stage.py calls FSDP's post_backward after the last "
               "backward; pull request 437 and torch/distributed/_functional_collectives.py: "
               "all_gather_tensor and reduce_scatter_tensor of dimension 1 chunk and concatenate",
    ),
    SoftwareStack(
        name="megatron", elementwise="fused", fuses_dropout=True, sums_by_stages=True,
        gathers_for_adapters=True, fuses_accumulation=True, casts="current", ring="engine",
        source="Megatron-LM, megatron/core: Transformer Engine's norms, rotations, casts "
               "(weights' in a step's first micro-batch, is_first_microbatch) and attention "
               "(cuDNN's), bias_swiglu_fusion, bias_dropout_fusion, gradient_accumulation_fusion "
               "(extensions/transformer_engine.py: fuse_wgrad_accumulation, into main_grad); "
               "gradients are reduced and parameters gathered in buckets during computation "
               "(--overlap-grad-reduce, --overlap-param-gather); "
               "transformer/moe/token_dispatcher.py: --moe-token-dispatcher-type alltoall, as "
               "its MoE guide advises; pipeline_parallel/schedules.py, "
               "forward_backward_pipelining_with_interleaving: param_sync_func of a stage at the "
               "first micro-batch of the one before, grad_sync_func at its last; NeMo, "
               "nemo/collections/nlp/modules/common/megatron/adapters/mcore_mixins.py: "
               "return_layernorm_output_gathered except with ub_overlap_ag, where adapters "
               "gather themselves; NVIDIA/TransformerEngine 0064fbd6, "
               "pytorch/csrc/quantizer.cpp: Float8CurrentScalingQuantizer (--fp8-recipe "
               "tensorwise, which outpace writes)",
    ),
    SoftwareStack(
        name="megatron-lm", fuses_dropout=True, ring="engine",
        source="Megatron-LM of 2021 and 2022, arXiv 2104.04473, §4.2 (bias and GELU, and bias, "
               "dropout and addition, are one kernel each) and 2205.05198: fused layer norms; "
               "local DDP. gradient_accumulation_fusion came on 2022-02-13 (83b1e42f30), for "
               "fp16 gradients only on 2022-09-27 (07916bf245); it is taken as off, since the "
               "table of 2021 and Megatron-DeepSpeed use older code, and the table of 2022 "
               "trains in fp16",
    ),
    SoftwareStack(
        name="deepspeed", attention="flash2", elementwise="operators",
        source="deepspeedai/DeepSpeed, runtime/zero/partitioned_param_coordinator.py: parameters "
               "of the modules ahead are gathered together, during computation. "
               "AllGatherCoalescedHandle.wait (partition_parameters.py) also copies them by "
               "torch.cat under ZeRO-3; this is not counted: copies_units stands for FSDP2's "
               "casts and copies under ZeRO-2, too, which DeepSpeed does not have, and no "
               "measured step is of this version",
    ),
    SoftwareStack(
        name="deepspeed-2021", attention="flash2", collectives="parameters", overlaps=False,
        broadcasts=True,
        source="DeepSpeed 0.3 and 0.4, runtime/zero/partition_parameters.py: _allgather_param of "
        "each parameter, waited for before its module (all_gather's copies into a list of outputs "
        "are not counted); stage3.py: gradients are reduced by parameters as they are partitioned",
    ),
    SoftwareStack(
        name="accelerate", attention="fused", elementwise="operators", copies_units=True,
        stops_early=True, ring="torch",
        source="huggingface/accelerate, FSDP2 (fully_shard) over transformers' modules: RMS norms "
        "and rotations of several operators, SDPA; utils/fsdp_utils.py, fsdp2_apply_ac: torch's "
        "checkpoint_wrapper, which is not reentrant by default; torch's context_parallel, whose "
        "keys are passed on (alltoall) as outpace writes it, and gathered by default",
    ),
    SoftwareStack(
        name="nanotron", attention="flash2", elementwise="fused", collectives="parameters",
        overlaps=False,
        source="huggingface/nanotron 2411b022a7: flash-attn's attention, norms and rotations; "
        "optim/zero.py and optim/gradient_accumulator.py: gradients and parameters are reduced and "
        "gathered parameter by parameter, after the backward and after the step",
    ),
    SoftwareStack(
        name="internevo", attention="flash2", elementwise="fused", overlaps=False, broadcasts=True,
        source="InternLM/InternEvo c628a8c874, internlm/solver/optimizer/hybrid_zero_optim.py: "
        "buckets of 512 Mi elements, so that a model of 7 billion has a few, the last of which are "
        "reduced in step(); parameters are broadcast by each rank that owns some "
        "(overlap_sync_param is off in configs/7B_sft.py); flash-attn's attention, apex's norms",
    ),
    SoftwareStack(
        name="composer", attention="flash2", casts="delayed", stops_early=True,
        source="mosaicml/llm-foundry 12a631913c: low-precision layer norms, FSDP by blocks; "
        "scripts/train/benchmarking/submit_benchmarks.py: activation_checkpointing_reentrant is "
        "False; amp_fp8 by Transformer Engine, with DelayedScaling (composer/core/precision.py)",
    ),
    SoftwareStack(
        name="trainer", attention="fused", elementwise="operators", stops_early=True,
        source="huggingface/transformers: models/llama/modeling_llama.py (norms and rotations of "
        "several operators), SDPA; modeling_utils.py: use_reentrant is False unless it is set "
        "(5.23; True in 4)",
    ),
)  # fmt: skip
OUTPACE = STACKS["outpace"]
