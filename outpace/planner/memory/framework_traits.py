"""Memory that a trainer holds whatever its plan is: outpace, Megatron-LM, Lightning's FSDP.

The memory formula knows a plan by its axes and options. How a program goes about them, which none
of these says, stands here, each with where that is said or seen.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Habits:
    """Use of memory by one program.

    `chunks_loss`: large logits are taken in chunks. `softmax_in_place`: of logits there is one copy
    in fp32, which becomes the softmax and then its gradient. `gathers_again`: under sequence
    parallelism a rank keeps its share of what products read. `main_gradients`: gradients are added
    up in a buffer of that many bytes each, there from the first step to the last, and weights are
    whole unless a plan shards them; None: as outpace's strategies do. `cuts_evenly`: zero1 gives
    out elements, over data and context parallelism, not whole parameters. `receives_anew`: a
    pipeline has a buffer for what is received now, not for each micro-batch, and lets go of what
    it has sent. `sums_whole`: where weights are sharded and micro-batches add up, gradients are
    whole until the last one's backward.
    """

    chunks_loss: bool = True
    softmax_in_place: bool = False
    gathers_again: bool = False
    main_gradients: int | None = None
    cuts_evenly: bool = False
    receives_anew: bool = False
    sums_whole: bool = False


OUTPACE = Habits()
# megatron-core 0.16.1. Logits: tensor_parallel/cross_entropy.py. Inputs: Korthikanti et al., arXiv
# 2205.05198, §4.2.2. Gradients: distributed/param_and_grad_buffer.py; training/arguments.py has
# --bf16 add them up in fp32 unless --grad-reduce-in-bf16 is said, --fp16 in 16 bits. Optimizer:
# docs, "Distributed Optimizer": 6 + 12/d bytes a parameter in bf16, 18 without, 4 + 16/d and 20 in
# fp16. Pipelines: pipeline_parallel/p2p_communication.py; schedules.py, deallocate_output_tensor.
MEGATRON_BF16 = Habits(
    chunks_loss=False,
    softmax_in_place=True,
    gathers_again=True,
    main_gradients=4,
    cuts_evenly=True,
    receives_anew=True,
)
MEGATRON_FP16 = replace(MEGATRON_BF16, main_gradients=2)
# Micro-batches before the last are under no_sync (Fabric.no_backward_sync), where FSDP "will
# accumulate the full model gradients" (torch 2.13, FullyShardedDataParallel.no_sync); of a frozen
# weight, too, that is in one flat parameter with trained ones (fsdp/_wrap_utils.py, which warns).
LIGHTNING_FSDP = Habits(sums_whole=True)
