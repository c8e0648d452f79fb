"""Checkpoints, written in the background by torch's distributed checkpoint (DCP), verified on load.

A checkpoint is a folder `step-N` with DCP's files, `progress.json` and `complete.json`. The latter
is the marker: it is written last and has the size and checksum of every other file. Folders without
it are not used. While a save is in progress, the folder also has a file `unfinished`. It
distinguishes an interrupted save, which is removed, from a checkpoint that has lost its marker,
which is kept.
"""

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt
from torch import nn
from torch.utils._pytree import tree_leaves

from outpace.records.base import (
    Record,
    put_aside,
    refuse_pipe,
    sync_folder,
    sync_paths,
    write_atomic,
)
from outpace.records.checksums import checksum
from outpace.records.errors import BadInputError
from outpace.records.units import show_bytes
from outpace.training.checkpoint_metadata import METADATA_FILE, first_reason, release_frames
from outpace.training.direct_io import blocks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from outpace.training.states import InPlaceStager, PinnedCopies

MARKER, UNFINISHED = "complete.json", "unfinished"
PROGRESS_FILE = "progress.json"
_LOOKS, _LOOK_AGAIN_S = 20, 0.5


class Progress(Record):
    """A run's state except tensors. `step` also gives the position in the data."""

    has_checksum: ClassVar[bool] = True

    step: PositiveInt
    tokens: NonNegativeInt | None
    samples: NonNegativeInt
    loss_sum: FiniteFloat
    skipped_steps: NonNegativeInt
    scaler: dict[str, Any] | None
    first_loss: FiniteFloat | None
    world_size: PositiveInt
    run_started: str | None = Field(default=None, description="`started` of the run that saved it")


def _tensor_bytes(state: Any) -> int:
    leaves = tree_leaves(state)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def _file_checksum(path: Path, past_cache: bool) -> str:
    return checksum(blocks(path, past_cache))


def _mark_complete(folder: Path, past_cache: bool) -> None:
    entries = {
        name: {"bytes": (folder / name).stat().st_size,
               "xxh3_128": _file_checksum(folder / name, past_cache)}
        for name in sorted(_listed_file_names(folder))
    }  # fmt: skip
    sync_folder(folder)
    write_atomic(folder / MARKER, json.dumps(entries, indent=1) + "\n")
    (folder / UNFINISHED).unlink(missing_ok=True)
    # Sync the parent, too, which has the folder's name, before older checkpoints are removed.
    sync_paths(folder, folder.parent)


def _listed_file_names(folder: Path) -> set[str]:
    """Return the names of all files that the marker file (`MARKER`) of a checkpoint must list."""
    return {path.name for path in folder.iterdir() if path.is_file()} - {MARKER, UNFINISHED}


def _require_files(folder: Path, metadata: "Metadata") -> None:
    """Wait until the files of all ranks are visible on this host, or raise OSError."""
    wanted = {info.relative_path for info in (metadata.storage_data or {}).values()}
    for _ in range(_LOOKS):
        missing = sorted(name for name in wanted if not (folder / name).is_file())
        if not missing:
            return
        time.sleep(_LOOK_AGAIN_S)  # network file systems may show new files with a delay
    raise OSError(
        f"{missing[0]} and {len(missing) - 1} more files of other hosts are missing. Use an --out "
        "that all hosts share"
    )


def damage(folder: Path) -> str | None:
    """Return how a checkpoint is damaged; None if it is intact.

    An interrupted save counts as damaged.
    """
    if folder.is_symlink():
        return "it is a link"
    if not folder.is_dir():
        return "it is not a folder"
    if not (folder / MARKER).is_file():
        unfinished = is_unfinished(folder)
        return "its save was interrupted" if unfinished else f"it has no file {MARKER}"
    try:
        return _file_damage(folder) or _content_damage(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"{MARKER} cannot be read ({error})"


def _file_damage(folder: Path) -> str | None:
    refuse_pipe(folder / MARKER)
    entries = json.loads((folder / MARKER).read_text())
    for name, entry in entries.items():
        path = folder / name
        if path.parent != folder or path.is_symlink():
            return f"{name} is not a regular file in it"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        if _file_checksum(path, past_cache=False) != entry["xxh3_128"]:
            return f"the checksum of {name} has changed since it was written"
    unlisted = {*_listed_file_names(folder), PROGRESS_FILE, METADATA_FILE} - set(entries)
    return f"{MARKER} does not list {min(unlisted)}" if unlisted else None


def _content_damage(folder: Path) -> str | None:
    """Return what is wrong in a checkpoint's `progress.json` or metadata; None if valid.

    Raises BadInputError if the metadata cannot be read although its checksum is right, which cannot
    happen by accident.
    """
    from outpace.training.safe_checkpoint import read_metadata

    try:
        progress = Progress.load(folder / PROGRESS_FILE)
    except BadInputError as error:
        return str(error)
    if progress.step != step_of(folder):
        return f"{PROGRESS_FILE} belongs to step {progress.step}"
    stored = read_metadata(folder).storage_data or {}
    missing = {info.relative_path for info in stored.values()} - _listed_file_names(folder)
    return f"{min(missing)} is missing" if missing else None


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder is an interrupted save, which never was a complete checkpoint."""
    if folder.is_symlink() or not folder.is_dir() or (folder / MARKER).exists():
        return False
    return (folder / UNFINISHED).exists() or not any(folder.iterdir())


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint folder, from its name."""
    return int(folder.name.removeprefix("step-"))


def _step_folders(directory: Path) -> list[Path]:
    return [path for path in directory.glob("step-*") if path.name[5:].isdecimal()]


def whole_checkpoints(directory: Path) -> list[Path]:
    """Return the completely saved checkpoints, newest first, without verifying their files.

    A checkpoint is complete if it has the marker file, which is written last.
    """
    found = [p for p in _step_folders(directory) if (p / MARKER).is_file()]
    return sorted(found, key=step_of, reverse=True)


def newest_intact(directory: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest intact checkpoint; None if there has never been a complete one.

    Damaged checkpoints are skipped and reported through `say`. Raises BadInputError if all are
    damaged.
    """
    damaged = 0
    for folder in sorted(_step_folders(directory), key=step_of, reverse=True):
        problem = damage(folder)
        if problem is None:
            return folder
        if is_unfinished(folder):
            say(f"skipping checkpoint {folder}: its save was interrupted")
            continue
        damaged += 1
        say(f"skipping checkpoint {folder}, which is damaged ({problem})")
    if damaged:
        raise BadInputError(
            f"every checkpoint in {directory} is damaged. Restore one from a backup, start from "
            "an exported model with --model, or start over with another --out."
        )
    return None


class Checkpointer:
    """Saving and loading of a run's state on one rank."""

    def __init__(
        self,
        directory: Path,
        keep: int,
        rank: int,
        group: dist.ProcessGroup,
        on_whole: Callable[[Path], None],
        on_trouble: Callable[[str], None],
        copies: bool = True,
        lends: bool = False,
        trained_only: bool = False,
        masters: bool = False,
    ) -> None:
        self.directory = directory
        self._keep = keep
        self._rank = rank
        self._group = group
        self._on_whole = on_whole
        self._on_trouble = on_trouble
        self._copies = copies
        self._lends = lends
        self._lent: InPlaceStager | PinnedCopies | None = None
        self._pins = True
        self._pinned: PinnedCopies | None = None  # memory is kept between saves
        self._trained_only = trained_only
        self._masters = masters
        self._pending: tuple[Future[None], Path] | None = None
        self._needed_bytes = 0
        self._stuck: set[Path] = set()  # checkpoints that cannot be removed
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(
        self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, progress: Progress
    ) -> None:
        """Start a save in the background, after waiting for an earlier one.

        Call `before_change` before the state changes, since tensors may be saved in place. `model`
        or `optimizer` is None if other ranks save its state.
        """
        self.wait()
        folder = self.directory / f"step-{progress.step}"
        if not self._create_folder(folder, progress):
            return
        from outpace.training import states

        state = states.collect_tensors(model, optimizer, self._trained_only)
        if self._masters:
            states.drop_16bit_weights(state, model)
        self._needed_bytes = _tensor_bytes(state)
        written = self._begin_write(state, folder)
        finish = partial(self._complete_save, written, folder, past_cache=self._lent is not None)
        self._pending = (self._finisher.submit(finish), folder)

    def _begin_write(self, state: dict[str, Any], folder: Path) -> Future[Any]:
        """Start writing a checkpoint in the background.

        Without copies of the state (setting `copies`), it is written before this returns.
        """
        from outpace.training import states

        if self._copies:
            self._lent = self._make_stager(state) if self._lends else None
            try:
                return states.begin_write(state, folder, self._group, self._lent)
            except (RuntimeError, MemoryError) as error:
                if self._lent is None or self._lent is not self._pinned:
                    raise
                self._on_trouble(
                    "the copy of a checkpoint could not be pinned in host memory, so training "
                    f"waits while the copy is made: {first_reason(error)}"
                )
            self._lent, self._pins = None, False
            return states.begin_write(state, folder, self._group)
        done: Future[Any] = Future()
        try:
            done.set_result(states.write_state(state, folder, self._group))
        except states.ERRORS as error:
            done.set_exception(error)
        return done

    def _make_stager(self, state: dict[str, Any]) -> "InPlaceStager | PinnedCopies | None":
        """Return a stager that copies during the save; None if copies must be made before it."""
        from outpace.training import states

        if states.can_save_in_place(state):
            return states.InPlaceStager()
        if self._pinned is None and self._pins:
            self._pinned = states.pinned_copies(state)
        return self._pinned if self._pins else None

    def before_change(self) -> None:
        """Copy tensors that the current save has yet to write. Call it before the state changes."""
        if self._lent is not None:
            self._lent.give_back()
            self._lent = None

    def _create_folder(self, folder: Path, progress: Progress) -> bool:
        """Create the folder on rank 0; return on all ranks whether that worked. Collective."""
        worked = torch.ones(1)
        if self._rank == 0:
            try:
                _remove_checkpoint(folder)
                folder.mkdir(parents=True)
                (folder / UNFINISHED).touch()
                progress.save(folder / PROGRESS_FILE)
            except OSError as error:
                self._handle_failed_save(folder, error)
                worked.zero_()
        dist.broadcast(worked, 0, group=self._group)
        return bool(worked)

    def _complete_save(self, written: Future[Any], folder: Path, past_cache: bool) -> None:
        """Mark the checkpoint as complete once all files are written; runs in the background."""
        metadata = written.result()
        if self._rank == 0:
            _require_files(folder, metadata)
            _mark_complete(folder, past_cache)

    def make_ready(self) -> None:
        """Start importing, in the background, the modules that `save` needs.

        A failure is not reported here, since `save` fails in the same way.
        """
        self._finisher.submit(import_module, "outpace.training.states")

    def poll(self) -> None:
        """Finish a save if all its files are written, without waiting."""
        if self._pending is not None and self._pending[0].done():
            self.wait()

    def wait(self) -> bool:
        """Wait for the current save. Return False if it failed, which `on_trouble` reports."""
        if self._pending is None:
            return True
        from outpace.training import states

        future, folder = self._pending
        self._pending = None
        try:
            future.result()
        except states.ERRORS as error:
            self._handle_failed_save(folder, error)
            release_frames(error)
            return False
        if self._rank == 0:
            self._on_whole(folder)
            self._remove_old_checkpoints()
        return True

    def wait_for_ranks(self) -> bool:
        """Wait for the saves of all ranks; return whether this rank's succeeded.

        Otherwise, a rank could exit while others still save.
        """
        saved = self.wait()
        dist.barrier(self._group)
        return saved

    def _handle_failed_save(self, folder: Path, error: BaseException) -> None:
        if self._rank == 0:
            _remove_checkpoint(folder)
            why = self._explain_full_disk() or first_reason(error)
            self._on_trouble(f"checkpoint {folder.name} could not be saved: {why}")

    def _explain_full_disk(self) -> str | None:
        """Return a message if the disk is full, which writers report in different ways."""
        try:
            free = shutil.disk_usage(self.directory.parent).free
        except OSError:
            return None
        if free > self._needed_bytes:
            return None
        return (
            f"the disk has {show_bytes(free)} left, but a checkpoint needs "
            f"{show_bytes(self._needed_bytes)}"
        )

    def close(self) -> None:
        """Wait for the current save, and end the background thread."""
        self.wait()
        self._finisher.shutdown()

    def _remove_old_checkpoints(self) -> None:
        whole = whole_checkpoints(self.directory)
        for old in whole[self._keep :]:
            _remove_checkpoint(old)
            if old.exists() and old not in self._stuck:
                self._stuck.add(old)
                self._on_trouble(
                    f"{old} could not be removed, so more checkpoints are kept than requested. "
                    "Remove it once no other program uses it"
                )

    def load(
        self, folder: Path, model: nn.Module | None, optimizer: torch.optim.Optimizer | None
    ) -> Progress:
        """Load model and optimizer from a checkpoint, which any number of ranks may have written.

        Raises BadInputError if it is from another model, or if loading it would run code.
        """
        from outpace.training import states

        state = states.collect_tensors(model, optimizer, self._trained_only)
        states.read_state(state, folder, self._group)
        states.load_tensors(model, optimizer, state, self._trained_only)
        return Progress.load(folder / PROGRESS_FILE)


def put_later_aside(directory: Path, step: int, say: Callable[[str], None]) -> None:
    """Move checkpoints later than `step` out of `directory`, and report them.

    The run resumes from `step`, so later checkpoints are damaged. They are kept in a folder beside
    `directory`. Interrupted saves are removed.
    """
    damaged = directory.with_name(f"{directory.name}-damaged")
    for folder in sorted(_step_folders(directory), key=step_of):
        if step_of(folder) <= step:
            continue
        if is_unfinished(folder):
            _remove_checkpoint(folder)
            continue
        aside = put_aside(folder, folder=damaged)
        say(f"the damaged checkpoint {folder} is kept as {aside}. Remove it if you do not need it")


def _remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, its marker first, so that a folder with a marker is always complete.

    The file `unfinished` goes last, so that if this process is killed, the remaining files are
    removed later. If the folder is a link, only the link is removed, because this run did not write
    its target.
    """
    with suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
            return
        with suppress(OSError):  # the file exists already, or the disk is full
            (folder / UNFINISHED).touch(exist_ok=False)
        (folder / MARKER).unlink(missing_ok=True)
        for path in folder.iterdir():
            if path.name != UNFINISHED:
                with suppress(OSError):
                    path.unlink()
        shutil.rmtree(folder, ignore_errors=True)


def clear_partial(directory: Path) -> None:
    """Remove folders of interrupted saves."""
    for folder in _step_folders(directory):
        if is_unfinished(folder):
            _remove_checkpoint(folder)
