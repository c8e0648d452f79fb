"""Training loops as users would write them with PyTorch's own engines, for comparison.

They use the same model class, loss kernel, optimizer and batches as outpace, and nothing else. Each
factory gets a prepared job (`outpace.jobs.train.build.PreparedRun`) and returns a function that
turns a batch into gradients and their norm, clips the gradients, and returns the loss.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

CLIP = 1.0
Step = Callable[[dict], float]


def bare_loop(ready) -> Iterator[None]:
    """Run a step each time the next item is requested."""
    job = ready.job
    model, step = _MAKERS[job.plan.strategy](job)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    for batch in batches(job):
        step(batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def batches(job) -> Iterator[dict]:
    """Yield the same samples in the same order as outpace, all selected before the first step."""
    import numpy as np

    data, plan, whole = job.inputs.train_data, job.plan, job.settings.global_batch
    share = whole // plan.readers
    keys = data.locate(job.settings.seed, np.arange(job.total_steps * whole))
    for begin in range(plan.data_rank(job.ranks.rank) * share, len(keys), whole):
        yield data.__getitems__(keys[begin : begin + share])


def _objective(job):
    """Return the objective with the same weights as outpace's, which depend only on the seed."""
    from outpace.nn.loss import LanguageModelObjective
    from outpace.nn.transformer import Transformer

    dtype = {"fp32": None, "bf16": torch.bfloat16}[job.plan.precision]
    return LanguageModelObjective(Transformer(job.inputs.spec, job.settings.seed), "auto", dtype)


def _whole(job) -> tuple[nn.Module, Step]:
    """Build one process, replicas or shards; they differ in how the objective is wrapped."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    objective = _objective(job)
    model = objective.model
    wrapped = objective
    if job.plan.strategy == "ddp":
        wrapped = DistributedDataParallel(objective, gradient_as_bucket_view=True)
    elif job.plan.strategy == "zero3":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(objective)
    dtype = objective.compute_dtype

    def step(batch: dict) -> float:
        with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
            loss_sum, count = wrapped(batch)
        (loss_sum / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        return loss_sum.item()

    return model, step


def _pipeline(job) -> tuple[nn.Module, Step]:
    """Build a stage on each rank, with the tied embedding on the first and the last."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    from outpace.nn.loss import linear_loss_sum
    from outpace.nn.model_part import Part, take_part
    from outpace.planner.pipeline.stages import layers_per_stage

    plan, spec, seq_len = job.plan, job.inputs.spec, job.inputs.seq_len
    rank, last = job.ranks.rank, plan.pp - 1
    counts = layers_per_stage(spec, plan.pp)
    blocks = range(sum(counts[:rank]), sum(counts[: rank + 1]))
    module = take_part(_objective(job).model, Part(blocks, rank == 0, rank == last))
    hidden = torch.empty(plan.micro_batch, seq_len, spec.hidden, device="meta", requires_grad=True)
    tokens = torch.empty(plan.micro_batch, seq_len, dtype=torch.int64, device="meta")
    stage = PipelineStage(module, rank, plan.pp, torch.device("cpu"),
                          input_args=hidden if rank else tokens, output_args=hidden)  # fmt: skip
    targets = job.settings.global_batch * seq_len

    def loss(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = module.head_weight
        return linear_loss_sum(hidden.flatten(0, 1), weight, None, target.flatten()) / targets

    schedule = ScheduleGPipe(stage, plan.pp_microbatches, loss_fn=loss, scale_grads=False)
    ends = dist.new_group([0, last]) if spec.tied else None

    def step(batch: dict) -> float:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch["tokens"])
        elif rank == last:
            schedule.step(target=batch["targets"], losses=losses, return_outputs=False)
        else:
            schedule.step()
        counted = list(module.parameters())
        if ends is not None and rank in (0, last):
            dist.all_reduce(module.embed.tokens.weight.grad, group=ends)
            if rank:
                counted = [p for p in counted if p is not module.embed.tokens.weight]
        square = nn.utils.get_total_norm([p.grad for p in counted]).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(module.parameters(), CLIP, square.sqrt())
        return sum(loss.item() for loss in losses)

    return module, step


def _tensor(job) -> tuple[nn.Module, Step]:
    """Build torch's own parallel styles, with sequence parallelism and a parallel loss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )
    from torch.nn import functional as F

    model = _objective(job).model
    mesh = init_device_mesh("cpu", (job.plan.tp,))
    whole, part = Replicate(), Shard(1)
    gathered = PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,))
    gathered_first = PrepareModuleInput(
        input_layouts=(part, None, None, None), desired_input_layouts=(whole, None, None, None)
    )
    styles = {
        "attention_norm": SequenceParallel(),
        "attention": gathered_first,
        "attention.out": RowwiseParallel(output_layouts=part),
        "mlp_norm": SequenceParallel(),
        "mlp": gathered,
        "mlp.down": RowwiseParallel(output_layouts=part),
    } | dict.fromkeys(
        ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"), ColwiseParallel()
    )
    for block in model.blocks:
        parallelize_module(block, mesh, styles)
    outer = {
        "embed.tokens": RowwiseParallel(input_layouts=whole, output_layouts=part),
        "final_norm": SequenceParallel(),
    }
    parallelize_module(model, mesh, outer)

    def step(batch: dict) -> float:
        hidden = model(batch["tokens"]).redistribute(placements=[whole])
        targets = batch["targets"].flatten()
        with loss_parallel():
            logits = F.linear(hidden.flatten(0, 1), model.head_weight)
            loss = F.cross_entropy(logits, targets, reduction="sum") / len(targets)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        return loss.item()

    return model, step


_MAKERS = {
    "single": _whole,
    "ddp": _whole,
    "zero3": _whole,
    "gpipe": _pipeline,
    "tp": _tensor,
}
