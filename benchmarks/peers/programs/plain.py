"""The reference: a loop written by hand, with PyTorch's own engines."""

import torch
import torch.distributed as dist
from common import Case, asked
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def wrapped(case: Case, model: torch.nn.Module, zero3: bool, offload: bool) -> torch.nn.Module:
    """Wrap the model for several processes."""
    if case.world_size == 1:
        return model
    if not zero3:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    policy = {}
    if case.bf16:
        policy["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for layer in layers:
        fully_shard(layer, **policy)
    return fully_shard(model, **policy)


def main() -> None:
    """Train on `case`."""
    case, flags = asked("compile", "zero3", "offload")
    if case.world_size > 1:
        dist.init_process_group("gloo")
    model = case.model()
    if flags.compile:
        model.compile()
    trained = wrapped(case, model, flags.zero3, flags.offload)
    optimizer = case.optimizer(trained)
    for batch in DataLoader(case.data(), batch_size=case.share, sampler=case.order()):
        batch = {name: part.to(case.device, non_blocking=True) for name, part in batch.items()}
        with torch.autocast(case.device, torch.bfloat16, case.bf16 and not flags.zero3):
            loss = trained(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        case.said(loss.detach())
    case.end()


if __name__ == "__main__":
    main()
