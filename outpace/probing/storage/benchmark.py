"""Rates of disks for checkpoints and offloading.

Blocks bypass the kernel's cache. They are transferred one after the other (queue 1), or by several
threads in parallel. Also timed are writing a checkpoint as training does, through the cache
followed by fsync, and making a small file and its name durable.
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from outpace.probing.storage.advice import advice_of
from outpace.probing.storage.disk import (
    PAGE_BYTES,
    PageFile,
    in_memory,
    nearest_directory,
    open_nameless,
    refusals,
    require_room,
    require_whole,
)
from outpace.probing.timing.interleave import Turns, interleave_turns
from outpace.probing.timing.measure import Case, Effort, HostClock, measure, rounds_of
from outpace.probing.timing.section import ProbeSection
from outpace.records.base import sync_paths, write_atomic
from outpace.records.figure import Key
from outpace.records.units import show_bytes

_FILE_BYTES, _FULL_FILE_BYTES = 256 << 20, 2 << 30
_FILL_S, _FULL_FILL_S = 1.0, 8.0
# As large as a file of a small checkpoint, so that fsync must wait.
BUFFERED_BYTES = 32 << 20
_WRITTEN_AT_ONCE = 1 << 20
# (pages of a block, queue)
_SEQUENTIAL, _FULL_SEQUENTIAL = ((1024, 1), (1024, 4)), ((32, 1), (1024, 1), (1024, 4), (1024, 16))
_RANDOM, _FULL_RANDOM = ((1, 1), (1, 16)), ((1, 1), (1, 4), (1, 16), (16, 1), (16, 16))
_CALL_S = 0.01  # seconds of a call, enough to make handing operations to threads cheap
_MOST_OPERATIONS = 512
_SAMPLE_S, _FULL_SAMPLE_S = 0.012, 0.02

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Disk:
    """Cases that time the disk of a directory, and notes about it.

    The cases can only run while their files are open, which is within `storage_cases`.
    """

    cases: tuple[Case, ...]
    notes: tuple[str, ...]


def probe_storage(
    directories: Mapping[str, Path],
    quick: bool,
    budget_s: float,
    progress: Progress = lambda share: None,
) -> Turns[ProbeSection]:
    """Measure the disks of directories, which are named by role ("checkpoints", "offload").

    Directories on the same file system are measured once. `budget_s` is the total time. Raises
    BadInputError if a directory is not writable or lacks space.
    """
    if not sys.platform.startswith("linux"):
        return ProbeSection(notes=("storage: direct I/O is measured on Linux only",))
    disks = _join_roles_by_device(directories)
    each_s = budget_s / len(disks)
    found = yield from interleave_turns(
        *(
            _probe_directory(role, directory, quick, each_s, progress)
            for role, directory in disks.items()
        )
    )
    return sum(found, ProbeSection())


def _join_roles_by_device(directories: Mapping[str, Path]) -> dict[str, Path]:
    """Join the names of roles that share a file system: "checkpoints and offload"."""
    roles: dict[int, list[str]] = {}
    places: dict[int, Path] = {}
    for role, directory in directories.items():
        place = nearest_directory(directory)
        roles.setdefault(place.stat().st_dev, []).append(role)
        places.setdefault(place.stat().st_dev, place)
    return {" and ".join(roles[device]): places[device] for device in roles}


def _probe_directory(
    role: str, directory: Path, quick: bool, budget_s: float, progress: Progress
) -> Turns[ProbeSection]:
    begin_s = time.monotonic()
    with refusals(directory), storage_cases(directory, role, quick) as disk:
        left_s = max(0.1, budget_s - (time.monotonic() - begin_s))
        sample_s = _SAMPLE_S if quick else _FULL_SAMPLE_S
        effort = Effort(left_s, rounds_of(quick), sample_s)
        figures = yield from measure(disk.cases, HostClock(), effort, progress)
    advice = advice_of(role, figures)
    notes = disk.notes
    if not advice:
        notes += (
            f"storage: {role}: the disk was not steady enough to say how long a checkpoint takes; "
            "end other programs and probe again",
        )
    return ProbeSection(tuple(figures), advice, notes)


@contextmanager
def storage_cases(directory: Path, role: str, quick: bool) -> Iterator[Disk]:
    """Open test files in an existing directory, and yield cases that time reads and writes.

    In the figures, the directory is named by its `role`. The files are deleted at the end. Raises
    BadInputError if there is too little space, and OSError if the directory is not writable.
    """
    nbytes = _FILE_BYTES if quick else _FULL_FILE_BYTES
    require_room(directory, nbytes + BUFFERED_BYTES)
    moves = [
        *((True, *one) for one in (_SEQUENTIAL if quick else _FULL_SEQUENTIAL)),
        *((False, *one) for one in (_RANDOM if quick else _FULL_RANDOM)),
    ]
    lanes = max(queue for _, _, queue in moves)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(lanes, thread_name_prefix="storage"))
        named = tempfile.TemporaryDirectory(prefix=".outpace-probe-", dir=directory)
        place = Path(stack.enter_context(named))
        file = PageFile(directory, nbytes // PAGE_BYTES, _FILL_S if quick else _FULL_FILL_S, lanes)
        stack.callback(file.close)
        cases = [
            _move_case(file, pool, role, verb, sequential, pages, queue)
            for sequential, pages, queue in moves
            for verb in ("read", "write")
        ]
        cases += _checkpoint_cases(place, role, stack)
        yield Disk(tuple(cases), tuple(_list_notes(file, directory, role)))


def _list_notes(file: PageFile, directory: Path, role: str) -> Iterator[str]:
    kind = in_memory(directory)
    if kind is not None:
        yield (
            f"storage: {role}: the directory is in memory ({kind}), so there is no disk to "
            "measure, and its figures are those of memory copies (direct=no)"
        )
    elif not file.direct:
        yield (
            f"storage: {role}: the file system refuses direct I/O. Written data is synced with "
            "fdatasync, and the kernel is asked to drop it before it is read (direct=no); reads "
            "may still come from its cache"
        )
    yield (
        f"storage: {role}: measured in a file of {show_bytes(file.pages * PAGE_BYTES)}; a cache of "
        "that size in the disk, its controller or a hypervisor is in the figures"
    )


@dataclass
class _BlockMover:
    """Function to time: it reads or writes blocks in a given order, `queue` at a time.

    Each call continues where the previous one ended.
    """

    file: PageFile
    pool: ThreadPoolExecutor
    write: bool
    order: Sequence[int]  # first pages of blocks
    pages: int
    queue: int
    operations: int = 1  # of each thread in a call
    _at: int = 0
    _last: list[tuple[int, int, int]] = field(default_factory=list)  # lane, page, number of write

    def __call__(self) -> "_BlockMover":
        begin, self._at = self._at, self._at + self.queue * self.operations
        if not self.write:
            self.file.forget()
        if self.queue == 1:
            self._last = [self._move_blocks(0, begin)]
        else:
            lanes = [self.pool.submit(self._move_blocks, t, begin + t) for t in range(self.queue)]
            self._last = [lane.result() for lane in lanes]
        if self.write:
            self.file.wait_until_written()
        return self

    def _move_blocks(self, lane: int, begin: int) -> tuple[int, int, int]:
        number = page = 0
        for place in range(begin, begin + self.queue * self.operations, self.queue):
            page = self.order[place % len(self.order)]
            if self.write:
                number = self.file.write(lane, page, self.pages)
            else:
                self.file.read(lane, page, self.pages)
        return lane, page, number

    def calibrate(self) -> None:
        took_s = HostClock().seconds(self, 1)
        took_s = min(took_s, HostClock().seconds(self, 1))
        # No block occurs twice in a call, or threads could use the same block.
        most = min(_MOST_OPERATIONS, len(self.order) // self.queue)
        self.operations = max(1, min(most, int(_CALL_S / max(took_s, 1e-9))))

    def find_error(self) -> str | None:
        """Read and check all bytes that each thread moved in its last operation."""
        found = (
            self.file.find_error(lane, page, self.pages, number if self.write else None)
            for lane, page, number in self._last
        )
        return next((problem for problem in found if problem), None)


def _move_case(
    file: PageFile, pool: ThreadPoolExecutor, role: str, verb: str,
    sequential: bool, pages: int, queue: int,
) -> Case:  # fmt: skip
    order: Sequence[int] = range(0, file.pages, pages)
    if not sequential:
        order = random.Random(0).sample(order, len(order))
    mover = _BlockMover(file, pool, verb == "write", order, pages, queue)
    mover.calibrate()
    what = f"{'sequential' if sequential else 'random'} {verb}"
    nbytes = pages * PAGE_BYTES
    direct = "yes" if file.direct else "no"
    key = _key(what, directory=role, block_bytes=nbytes, queue=queue, direct=direct)
    return Case(key, "B/s", lambda: mover, mover.operations * queue * nbytes,
                check=lambda moved: moved.find_error())  # fmt: skip


def _key(what: str, **of: str | int) -> Key:
    return Key(kind="storage", what=what, of=of)


def _checkpoint_cases(named: Path, role: str, stack: ExitStack) -> Iterator[Case]:
    noise = random.Random().randbytes(BUFFERED_BYTES)
    new = _NewFile(named, noise)
    stack.callback(new.close)
    key = _key("buffered write and fsync", directory=role, bytes=BUFFERED_BYTES, direct="no")
    yield Case(key, "B/s", lambda: new, BUFFERED_BYTES, check=lambda written: written.find_error())
    handle = open_nameless(named)
    stack.callback(os.close, handle)
    small, text = noise[:PAGE_BYTES], noise[: PAGE_BYTES // 2].hex()

    def write_and_sync() -> bytes:
        os.pwrite(handle, small, 0)
        os.fsync(handle)
        return os.pread(handle, PAGE_BYTES, 0)

    key = _key("fsync", directory=role, bytes=PAGE_BYTES)
    yield Case(key, "s", lambda: write_and_sync, check=lambda held: _difference(held, small))
    record = named / "record.json"

    def replace_file() -> str:
        write_atomic(record, text)
        sync_paths(named)
        return record.read_text(encoding="utf-8")

    key = _key("create and rename", directory=role, bytes=PAGE_BYTES)
    yield Case(key, "s", lambda: replace_file, check=lambda held: _difference(held, text))


def _difference(held: object, written: object) -> str | None:
    return None if held == written else "the file does not contain what was written"


class _NewFile:
    """Function to time: each call writes a new file and waits until it is on disk."""

    def __init__(self, directory: Path, data: bytes) -> None:
        self._directory, self._data = directory, memoryview(data)
        self._file: int | None = None

    def __call__(self) -> "_NewFile":
        self.close()
        self._file = open_nameless(self._directory)
        for begin in range(0, len(self._data), _WRITTEN_AT_ONCE):
            part = self._data[begin : begin + _WRITTEN_AT_ONCE]
            require_whole(os.pwrite(self._file, part, begin), len(part))
        os.fsync(self._file)
        return self

    def find_error(self) -> str | None:
        """Read the file back, from the disk if the kernel drops its cache."""
        assert self._file is not None
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        held = os.pread(self._file, len(self._data) + 1, 0)
        return _difference(held, self._data)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
