"""Memory traits of trainers: outpace, Megatron-LM, DeepSpeed and Lightning's FSDP.

A plan says which axes and options are used. The traits, each with its source, say how a trainer
implements them; they hold for any plan.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class FrameworkTraits:
    """Memory traits of one trainer, which hold for any plan.

    - `chunks_loss`: large logits are split into chunks.
    - `softmax_in_place`: a single fp32 copy of the logits becomes the softmax and then its
      gradient.
    - `regathers_inputs`: with sequence parallelism, a rank saves only its shard of a matmul's
      input, and gathers the input again in the backward.
    - `main_gradients`: bytes per element of a permanent gradient buffer, which is sharded only if
      weights are. None means that the plan's strategy decides, as in outpace.
    - `shards_by_element`: ZeRO-1 splits parameters by elements, not as whole parameters, over data
      and context parallelism.
    - `reuses_receive_buffer`: a pipeline has one receive buffer for all micro-batches, and frees
      tensors that it has sent.
    - `accumulates_unsharded`: with sharded weights and gradient accumulation, gradients stay
      unsharded until the last backward.
    - `gradient_copies`: bytes per element of copies of all of a rank's gradients that exist at once
      in the optimizer's step, without the fp32 gradients.
    - `fuses_norms`: a norm is one kernel even if tensor parallelism splits its tokens.
    - `fuses_gates`: a gated MLP's activation and product are one kernel, which saves only its
      inputs.
    - `repeats_matmuls`: the matmuls of a block that selective recomputation repeats instead of
      saving their results (see `catalog.stacks`).
    - `reduce_buffer`: bytes of a separate buffer in which gradients are reduced.
    """

    chunks_loss: bool = True
    softmax_in_place: bool = False
    regathers_inputs: bool = False
    main_gradients: int | None = None
    shards_by_element: bool = False
    reuses_receive_buffer: bool = False
    accumulates_unsharded: bool = False
    fuses_norms: bool = False
    fuses_gates: bool = False
    repeats_matmuls: Literal["none", "second", "all"] = "none"
    gradient_copies: int = 0
    reduce_buffer: int = 0


OUTPACE = FrameworkTraits()
# megatron-core 0.16.1. Logits: tensor_parallel/cross_entropy.py. Inputs: Korthikanti et al., arXiv
# 2205.05198, §4.2.2. Gradients: distributed/param_and_grad_buffer.py; training/arguments.py has
# --bf16 add them up in fp32 unless --grad-reduce-in-bf16 is given, --fp16 in 16 bits. Optimizer:
# docs, "Distributed Optimizer": 6 + 12/d bytes a parameter in bf16, 18 without, 4 + 16/d and 20 in
# fp16. Pipelines: pipeline_parallel/p2p_communication.py; schedules.py, deallocate_output_tensor.
# Norms are Transformer Engine's or apex's; fusions/fused_bias_swiglu.py, SwiGLUFunction: saves what
# enters (--no-bias-swiglu-fusion turns it off).
MEGATRON_BF16 = FrameworkTraits(
    chunks_loss=False,
    softmax_in_place=True,
    regathers_inputs=True,
    main_gradients=4,
    shards_by_element=True,
    reuses_receive_buffer=True,
    fuses_norms=True,
    fuses_gates=True,
)
MEGATRON_FP16 = replace(MEGATRON_BF16, main_gradients=2)
# DeepSpeed of February 2022 (2151c787a). runtime/fp16/fused_optimizer.py, FP16_Optimizer.step: the
# list of all gradients cast to fp32 beside the flat tensor of them. runtime/zero/stage_1_and_2.py:
# gradients are reduced in a copy of up to 500 million; step flattens a rank's part of them, and
# casts that to fp32.
DEEPSPEED_FP16 = replace(MEGATRON_FP16, gradient_copies=4, reduce_buffer=10**9)
DEEPSPEED_FP16_ZERO1 = replace(DEEPSPEED_FP16, gradient_copies=2)
# Besides fp32 sums of gradients, those in bf16 of the last micro-batch are kept and set to zero
# (edaa7221, runtime/bf16_optimizer.py, clear_lp_grads).
DEEPSPEED_BF16 = replace(MEGATRON_BF16, main_gradients=6)
# Micro-batches before the last are under no_sync (Fabric.no_backward_sync), where FSDP "will
# accumulate the full model gradients" (torch 2.13, FullyShardedDataParallel.no_sync), including
# those of frozen weights in the same flat parameter as trained weights (fsdp/_wrap_utils.py, which
# warns).
LIGHTNING_FSDP = FrameworkTraits(accumulates_unsharded=True)
