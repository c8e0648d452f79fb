"""Replicas that start equal and average their gradients during backward.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020:
gradients are put into buckets, and a bucket is all-reduced as soon as it is full.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from outpace.parallel.api import Applied
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks


def exchange_in_bf16(
    group: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """torch's hook under another name: by its own, DDP refuses it on gloo, where it works too."""
    return bf16_compress_hook(group, bucket)


def apply(objective: nn.Module, plan: Plan, ranks: Ranks, device: torch.device) -> Applied:
    """Wrap in DistributedDataParallel. The default process group must be there."""
    wrapped = DistributedDataParallel(
        objective,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb=plan.bucket_mib,
    )
    if plan.compress_gradients == "bf16":
        wrapped.register_comm_hook(None, exchange_in_bf16)
    if device.type == "cpu":
        # DDP times its own communication in sampled iterations; on CPU that costs two clock reads.
        wrapped._set_ddp_runtime_logging_sample_rate(1)

    def exposed() -> float:
        # Without a Python-visible reducer event there is no other account of the overlap.
        seen = wrapped._get_ddp_logging_data()
        communication_ns = int(seen.get("backward_comm_time", 0))
        hidden_ns = int(seen.get("backward_compute_comm_overlap_time", 0))
        return max(0, communication_ns - hidden_ns) / 1e9

    return Applied(wrapped, wrapped.no_sync, exposed)
