"""Simulation of one rank of a world, with process groups that do not communicate."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from outpace.nn.torch_versions import stage_votes
from outpace.parallel import Layout, LayoutRequest, apply, ring
from outpace.parallel.ddp import Replicas
from outpace.parallel.dp import DataParallel
from outpace.records.ranks import Ranks


@contextmanager
def one_rank(rank: int, world_size: int, ranks_per_host: int = 8) -> Iterator[Ranks]:
    """Create a fake default process group of `world_size` ranks, with this process as `rank`.

    Collectives return immediately and leave their buffers unchanged.
    """
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=rank % ranks_per_host,
        local_world_size=min(ranks_per_host, world_size),
    )
    # The cache refers to meshes by the names of their groups, which differ between worlds.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with ExitStack() as patched:
            for owner, name, instead in _list_patches():
                patched.enter_context(patch.object(owner, name, instead))
            yield ranks
    finally:
        _clear_sharding_prop_cache()
        dist.destroy_process_group()


def _list_patches() -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, name, replacement) of functions that would wait for ranks or read tensors."""
    yield dist, "broadcast_object_list", lambda *_, **__: None
    yield dist, "all_gather_object", _gather_copies
    yield dist, "all_reduce", _with_future(dist.all_reduce)
    yield dist, "new_group", partial(_make_fake_group, dist.new_group)
    # DDP compares parameter sizes between ranks in a tensor too large to be real.
    yield distributed, "_verify_param_shape_across_processes", lambda *_, **__: None
    # Stages vote on whether their shapes are known; here they always are.
    yield from stage_votes()
    with warnings.catch_warnings():  # this import still triggers warnings from torch.jit
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    # Its buckets replace the parameters' memory, which fake tensors do not support.
    init = ZeroRedundancyOptimizer.__init__

    def init_without_views(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "parameters_as_bucket_view": False})

    yield ZeroRedundancyOptimizer, "__init__", init_without_views
    yield ring, "RingReducer", _SequentialRing


def _make_fake_group(new_group: Any, *args: Any, backend: str = "", **kwargs: Any) -> Any:
    return new_group(*args, **kwargs)  # fake, whatever the backend; a real one needs other ranks


def _gather_copies(gathered: list[Any], value: Any, group: Any = None) -> None:
    gathered[:] = [value] * len(gathered)


class _CompletedWork:
    """Handle of a collective that is already complete.

    Its future returns the tensor unchanged. The fake process group's own handles have no future.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([self._tensor])
        return future


def _with_future(all_reduce: Any) -> Any:
    def reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        return work and _CompletedWork(tensor)

    return reduce


class _SequentialRing:
    """Ring reducer that works in the calling thread, the only one that a dispatch mode covers."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group

    def begin(self, buffer: Tensor) -> None:
        ring.ring_all_reduce(buffer, self._group)

    def finish(self) -> None:
        """Do nothing, since nothing is in progress."""


def lay_out(request: LayoutRequest, batch: dict[str, Tensor]) -> Layout:
    """Apply the plan as `parallel.apply` does, but without messages from other ranks."""
    layout = apply(request)
    if isinstance(layout, DataParallel):
        layout.set_form(batch)
    if isinstance(layout, Replicas) and request.plan.compress_gradients == "none":
        layout.module.register_comm_hook(None, _keep_bucket)
    return layout


def _keep_bucket(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return the bucket unchanged, since the fake group has no result for DDP's all-reduce."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
