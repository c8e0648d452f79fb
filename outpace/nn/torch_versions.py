"""Differences between the versions of torch that outpace runs on, 2.11 to 2.15.

Each function behaves as with the newest torch, or reports that the installed version cannot. No
other module checks torch's version or for its attributes (see `tests/nn/test_torch_versions.py`).
"""

from collections.abc import Callable, Iterator
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

VERSION = str(torch.__version__)


def torch_release(version: str = VERSION) -> tuple[int, int]:
    """Return the release (major, minor) of a version such as `2.11.0+cu130`."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def all_gather_single(
    output: Tensor, part: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Gather equal shards of all ranks into one tensor; return the work if `async_op`.

    torch has this name since 2.13, and warns about the old one.
    """
    if hasattr(dist, "all_gather_single"):
        return dist.all_gather_single(output, part, group=group, async_op=async_op)
    return dist.all_gather_into_tensor(output, part, group=group, async_op=async_op)


def reduce_scatter_single(
    output: Tensor, whole: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Sum a tensor over ranks, and keep this rank's shard; return the work if `async_op`.

    torch has this name since 2.13, and warns about the old one.
    """
    if hasattr(dist, "reduce_scatter_single"):
        return dist.reduce_scatter_single(output, whole, group=group, async_op=async_op)
    return dist.reduce_scatter_tensor(output, whole, group=group, async_op=async_op)


def add_wide_matmul(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add the matmul of two 16-bit tensors to `total` in fp32, inside cuBLAS's kernel.

    Before torch 2.13, fake tensors do not support this; the matmul alone stands in for it, which
    counts the same.
    """
    if torch_release() < (2, 13) and type(total) is not Tensor:
        return torch.mm(left, right, out_dtype=torch.float32, out=total)
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def compiler_reads_before_it_writes() -> bool:
    """Return whether compiled code gathers from an input before overwriting it (torch 2.13).

    Earlier versions of Inductor move the gather after the write if a reduction uses the gathered
    values: with torch 2.11 on a CPU, the loss of 300 tokens was 1,814 instead of 1,504.
    """
    return torch_release() >= (2, 13)


def without_buffers() -> dict[str, Any]:
    """Return the arguments that stop DistributedDataParallel from broadcasting.

    It broadcasts parameters and buffers when constructed, and buffers before each forward. torch
    2.13 has another name for the option, and warns about the old one.
    """
    known = signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False, "init_sync": False}


def without_saved_tensor_hooks() -> dict[str, Any]:
    """Return the arguments that hide tensors kept by selective checkpointing from hooks.

    torch 2.15 warns unless the option is set; earlier versions always hide them.
    """
    name = "respect_saved_tensors_hooks"
    return {name: False} if name in signature(checkpoint).parameters else {}


def fsdp_param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of a module's FSDP state; before torch 2.12, at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def launch_config(shutdown_timeout_s: int, **settings: Any) -> "LaunchConfig":
    """Return a LaunchConfig that ends workers after `shutdown_timeout_s`, from torch 2.12.

    Before 2.12, set it through `PContext.close`, whose default is 30 s.
    """
    from torch.distributed.launcher.api import LaunchConfig

    if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:
        settings["shutdown_timeout"] = shutdown_timeout_s
    return LaunchConfig(**settings)


def stage_votes() -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements for methods by which torch's pipeline stages vote on shapes.

    Each is (class, name of the method, function to use instead). Stages vote since torch 2.12;
    before, nothing is yielded.
    """
    from torch.distributed.pipelining import PipelineStage

    if hasattr(PipelineStage, "_warmup_backward_result"):
        yield PipelineStage, "_warmup_backward_result", lambda *_, **__: torch.ones(1)


def fill_missing_gradients(stage: Any, micro_batch: int) -> None:
    """Fill missing gradients of a pipeline stage's inputs with zeros, so that they can be sent.

    torch does this since 2.13. Before, the stage raised an error, and the previous stage hung.
    """
    gradients = stage.bwd_cache.get(micro_batch)
    if gradients is None or stage.is_first or hasattr(stage, "_get_grad_send_meta"):
        return
    received = stage.args_recv_info[0]
    stage.bwd_cache[micro_batch] = tuple(
        torch.zeros_like(one.buffer) if gradient is None and hasattr(one, "buffer") else gradient
        for gradient, one in zip(gradients, received, strict=False)  # keyword arguments come last
    )


def flight_recorder_dumps() -> list[Callable[[], str | bytes]]:
    """Return functions that dump this process's flight recorders as JSON.

    Builds with NCCL have a second one, for its collectives.
    """
    from torch._C import _distributed_c10d

    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    found = [getattr(_distributed_c10d, name, None) for name in names]
    return [dump for dump in found if dump is not None]


def split_backward_refusal(strategy: str) -> str | None:
    """Return why a schedule that splits the backward cannot run on a CPU; None if it can.

    Before 2.13, `torch.autograd.grad` finds no metadata of operators with a registered backward,
    such as outpace's norms on a CPU.
    """
    if torch_release() >= (2, 13):
        return None
    return (
        f"{strategy} computes the gradients of inputs and weights separately, which torch "
        f"{VERSION} cannot do on a CPU through operators written in Python. Use torch 2.13 or "
        "newer, or --strategy interleaved"
    )


def nested_split_refusal() -> str | None:
    """Return why a split backward does not support nested uses of a parameter; None if it does.

    Before 2.13, torch's `stage_backward_weight` adds the gradient of the earlier use twice.
    """
    if torch_release() >= (2, 13):
        return None
    return (
        "a block uses a parameter again on a result of the same parameter, whose gradient torch "
        f"{VERSION} adds twice if gradients of inputs and weights are computed separately. Use "
        "torch 2.13 or newer, or --strategy interleaved"
    )
