"""Collectives between the ranks of one host, which read each other's memory.

gloo sends a buffer over loopback: its threads, which compete with those that compute, copy it into
the kernel, out of the kernel, and to its destination. Here, each rank reads its shard of the other
ranks' buffers in place (process_vm_readv), sums the shards, and then reads the other ranks' sums.
This is Patarasuk and Yuan's reduce-scatter and all-gather (JPDC 2009, §3) without the ring, because
all ranks are equally near. An all-reduce of 25 MiB over two ranks takes 3.6 ms, as opposed to 22 to
37 ms with gloo (docs/development/log.md). ZeRO-3 uses the two halves separately (`parallel.fsdp`).

This works only on Linux on x86-64, because other ranks must see a rank's writes in the order in
which they were made. If the system does not let ranks read each other's memory, gloo is used.
"""

import ctypes
import errno
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from outpace.nn.operators import operator
from outpace.parallel.rank_objects import gather_objects
from outpace.records.errors import BadInputError

_CHUNK_BYTES = 512 << 10  # fits in a core's cache during the sum
_NAP_S = 50e-6
_LENGTH_BITS = 44  # bits of a collective's code that hold its buffer's size
_GAVE_UP = -1  # the step count of a rank that has given up
_SET_PTRACER = 0x59616D61  # prctl's PR_SET_PTRACER

# Arguments: process, address there, address here, number of bytes.
_CopyFunction = Callable[[int, int, int, int], None]


# These operators do nothing. They exist for modes that count collectives.


def _all_reduce_directly(buffer: Tensor, group: str) -> None:
    pass


def _all_gather_directly(buffer: Tensor, part: Tensor, group: str) -> None:
    pass


def _reduce_scatter_directly(part: Tensor, buffer: Tensor, group: str) -> None:
    pass


all_reduce_directly = operator(_all_reduce_directly, _all_reduce_directly)
all_gather_directly = operator(_all_gather_directly, _all_gather_directly)
reduce_scatter_directly = operator(_reduce_scatter_directly, _reduce_scatter_directly)


class _IoVec(ctypes.Structure):
    """The struct iovec of <sys/uio.h>."""

    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Notice(ctypes.Structure):
    """A notice in a rank's memory, which other ranks read.

    `token` identifies the notice, because the same process ID may refer to a different process on
    another host or in another container. `moves` counts the steps of collectives that the rank has
    reached, and `buffer` is the address of its buffer. `kind` encodes the collective that uses the
    buffer, and the buffer's size.
    """

    _fields_ = (
        ("token", ctypes.c_int64), ("moves", ctypes.c_int64), ("buffer", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )  # fmt: skip


def _create_permanent_notice() -> _Notice:
    """Create a notice that is never freed: other ranks may read it until they exit."""
    notice = _Notice(secrets.randbits(62), 0, 0, 0)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(notice))
    return notice


@dataclass(frozen=True)
class _Peer:
    """A rank on this host: its process, and the address of its notice in that process."""

    rank: int
    pid: int
    notice: int
    token: int


def _find_copy_function() -> _CopyFunction | None:
    """Return a function that copies from another process's memory; None if there is none."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "process_vm_readv"):
        return None
    read = library.process_vm_readv
    read.restype = ctypes.c_ssize_t
    one = ctypes.c_ulong(1)

    def copy(pid: int, source: int, target: int, length: int) -> None:
        done = 0
        while done < length:  # Linux reads at most 2 GiB at a time
            into, of = _IoVec(target + done, length - done), _IoVec(source + done, length - done)
            more = read(pid, ctypes.byref(into), one, ctypes.byref(of), one, ctypes.c_ulong(0))
            if more <= 0:
                code = ctypes.get_errno() if more < 0 else errno.EFAULT
                raise OSError(code, os.strerror(code))
            done += more

    return copy


def _allow_memory_reads() -> None:
    """Let the launcher and its descendants read this process's memory, which Yama may forbid."""
    ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


class PeerMemoryGroup:
    """Collectives between the ranks of a group on one host.

    Every rank must make the same calls, on one-dimensional buffers. A collective raises
    dist.DistError if another rank has exited, has given up or does not arrive in time; this rank
    then gives up too, so that the others fail as well. It raises BadInputError if another rank
    calls a different collective, or one with a different length or `unit`, the number of the unit
    of sharding that the buffer belongs to. One rank computes each sum, in the order of ranks, and
    the others copy it, so results are bitwise equal.
    """

    def __init__(self, group: dist.ProcessGroup, read: _CopyFunction, limit_s: float) -> None:
        self._read, self._limit_s = read, limit_s
        self._size, self._rank = group.size(), group.rank()
        self._notice, self._seen = _create_permanent_notice(), _Notice()
        own = _Peer(
            self._rank, os.getpid(), ctypes.addressof(self._notice), int(self._notice.token)
        )
        self._everyone: list[_Peer] = gather_objects(own, group)
        self._others = [one for one in self._everyone if one.rank != self._rank]
        self._buffers: dict[int, int] = {}

    def can_read(self) -> bool:
        """Return whether this rank can read the memory of all others."""
        try:
            for other in self._others:
                self._read_notice(other)
                if self._seen.token != other.token:
                    return False
        except OSError:
            return False
        return True

    def all_reduce(self, buffer: Tensor, factor: float = 1.0) -> None:
        """Sum `buffer` (of any length) over the ranks and multiply it by `factor`, in place."""
        with self._abandon_on_error():
            self._publish_buffer(buffer)
            shards = self._split_shards(buffer)
            start, own = shards[self._rank]
            self._sum_shards(start, own, own, factor)
            self._synchronize_step()
            for other in self._others:
                start, shard = shards[other.rank]
                self._copy_from(other, start, shard)
            self._synchronize_step()  # until then, no rank may change what others read

    def all_gather(self, buffer: Tensor, part: Tensor, unit: int = 0) -> None:
        """Fill `buffer` with the equally long `part`s of all ranks.

        `part` may be a view of this rank's shard of `buffer`. `unit` is the number of the unit of
        sharding, which must be equal on all ranks.
        """
        with self._abandon_on_error():
            self._publish_buffer(part, 2 * unit)
            for (_, shard), one in zip(self._split_shards(buffer), self._everyone, strict=True):
                if one.rank != self._rank:
                    self._copy_from(one, 0, shard)
                elif shard.data_ptr() != part.data_ptr():
                    shard.copy_(part)
            self._synchronize_step()

    def reduce_scatter(
        self, part: Tensor, buffer: Tensor, factor: float = 1.0, unit: int = 0
    ) -> None:
        """Write this rank's shard of the sum of all buffers, times `factor`, to `part`.

        `unit` is the number of the unit of sharding, which must be equal on all ranks.
        """
        with self._abandon_on_error():
            self._publish_buffer(buffer, 2 * unit + 1)
            start, own = self._split_shards(buffer)[self._rank]
            self._sum_shards(start, own, part, factor)
            self._synchronize_step()

    @contextmanager
    def _abandon_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._notice.moves = _GAVE_UP
            if isinstance(error, OSError):
                raise dist.DistNetworkError(
                    f"another rank's memory can no longer be read ({error.strerror})"
                ) from None
            raise

    def _publish_buffer(self, buffer: Tensor, kind: int = 0) -> None:
        """Publish the buffer's address and the collective's kind, and read those of others."""
        self._notice.buffer = buffer.data_ptr()
        self._notice.kind = (kind << _LENGTH_BITS) + buffer.nbytes
        others = self._synchronize_step()
        apart = next((rank for rank, kind in others.items() if kind != self._notice.kind), None)
        if apart is not None:
            one, other = sorted((apart, self._rank))
            raise BadInputError(
                f"rank {one} communicates a different part of the model from rank {other}: one of "
                "them does not use a block's output in its loss, or calls blocks that the other "
                "does not. Use strategy ddp or zero1, or treat the model as one block with "
                "blocks=[]."
            )

    def _copy_from(self, other: _Peer, start: int, target: Tensor) -> None:
        self._read(other.pid, self._buffers[other.rank] + start, target.data_ptr(), target.nbytes)

    def _split_shards(self, buffer: Tensor) -> list[tuple[int, Tensor]]:
        """Return each rank's shard of a buffer, with the byte at which the shard begins."""
        parts = buffer.tensor_split(self._size)
        return [(part.data_ptr() - buffer.data_ptr(), part) for part in parts]

    def _sum_shards(self, start: int, shard: Tensor, target: Tensor, factor: float) -> None:
        chunk = max(1, _CHUNK_BYTES // shard.element_size())
        found = torch.empty(min(chunk, shard.numel()), dtype=shard.dtype)
        total = torch.empty_like(found)
        for part, result in zip(shard.split(chunk), target.split(chunk), strict=True):
            other, sum_ = found[: len(part)], total[: len(part)]
            for one in self._everyone:
                mine = one.rank == self._rank
                if not mine:
                    self._copy_from(one, start, other)
                (sum_.add_ if one.rank else sum_.copy_)(part if mine else other)
            torch.mul(sum_, factor, out=result)
            start += part.nbytes

    def _synchronize_step(self) -> dict[int, int]:
        """Announce this rank's next step, and wait until all ranks have reached that step.

        Returns the kind of each other rank's collective. After the last step of a collective, a
        rank may already be in its next collective.
        """
        kinds = {}
        self._notice.moves += 1
        end_s = time.monotonic() + self._limit_s
        for other in self._others:
            while (moves := self._read_notice(other)) < self._notice.moves:
                if moves == _GAVE_UP:
                    raise dist.DistNetworkError(f"rank {other.rank} abandoned a collective")
                if time.monotonic() > end_s:
                    raise dist.DistNetworkError(
                        f"rank {other.rank} did not join a collective of gradients within "
                        f"{self._limit_s:g} s"
                    )
                time.sleep(_NAP_S)
            # Read the notice again: the kernel may have copied the address before the count.
            self._read_notice(other)
            self._buffers[other.rank] = self._seen.buffer
            kinds[other.rank] = int(self._seen.kind)
        return kinds

    def _read_notice(self, other: _Peer) -> int:
        """Copy another rank's notice to `self._seen`.

        Returns the number of steps that the rank has announced.
        """
        size = ctypes.sizeof(_Notice)
        self._read(other.pid, other.notice, ctypes.addressof(self._seen), size)
        moves: int = self._seen.moves
        return moves


def peer_memory_group(group: dist.ProcessGroup) -> PeerMemoryGroup | None:
    """Return a group's collectives; None if its ranks cannot read each other's memory.

    Also returns None for a single rank, and for backends other than gloo. Collective: all ranks get
    the same answer.
    """
    if group.size() == 1 or dist.get_backend(group) != "gloo":
        return None
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    read = _find_copy_function()
    able = torch.tensor([read is not None], dtype=torch.int32)
    dist.all_reduce(able, dist.ReduceOp.MIN, group=group)
    if read is None or not able.item():
        return None
    _allow_memory_reads()
    # Gathers all ranks' addresses, so that it returns after all ranks have allowed reads.
    found = PeerMemoryGroup(group, read, limit.total_seconds())
    able.fill_(found.can_read())
    dist.all_reduce(able, dist.ReduceOp.MIN, group=group)
    return found if able.item() else None


class GradientAveraging:
    """Averaging of DDP's gradients by a `PeerMemoryGroup`.

    `begin` is the communication hook for DDP; a thread runs the collectives.
    """

    def __init__(self, peer_memory_group: PeerMemoryGroup, group: dist.ProcessGroup) -> None:
        self._peers = peer_memory_group
        self._group, self._factor = group.group_name, 1 / group.size()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="direct")
        self._failed: Exception | None = None

    def begin(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start reducing a bucket. Buckets arrive in the same order on all ranks."""
        buffer = bucket.buffer()
        all_reduce_directly(buffer, self._group)
        done: torch.futures.Future[Exception | None] = torch.futures.Future()
        self._thread.submit(self._reduce_bucket, buffer, done)

        def finish(done: torch.futures.Future[Exception | None]) -> Tensor:
            error = done.value()
            if error is not None:
                raise error  # raised here, because DDP ignores `set_exception`
            return buffer

        return done.then(finish)

    def _reduce_bucket(self, buffer: Tensor, done: torch.futures.Future[Exception | None]) -> None:
        try:
            if self._failed is None:  # otherwise each bucket would wait for the failed rank
                self._peers.all_reduce(buffer, self._factor)
        except Exception as error:
            self._failed = error
        done.set_result(self._failed)
