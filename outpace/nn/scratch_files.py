"""Memory-mapped scratch files on a disk, for offloaded tensors.

Rajbhandari et al., "ZeRO-Infinity", arXiv 2104.07857, §5.1.2, read and write files explicitly. Here
files are mapped: tensors are used in place, and the kernel reads ahead and writes back in the
background. As long as the machine has free memory, pages stay in the page cache, without waiting
for the disk. Pages count as the process's memory only between use and release, and never as
anonymous memory, which the kernel cannot reclaim under a memory limit.

The files have no names (O_TMPFILE, or deleted as soon as they are open), so they disappear with the
process, however it ends.
"""

import ctypes
import errno
import mmap
import os
import sys
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from outpace.records.errors import BadInputError
from outpace.records.units import show_bytes

# Address space per file, large so that few files are open. Disk space is allocated as needed.
_FILE_BYTES = 1 << 30
_ALIGNED_BYTES = 64  # as in torch's own allocator


@dataclass(frozen=True)
class Region:
    """A page-aligned part of a mapped file."""

    mapping: mmap.mmap
    start: int
    nbytes: int

    def prefetch(self) -> None:
        """Let the kernel read the region in the background."""
        self.mapping.madvise(mmap.MADV_WILLNEED, self.start, self.nbytes)

    def release(self) -> None:
        """Release this process's memory of the region.

        The values stay in the page cache or on disk, and the next access faults them in.
        """
        self.mapping.madvise(mmap.MADV_DONTNEED, self.start, self.nbytes)


class Scratch:
    """Allocator of memory in files in `directory` (None: the system's temporary directory).

    `taken_bytes`: allocated disk space, which never shrinks, since freed regions are reused.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.taken_bytes = 0
        self._named = directory is not None
        self._directory = Path(directory or tempfile.gettempdir())
        self._end: tuple[mmap.mmap, int, int] | None = None  # file, its descriptor, bytes used
        self._idle: defaultdict[int, list[Region]] = defaultdict(list)
        self._regions_by_address: dict[int, Region] = {}

    def allocate(self, nbytes: int) -> Region:
        """Return a region of at least `nbytes`. Raises BadInputError if the disk is too full."""
        pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._idle[pages]:
            return self._idle[pages].pop()
        if self._end is None or self._end[2] + pages > len(self._end[0]):
            self._end = self._open_file(max(_FILE_BYTES, pages))
        mapping, descriptor, used = self._end
        try:
            # On a full disk, writing to a mapped sparse file would kill the process.
            _reserve_disk_space(descriptor, used, pages)
        except OSError as error:
            raise self._no_room_error(error, pages) from None
        self._end = (mapping, descriptor, used + pages)
        self.taken_bytes += pages
        return Region(mapping, used, pages)

    def give_back(self, region: Region) -> None:
        """Free a region for reuse."""
        region.release()
        self._idle[region.nbytes].append(region)

    def _open_file(self, nbytes: int) -> tuple[mmap.mmap, int, int]:
        if not sys.platform.startswith("linux"):
            raise BadInputError("offload to disk needs Linux. Use none or cpu.")
        try:
            self._require_disk()
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory) as file:
                os.truncate(file.fileno(), nbytes)
                # The mapping keeps its own descriptor open.
                descriptor = os.dup(file.fileno())
                mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            raise self._no_room_error(error, nbytes) from None
        weakref.finalize(mapping, os.close, descriptor)
        return mapping, descriptor, 0

    def _require_disk(self) -> None:
        whole = self._directory.absolute()
        device = next(p for p in (whole, *whole.parents) if p.exists()).stat().st_dev
        for mount in psutil.disk_partitions(all=True) if self._named else ():
            in_memory = mount.fstype in ("tmpfs", "ramfs")
            if in_memory and Path(mount.mountpoint).stat().st_dev == device:
                raise BadInputError(
                    f"offload to disk: {self._directory} is on {mount.mountpoint}, which is kept "
                    f"in memory ({mount.fstype}). Name a directory on a disk with --offload-dir."
                )

    def _no_room_error(self, error: OSError, nbytes: int) -> BadInputError:
        return BadInputError(
            f"offload to disk: {self._directory} has no room for {show_bytes(nbytes)} in addition "
            f"to the {show_bytes(self.taken_bytes)} that this process has there "
            f"({error.strerror}). Name another directory with --offload-dir, or offload less."
        )

    def copy_permanently(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Region]:
        """Copy plain tensors into one region that is never freed."""
        begins, total = [], 0
        for tensor in tensors:
            begins.append(total)
            total += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        region = self.allocate(max(total, 1))
        memory = (ctypes.c_char * region.nbytes).from_buffer(region.mapping, region.start)
        placed = [_copy_into(t, memory, at) for t, at in zip(tensors, begins, strict=True)]
        self._regions_by_address |= {tensor.data_ptr(): region for tensor in placed}
        return placed, region

    def region_of(self, tensor: Tensor) -> Region | None:
        """Return the region of a tensor from `copy_permanently`; None for any other."""
        return self._regions_by_address.get(tensor.data_ptr())

    def copy_temporarily(self, tensor: Tensor) -> tuple[Tensor, Region]:
        """Copy a plain tensor into a region that is freed together with the copy."""
        region = self.allocate(max(tensor.nbytes, 1))
        memory = (ctypes.c_char * region.nbytes).from_buffer(region.mapping, region.start)
        weakref.finalize(memory, self.give_back, region).atexit = False
        return _copy_into(tensor, memory, 0), region


def _reserve_disk_space(descriptor: int, start: int, nbytes: int) -> None:
    """Allocate disk space for a range of a file, completely or not at all. Raises OSError.

    The free space is compared first: some file systems fill up before they refuse, so that other
    writes fail in the meantime.
    """
    disk = os.fstatvfs(descriptor)
    if nbytes > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        os.posix_fallocate(descriptor, start, nbytes)
    except OSError:
        length = os.fstat(descriptor).st_size
        os.truncate(descriptor, start)
        os.truncate(descriptor, length)
        raise


@torch.no_grad()
def _copy_into(tensor: Tensor, memory: "ctypes.Array[ctypes.c_char]", offset: int) -> Tensor:
    """Copy a tensor into memory at `offset` bytes, densely, in the order of its strides."""
    if tensor.numel() == 0:
        return tensor.detach().clone()
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    strides = torch.empty_like(tensor, device="meta").stride()
    return flat.as_strided(tensor.shape, strides).copy_(tensor)


def prefetch(regions: Iterable[Region]) -> None:
    """Prefetch each of the regions."""
    for region in regions:
        region.prefetch()


def release(regions: Iterable[Region]) -> None:
    """Release this process's memory of each of the regions."""
    for region in regions:
        region.release()
