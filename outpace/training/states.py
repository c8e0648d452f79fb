"""A run's tensors in the form that torch's distributed checkpoint (DCP) writes and reads.

`checkpoint` decides when and where to save. This module is separate because loading DCP takes half
a second, which delays only runs that save.
"""

import io
import mmap
import os
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, _FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from outpace.nn.extra_state import pack, saved_name, unpack
from outpace.optim.build import fill_state
from outpace.optim.master import master_weights
from outpace.records.errors import BadInputError
from outpace.training.checkpoint_metadata import first_reason
from outpace.training.direct_io import DirectWriter
from outpace.training.safe_checkpoint import PlainLoadPlanner, RestrictedReader

# Errors in saving and loading: DCP wraps ranks' errors in a BaseException.
ERRORS = (Exception, CheckpointException)
SMALL_BYTES = 8  # torch's stager pins no memory for storages below 5 bytes
_OTHER_BLOCKS = re.compile(r"Size mismatch .* for optimizer\.state\.\S+_scale\b")
_STATE_OF_MASTER = "state.{}.master"  # name in the optimizer's flat state


def _options(trained_only: bool) -> StateDictOptions:
    """Return options that store each parameter's optimizer state under its name, for any layout.

    With `trained_only`, the checkpoint has no frozen parameters, and loading accepts that.
    """
    if not trained_only:
        return StateDictOptions(flatten_optimizer_state_dict=True)
    return StateDictOptions(
        flatten_optimizer_state_dict=True, ignore_frozen_params=True, strict=False
    )


class InPlaceStager(AsyncStager):
    """Saves a state without a copy until it is about to change, and from a copy afterwards.

    A copy of the whole state needs the same amount of memory again, which a virtual machine may be
    slow to provide (docs/development/log.md). Forward and backward change no state, and are long
    enough to write most of it. Each tensor is copied only when its turn comes, so a change waits at
    most for memory, never for a disk. For plain CPU tensors only.
    """

    _synchronize_after_execute = False  # `give_back` is called before the state changes

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._unread: dict[int, Tensor] = {}  # tensors to read, by `id`
        self._room: mmap.mmap | None = None  # memory for a copy of one tensor

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Stage the same memory in tensors whose memory can be swapped."""
        lent: dict[str, Any] = tree_map_only(Tensor, Tensor.detach, state_dict)
        self._unread = {id(one): one for one in tree_leaves(lent) if isinstance(one, Tensor)}
        return lent

    def synchronize_staging(self) -> None:
        """Do nothing, since nothing is being copied."""

    def close(self) -> None:
        """Do nothing, since there is nothing to close."""

    def drop_except(self, wanted: Iterable[Any]) -> None:
        """Drop all staged tensors that will not be read."""
        places = {id(one) for one in wanted}
        with self._turn:
            self._unread = {k: v for k, v in self._unread.items() if k in places}
            largest = max((one.nbytes for one in self._unread.values()), default=0)
            self._room = mmap.mmap(-1, largest) if largest else None

    def read(self, found: Any) -> Any:
        """Return a copy of a tensor, valid until the next call; return anything else unchanged."""
        with self._turn:
            return found if self._unread.pop(id(found), None) is None else self._copy(found)

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into reused memory in this thread; torch would use several threads."""
        if self._room is None or not tensor.is_contiguous() or not tensor.numel():
            return tensor.clone()
        copied = torch.frombuffer(self._room, dtype=tensor.dtype, count=tensor.numel())
        np.copyto(copied.view(torch.uint8).numpy(), tensor.view(-1).view(torch.uint8).numpy())
        return copied.view(tensor.shape)

    def give_back(self) -> None:
        """Copy everything not yet read, before the state changes."""
        with self._turn:
            for tensor in self._unread.values():
                tensor.data = tensor.clone()
            self._unread.clear()


class CopyStream:
    """A GPU stream for copies that overlap with computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copied: torch.cuda.Event | None = None

    @contextmanager
    def copy_after_computing(self) -> Iterator[None]:
        """Start the copies once the GPU has finished the work queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied = self._stream.record_event()

    def hold_computing(self) -> None:
        """Make later GPU work wait for the copies; the host continues."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        """Wait until the copies are finished."""
        if self._copied is not None:
            self._copied.synchronize()


def is_small_on_gpu(tensor: Tensor) -> bool:
    """Return whether a GPU tensor is too small for torch's stager to pin its copy."""
    return tensor.is_cuda and tensor.nbytes < SMALL_BYTES


@torch.no_grad()
def join_small(state: dict[str, Any], memory: dict[Any, Tensor]) -> dict[str, Any]:
    """Return the state with its small tensors joined per device and dtype, as views of one tensor.

    A copy to unpinned memory makes the host wait for all previous copies, and fused optimizers have
    a small tensor, "step", for each parameter. `memory` is reused between calls.
    """
    leaves, structure = tree_flatten(state)
    alike: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if type(leaf) is Tensor and leaf.numel() and is_small_on_gpu(leaf):
            alike.setdefault((leaf.device, leaf.dtype), []).append(place)
    for kind, places in alike.items():
        parts = [leaves[place] for place in places]
        sizes = [part.numel() for part in parts]
        total = sum(sizes)
        if kind not in memory or memory[kind].numel() != total + SMALL_BYTES:
            # large enough not to count as small itself
            memory[kind] = parts[0].new_empty(total + SMALL_BYTES)
        joined = memory[kind][:total]
        torch.cat([part.reshape(-1) for part in parts], out=joined)
        for place, part, view in zip(places, parts, joined.split(sizes), strict=True):
            leaves[place] = view.view(part.shape)
    joined_state: dict[str, Any] = tree_unflatten(leaves, structure)
    return joined_state


class PinnedCopies(AsyncStager):
    """Copies of a GPU's state in pinned host memory, made while the GPU computes.

    The memory is kept for the next save, because pinning takes longer than copying. Only the device
    waits for the copy, and only before the optimizer changes the copied state.
    """

    _synchronize_after_execute = False  # `give_back` is called before the state changes

    def __init__(self, stager: StateDictStager, stream: CopyStream) -> None:
        self._stager, self._stream = stager, stream
        self._state: dict[str, Any] | None = None  # kept until it is copied
        self._joined: dict[Any, Tensor] = {}  # joined small tensors, by device and dtype

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state in host memory; its values are valid after `read`."""
        self._state = state_dict
        with self._stream.copy_after_computing():
            joined = join_small(state_dict, self._joined)
            staged: dict[str, Any] = self._stager.stage(joined, non_blocking=True)
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing, because `read` waits."""

    def close(self) -> None:
        """Do nothing, because the memory is kept."""

    def drop_except(self, wanted: Iterable[Any]) -> None:
        """Do nothing, because everything is copied or about to be."""

    def read(self, found: Any) -> Any:
        """Return the staged value, after waiting for the copies."""
        self._stream.wait()
        self._state = None
        return found

    def give_back(self) -> None:
        """Make the device finish the copies before the state changes."""
        self._stream.hold_computing()


class _Planner(DefaultSavePlanner):
    """A save planner that reads tensors in place, and only this rank's part of replicated data."""

    def __init__(self, lent: InPlaceStager | PinnedCopies) -> None:
        super().__init__()
        self._lent = lent

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._lent.drop_except(self.lookup_object(item.index) for item in plan.items)
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._lent.read(super().resolve_data(write_item))


class _QuietWriter(io.BufferedWriter):
    """A file that may be flushed after it is closed.

    torch's streams flush on deletion. On a full disk, that happens after closing, and Python 3.13
    reports an ignored exception each time.
    """

    def flush(self) -> None:
        if not self.closed:
            super().flush()


class _ThroughCache(FileSystem):
    """A file system like torch's, without warnings when a closed file is flushed."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with _QuietWriter(io.FileIO(path, mode)) as file:
            yield file


class _PastCache(FileSystem):
    """A file system that bypasses the page cache, which would take memory from the computation."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with DirectWriter(Path(path)) as file:
            yield file


class _Writer(_FileSystemWriter):
    """A DCP writer without torch's checksum per tensor, since each file has a stronger one.

    It derives from `FileSystemWriter`'s base class, so that a stager makes the copies.
    `past_cache`: bypass the page cache when writing during a step. Such files sync themselves to
    disk.
    """

    def __init__(self, folder: Path, past_cache: bool = False) -> None:
        super().__init__(folder, sync_files=not past_cache)
        self.fs = _PastCache() if past_cache else _ThroughCache()
        if past_cache:
            # CPU tensors are not copied ahead of time, even if there are other devices.
            self.per_thread_copy_ahead = 0

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        before = get_crc32_options()  # the option is per thread, and this thread writes
        set_crc32_options(False)
        try:
            return super().write_data(plan, planner)
        finally:
            set_crc32_options(before)


def can_lend(state: dict[str, Any]) -> bool:
    """Return whether all tensors are plain CPU tensors, which can be saved in place."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return all(type(one) in (Tensor, nn.Parameter) and one.is_cpu for one in tensors)


def pinned_copies(state: dict[str, Any]) -> PinnedCopies | None:
    """Return a stager for a state with tensors on a GPU; None for others."""
    leaves = (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
    device = next((leaf.device for leaf in leaves if leaf.device.type == "cuda"), None)
    if device is None:
        return None
    return PinnedCopies(StateDictStager(pin_memory=True), CopyStream(device))


def begin_write(
    state: dict[str, Any],
    folder: Path,
    group: dist.ProcessGroup,
    lent: InPlaceStager | PinnedCopies | None = None,
) -> Future[Any]:
    """Write in the background: from `lent` tensors, or from a copy made before this returns."""
    planner = None if lent is None else _Planner(lent)
    written = async_save(
        state,
        storage_writer=_Writer(folder, past_cache=lent is not None),
        planner=planner,
        process_group=group,
        async_stager=lent,
    )
    assert isinstance(written, Future)
    return written


def write_state(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> Any:
    """Write in the foreground, with DCP's metadata on rank 0. Raises `ERRORS`."""
    return save(state, storage_writer=_Writer(folder), process_group=group)


def read_state(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Fill the tensors of `state` from a checkpoint written by any number of ranks.

    Raises BadInputError if it belongs to another model, or loading it would run code.
    """
    reader = RestrictedReader(folder)
    try:
        load(state, storage_reader=reader, planner=PlainLoadPlanner(), process_group=group)
    except ERRORS as error:
        reason = first_reason(error)
        if _OTHER_BLOCKS.search(reason):
            raise BadInputError(
                f"checkpoint {folder} has 8-bit or 4-bit optimizer states, whose blocks depend on "
                "tensor parallelism: with another --tp, they cannot be read. Resume with the "
                "--tp that saved it."
            ) from None
        raise BadInputError(
            f"checkpoint {folder} does not fit this model and optimizer: {reason}"
        ) from None


def collect_tensors(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None, trained_only: bool
) -> dict[str, Any]:
    """Return the tensors to save or to fill, under the names that a single process would use.

    An optimizer's fp32 copies replace the weights. The checkpoint then looks like that of an fp32
    run, and both kinds of run can resume from it.
    """
    if model is None:
        return {}
    if optimizer is None:
        return {"model": pack(get_model_state_dict(model, options=_options(trained_only)))}
    fill_state(optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_options(trained_only))
    model_state = pack(model_state)
    for name, master in _masters(model, optimizer).items():
        model_state[name] = master
        optimizer_state.pop(_STATE_OF_MASTER.format(name), None)
    return {"model": model_state, "optimizer": optimizer_state}


def drop_rounded(state: dict[str, Any], model: nn.Module | None) -> None:
    """Leave trained 16-bit weights out of a checkpoint.

    They are rounded from fp32 copies, which other ranks save.
    """
    for name, parameter in () if model is None else model.named_parameters(remove_duplicate=False):
        kept = state["model"].get(saved_name(name))
        if kept is not None and parameter.requires_grad and kept.itemsize == 2:
            del state["model"][saved_name(name)]


def load_tensors(
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    trained_only: bool,
) -> None:
    """Apply the values read into `state` to model and optimizer."""
    if model is None:
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    weights = unpack(state["model"], device)
    if optimizer is None:
        set_model_state_dict(model, weights, options=_options(trained_only))
        return
    states = dict(state["optimizer"])
    for name in _masters(model, optimizer):
        states[_STATE_OF_MASTER.format(name)] = weights[name]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    with _without_empty_groups(optimizer):
        set_state_dict(
            model,
            optimizer,
            model_state_dict=weights,
            optim_state_dict=states,
            options=_options(trained_only),
        )
    # The settings decide this, not the saved values.
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        if decay is not None:
            group["weight_decay"] = decay


def _masters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the fp32 copies of weights that an optimizer keeps, by the weights' names."""
    kept = master_weights(optimizer)
    named = model.named_parameters(remove_duplicate=False)
    return {saved_name(name): kept[parameter] for name, parameter in named if parameter in kept}


@contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Drop empty parameter groups, which torch refuses; a rank's share of a group may be empty."""
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        filled = iter(optimizer.param_groups)
        optimizer.param_groups = [next(filled) if group["params"] else group for group in groups]
