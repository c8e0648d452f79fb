"""Collecting, writing and reading a run's tensors with torch's distributed checkpoint (DCP).

`checkpoint` decides when and where to save. This module is separate because importing DCP takes
half a second, which runs that do not save should not spend.
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

# Errors of saving and loading. CheckpointException is DCP's, and a BaseException.
ERRORS = (Exception, CheckpointException)
SMALL_BYTES = 8  # torch's stager pins no memory for storages below 5 bytes
_OTHER_BLOCKS = re.compile(r"Size mismatch .* for optimizer\.state\.\S+_scale\b")
_STATE_OF_MASTER = "state.{}.master"  # key in the optimizer's flattened state


def _options(trained_only: bool) -> StateDictOptions:
    """Return options under which checkpoints do not depend on the plan: states by parameter name.

    With `trained_only`, checkpoints have no frozen parameters, and loading does not expect them.
    """
    if not trained_only:
        return StateDictOptions(flatten_optimizer_state_dict=True)
    return StateDictOptions(
        flatten_optimizer_state_dict=True, ignore_frozen_params=True, strict=False
    )


class InPlaceStager(AsyncStager):
    """Stager that saves tensors in place. Before the state changes, it copies those not yet saved.

    A copy of the whole state needs as much memory again, which a virtual machine may be slow to
    provide (docs/development/log.md). Forward and backward do not change the state, and usually
    take long enough to write most of it. The writer reads each tensor into a buffer before writing
    it, so `give_back` never waits for a disk. It supports only plain CPU tensors.
    """

    _synchronize_after_execute = False  # `give_back` waits instead

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._unread: dict[int, Tensor] = {}  # tensors to read, by `id`
        self._room: mmap.mmap | None = None  # memory for a copy of one tensor

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state with new tensors that share its memory.

        Later, `give_back` copies those tensors that have not been read yet.
        """
        lent: dict[str, Any] = tree_map_only(Tensor, Tensor.detach, state_dict)
        self._unread = {id(one): one for one in tree_leaves(lent) if isinstance(one, Tensor)}
        return lent

    def synchronize_staging(self) -> None:
        """Do nothing: staging makes no copies."""

    def close(self) -> None:
        """Do nothing."""

    def drop_except(self, wanted: Iterable[Any]) -> None:
        """Forget all staged tensors that this rank does not write; it writes those in `wanted`."""
        places = {id(one) for one in wanted}
        with self._turn:
            self._unread = {k: v for k, v in self._unread.items() if k in places}
            largest = max((one.nbytes for one in self._unread.values()), default=0)
            self._room = mmap.mmap(-1, largest) if largest else None

    def read(self, found: Any) -> Any:
        """Return a copy of a staged tensor, valid until the next call.

        Return any other value as it is.
        """
        with self._turn:
            return found if self._unread.pop(id(found), None) is None else self._copy(found)

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to a reused buffer, by NumPy, since torch would use several threads."""
        if self._room is None or not tensor.is_contiguous() or not tensor.numel():
            return tensor.clone()
        copied = torch.frombuffer(self._room, dtype=tensor.dtype, count=tensor.numel())
        np.copyto(copied.view(torch.uint8).numpy(), tensor.view(-1).view(torch.uint8).numpy())
        return copied.view(tensor.shape)

    def give_back(self) -> None:
        """Copy all staged tensors that have not been read. Call this before the state changes."""
        with self._turn:
            for tensor in self._unread.values():
                tensor.data = tensor.clone()
            self._unread.clear()


class CopyStream:
    """CUDA stream for copies that overlap with computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copied: torch.cuda.Event | None = None

    @contextmanager
    def copy_after_computing(self) -> Iterator[None]:
        """Run copies in the context on this stream, after the work queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied = self._stream.record_event()

    def hold_computing(self) -> None:
        """Make later work on the current stream wait for the copies; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        """Make the host wait for the copies."""
        if self._copied is not None:
            self._copied.synchronize()


def is_small_on_gpu(tensor: Tensor) -> bool:
    """Return whether a GPU tensor is too small for torch's stager to pin its copy."""
    return tensor.is_cuda and tensor.nbytes < SMALL_BYTES


@torch.no_grad()
def join_small(state: dict[str, Any], memory: dict[Any, Tensor]) -> dict[str, Any]:
    """Return the state with small GPU tensors as views of one tensor per device and dtype.

    torch's stager does not pin the copies of small tensors, so each would make the host wait for
    all earlier copies, and fused optimizers have a small tensor "step" for each parameter. `memory`
    has the joined tensors, which are reused between calls.
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
            # large enough not to be small itself
            memory[kind] = parts[0].new_empty(total + SMALL_BYTES)
        joined = memory[kind][:total]
        torch.cat([part.reshape(-1) for part in parts], out=joined)
        for place, part, view in zip(places, parts, joined.split(sizes), strict=True):
            leaves[place] = view.view(part.shape)
    joined_state: dict[str, Any] = tree_unflatten(leaves, structure)
    return joined_state


class PinnedCopies(AsyncStager):
    """Stager that copies a GPU's state to pinned host memory while the GPU computes.

    The memory is kept for the next save, because pinning takes longer than copying. Only the GPU
    waits for the copies, and only before the optimizer changes the state.
    """

    _synchronize_after_execute = False  # `give_back` waits instead

    def __init__(self, stager: StateDictStager, stream: CopyStream) -> None:
        self._stager, self._stream = stager, stream
        self._state: dict[str, Any] | None = None  # kept until it is copied
        self._joined: dict[Any, Tensor] = {}  # joined small tensors, by device and dtype

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Start the copies. Return the state in host memory; its values are valid after `read`."""
        self._state = state_dict
        with self._stream.copy_after_computing():
            joined = join_small(state_dict, self._joined)
            staged: dict[str, Any] = self._stager.stage(joined, non_blocking=True)
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing: `read` waits for the copies."""

    def close(self) -> None:
        """Do nothing: the memory is kept for the next save."""

    def drop_except(self, wanted: Iterable[Any]) -> None:
        """Do nothing: everything is copied."""

    def read(self, found: Any) -> Any:
        """Wait for the copies and return the staged value."""
        self._stream.wait()
        self._state = None
        return found

    def give_back(self) -> None:
        """Make the GPU finish the copies before later work, which changes the state."""
        self._stream.hold_computing()


class _StagedSavePlanner(DefaultSavePlanner):
    """Save planner that reads tensors through a stager, and only those that this rank writes."""

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
    """File that may be flushed after it is closed.

    torch's streams flush on deletion, which is after closing if the disk is full. Python 3.13 would
    report an ignored exception each time.
    """

    def flush(self) -> None:
        if not self.closed:
            super().flush()


class _CachedFileSystem(FileSystem):
    """torch's file system, without warnings when a closed file is flushed."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with _QuietWriter(io.FileIO(path, mode)) as file:
            yield file


class _DirectFileSystem(FileSystem):
    """File system that bypasses the page cache, which would take memory from the computation."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with DirectWriter(Path(path)) as file:
            yield file


class _StateWriter(_FileSystemWriter):
    """DCP's writer without its checksum per tensor, since each file has a stronger one.

    It derives from the base class of `FileSystemWriter`, which is not a stager itself. With
    `past_cache`, it bypasses the page cache, for saves during a step; such files are synced when
    they are closed.
    """

    def __init__(self, folder: Path, past_cache: bool = False) -> None:
        super().__init__(folder, sync_files=not past_cache)
        self.fs = _DirectFileSystem() if past_cache else _CachedFileSystem()
        if past_cache:
            # Do not copy CPU tensors ahead, which the writer does if there is an accelerator.
            self.per_thread_copy_ahead = 0

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        before = get_crc32_options()  # per thread, and this is the thread that writes
        set_crc32_options(False)
        try:
            return super().write_data(plan, planner)
        finally:
            set_crc32_options(before)


def can_save_in_place(state: dict[str, Any]) -> bool:
    """Return whether all tensors of a state are plain CPU tensors, which can be saved in place."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return all(type(one) in (Tensor, nn.Parameter) and one.is_cpu for one in tensors)


def pinned_copies(state: dict[str, Any]) -> PinnedCopies | None:
    """Return a stager for a state with tensors on a GPU; None if it has none."""
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
    """Start writing a state in the background.

    The stager `lent` copies the state while it is written. Without one, the state is copied before
    this returns.
    """
    planner = None if lent is None else _StagedSavePlanner(lent)
    written = async_save(
        state,
        storage_writer=_StateWriter(folder, past_cache=lent is not None),
        planner=planner,
        process_group=group,
        async_stager=lent,
    )
    assert isinstance(written, Future)
    return written


def write_state(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> Any:
    """Write a state and return DCP's metadata when it is written. Raises one of `ERRORS`."""
    return save(state, storage_writer=_StateWriter(folder), process_group=group)


def read_state(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Read the tensors of `state` from a checkpoint, which any number of ranks may have written.

    Raises BadInputError if it is from another model, or if loading it would run code.
    """
    reader = RestrictedReader(folder)
    try:
        load(state, storage_reader=reader, planner=PlainLoadPlanner(), process_group=group)
    except ERRORS as error:
        reason = first_reason(error)
        if _OTHER_BLOCKS.search(reason):
            raise BadInputError(
                f"checkpoint {folder} has 8-bit or 4-bit optimizer states, which depend on the "
                "degree of tensor parallelism and cannot be read with another --tp. Resume with "
                "the --tp that saved it."
            ) from None
        raise BadInputError(
            f"checkpoint {folder} does not fit this model and optimizer: {reason}"
        ) from None


def collect_tensors(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None, trained_only: bool
) -> dict[str, Any]:
    """Return the tensors to save or load, by the names that they have in a single process.

    An optimizer's fp32 master weights replace the weights. The checkpoint is then like that of an
    fp32 run, and runs of either precision can resume from it.
    """
    if model is None:
        return {}
    if optimizer is None:
        return {"model": pack(get_model_state_dict(model, options=_options(trained_only)))}
    fill_state(optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_options(trained_only))
    model_state = pack(model_state)
    for name, master in _named_masters(model, optimizer).items():
        model_state[name] = master
        optimizer_state.pop(_STATE_OF_MASTER.format(name), None)
    return {"model": model_state, "optimizer": optimizer_state}


def drop_16bit_weights(state: dict[str, Any], model: nn.Module | None) -> None:
    """Remove trained 16-bit weights from a state that this rank is to save.

    Other ranks save the same weights in fp32, as the optimizer's master weights.
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
    """Load the values of `state` into model and optimizer."""
    if model is None:
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    weights = unpack(state["model"], device)
    if optimizer is None:
        set_model_state_dict(model, weights, options=_options(trained_only))
        return
    states = dict(state["optimizer"])
    for name in _named_masters(model, optimizer):
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
    # Weight decay is a setting of this run, so keep its value.
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        if decay is not None:
            group["weight_decay"] = decay


def _named_masters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    kept = master_weights(optimizer)
    named = model.named_parameters(remove_duplicate=False)
    return {saved_name(name): kept[parameter] for name, parameter in named if parameter in kept}


@contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hide parameter groups that are empty on this rank, which torch refuses to load."""
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        filled = iter(optimizer.param_groups)
        optimizer.param_groups = [next(filled) if group["params"] else group for group in groups]
