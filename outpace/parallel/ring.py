"""Replicas that sum gradients in a ring: each rank communicates only with two neighbours.

Sergeev and Del Balso, "Horovod", arXiv 1802.05799; algorithm by Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", JPDC 2009. Gradients are put into
buffers in the order in which the backward computes them. A full buffer is sent around the ring by a
separate thread while the backward runs.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from outpace.parallel.fusion import fuse
from outpace.parallel.layout import Batch, Layout, LayoutRequest, StepHooks
from outpace.parallel.tensors import make_equal


def ring_all_reduce(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Sum `buffer` (one dimension, any length) over the ranks of `group`, in place.

    The buffer is split into N chunks, which travel around the ring in 2(N − 1) steps. In each of
    the first N − 1 steps, a rank adds a chunk from its left neighbour to its own chunk, until it
    has the sum of one chunk (reduce-scatter). In the next N − 1 steps, ranks pass these sums on
    (all-gather). Each rank therefore sends 2(N − 1)/N of the buffer (Patarasuk and Yuan 2009, §3).
    One rank finishes each sum and the others copy it, which keeps replicas bitwise equal.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    chunks = buffer.tensor_split(size)
    received = torch.empty_like(chunks[0])  # the first is the longest
    for step in range(size - 1):
        target = chunks[(rank - step - 1) % size]
        arrived = received[: target.numel()]
        _send_and_receive(chunks[(rank - step) % size], arrived, group)
        target.add_(arrived)
    for step in range(size - 1):
        _send_and_receive(chunks[(rank - step + 1) % size], chunks[(rank - step) % size], group)


def _send_and_receive(sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> None:
    """Send to the right neighbour and receive from the left one at the same time."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    operations = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
    ]
    # With fewer elements than ranks, some chunks are empty and are not sent.
    filled = [operation for operation in operations if operation.tensor.numel()]
    for work in dist.batch_isend_irecv(filled) if filled else ():
        work.wait()


class GradientReducer(Protocol):
    """Reducer that sums buffers over all ranks while the backward runs."""

    def begin(self, buffer: Tensor) -> None:
        """Start reducing a full buffer."""

    def finish(self) -> None:
        """Wait until every buffer holds its sum."""


class RingReducer:
    """A thread that reduces buffers around the ring, one after the other, in its own process group.

    Buffers must arrive in the same order on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ring")
        self._pending: list[Future[None]] = []

    def begin(self, buffer: Tensor) -> None:
        """Queue a buffer to be reduced after the kernels that fill it."""
        filled = None if self._stream is None else torch.cuda.current_stream().record_event()
        # Dispatch modes are thread-local, so the caller's modes are entered in the thread as well.
        modes = _get_current_dispatch_mode_stack()
        self._pending.append(self._thread.submit(self._reduce_in_thread, buffer, filled, modes))

    def _reduce_in_thread(
        self, buffer: Tensor, filled: torch.cuda.Event | None, modes: Sequence[Any]
    ) -> None:
        with ExitStack() as entered:
            for mode in modes:
                entered.enter_context(mode)
            if self._stream is not None and filled is not None:
                entered.enter_context(torch.cuda.stream(self._stream))
                self._stream.wait_event(filled)
            ring_all_reduce(buffer, self._group)

    def finish(self) -> None:
        """Wait until all buffers are reduced, and raise any error that occurred."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class RingReplicas(Layout):
    """Replicas whose gradients are summed by a `reducer` during a step's last backward."""

    def __init__(self, request: LayoutRequest, reducer: GradientReducer) -> None:
        super().__init__(request.objective)
        plan = request.plan
        self._reducer = reducer
        self._reduces = True
        dtype = torch.bfloat16 if plan.compress_gradients == "bf16" else None
        trainable = [p for p in request.objective.parameters() if p.requires_grad]
        # The backward reaches the last layers first.
        self._buckets = fuse(reversed(trainable), plan.bucket_mib * 2**20, dtype)
        self._reset_buckets()
        for number, bucket in enumerate(self._buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._gradient_hook(number, index))
        make_equal(request.objective)

    def _reset_buckets(self) -> None:
        self._missing = [set(range(len(bucket.parameters))) for bucket in self._buckets]
        self._sent = 0

    def _gradient_hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        def move_and_send(_: Tensor) -> None:
            if self._reduces:
                self._move_gradient(number, index)
                self._send_full_buckets()

        return move_and_send

    def _move_gradient(self, number: int, index: int) -> None:
        self._buckets[number].move_gradient(index)
        self._missing[number].remove(index)

    def _send_full_buckets(self) -> None:
        """Start reducing full buckets, in the order of buckets, which all ranks share."""
        while self._sent < len(self._buckets) and not self._missing[self._sent]:
            self._reducer.begin(self._buckets[self._sent].buffer)
            self._sent += 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only."""
        self._reduces = False
        try:
            yield
        finally:
            self._reduces = True

    def gradients(self, batches: Sequence[Batch], hooks: StepHooks) -> Tensor:
        """Compute the step's gradients; return when the last buffer is reduced."""
        totals = super().gradients(batches, hooks)
        # A parameter without a gradient in the last backward may have one from an earlier
        # micro-batch.
        for number, missing in enumerate(self._missing):
            for index in sorted(missing):
                self._move_gradient(number, index)
        self._send_full_buckets()
        self._reducer.finish()
        for bucket in self._buckets:
            bucket.assign_gradients()
        self._reset_buckets()
        return totals


def apply(request: LayoutRequest) -> Layout:
    """Copy rank 0's weights to all replicas, and reduce their gradients around a ring.

    Requires the default process group.
    """
    group: dist.ProcessGroup = dist.new_group()  # separate connections for the reducer's thread
    return RingReplicas(request, RingReducer(group, request.device))
