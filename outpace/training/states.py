"""A run's tensors in the form in which torch's distributed checkpoint (DCP) writes and reads them.

It is separate from `checkpoint`, which determines when and where: loading DCP takes half a second,
which a run need not wait for if it saves nothing, or not yet.
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
from outpace.training.past_cache import DirectWriter
from outpace.training.safe_checkpoint import PlainLoadPlanner, RestrictedReader

# Errors of saving and loading: DCP wraps those of ranks in a BaseException.
ERRORS = (Exception, CheckpointException)
SMALL_BYTES = 8  # torch's stager pins nothing for storages below 5
_OTHER_BLOCKS = re.compile(r"Size mismatch .* for optimizer\.state\.\S+_scale\b")
_STATE_OF_MASTER = "state.{}.master"  # in the optimizer's flat state


def _options(trained_only: bool) -> StateDictOptions:
    """Return options that store each parameter's optimizer state under its name, for any layout.

    With `trained_only`, the checkpoint has no frozen parameters, so loading accepts that the rest
    of the model is missing from it.
    """
    if not trained_only:
        return StateDictOptions(flatten_optimizer_state_dict=True)
    return StateDictOptions(
        flatten_optimizer_state_dict=True, ignore_frozen_params=True, strict=False
    )


class InPlaceStager(AsyncStager):
    """Stager that saves a state in place until it changes, and from a copy after that.

    A copy of the whole state takes as much memory again, which a virtual machine may be slow to
    provide (docs/development/log.md). A step's forward and backward, which change nothing, are long
    enough to write most of the state. Each tensor is copied separately when its turn comes, so a
    change of the state waits only for memory, never for a disk. This is only for plain CPU tensors.
    """

    _synchronize_after_execute = False  # `give_back` is called before the state changes

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._unread: dict[int, Tensor] = {}  # by `id`
        self._room: mmap.mmap | None = None  # room for a copy of one tensor

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Stage the same memory, with tensors whose memory can be swapped."""
        lent: dict[str, Any] = tree_map_only(Tensor, Tensor.detach, state_dict)
        self._unread = {id(one): one for one in tree_leaves(lent) if isinstance(one, Tensor)}
        return lent

    def synchronize_staging(self) -> None:
        """Do nothing, since nothing is being copied."""

    def close(self) -> None:
        """Do nothing, since there is nothing to close."""

    def drop_except(self, wanted: Iterable[Any]) -> None:
        """Drop all staged tensors except those that will be read."""
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
        """Copy into existing memory, in this thread, since torch's copy would use several."""
        if self._room is None or not tensor.is_contiguous() or not tensor.numel():
            return tensor.clone()
        copied = torch.frombuffer(self._room, dtype=tensor.dtype, count=tensor.numel())
        np.copyto(copied.view(torch.uint8).numpy(), tensor.view(-1).view(torch.uint8).numpy())
        return copied.view(tensor.shape)

    def give_back(self) -> None:
        """Copy everything that was not read, before the state changes."""
        with self._turn:
            for tensor in self._unread.values():
                tensor.data = tensor.clone()
            self._unread.clear()


class CopyStream:
    """A GPU stream for copies that run in parallel to the computation."""

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
    """Return whether torch's stager cannot pin memory for a separate copy of this tensor."""
    return tensor.is_cuda and tensor.nbytes < SMALL_BYTES


@torch.no_grad()
def join_small(state: dict[str, Any], memory: dict[Any, Tensor]) -> dict[str, Any]:
    """Return the state with small tensors of the same device and dtype as views of one tensor.

    Copies to memory that is not pinned make the host wait for all copies before them, and fused
    optimizers have a small tensor, "step", for each parameter. `memory` is reused.
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
            memory[kind] = parts[0].new_empty(total + SMALL_BYTES)  # so that it is not small itself
        joined = memory[kind][:total]
        torch.cat([part.reshape(-1) for part in parts], out=joined)
        for place, part, view in zip(places, parts, joined.split(sizes), strict=True):
            leaves[place] = view.view(part.shape)
    joined_state: dict[str, Any] = tree_unflatten(leaves, structure)
    return joined_state


class PinnedCopies(AsyncStager):
    """Copies of a GPU's state in pinned host memory, made while the GPU computes.

    The memory is kept for the next save, because pinning it takes longer than the copy. Training
    waits for the copy only on the device, and only before the optimizer changes the copied state.
    """

    _synchronize_after_execute = False  # `give_back` is called before the state changes

    def __init__(self, stager: StateDictStager, stream: CopyStream) -> None:
        self._stager, self._stream = stager, stream
        self._state: dict[str, Any] | None = None  # held until it is copied
        self._joined: dict[Any, Tensor] = {}  # joined small tensors, by device and dtype

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state in host memory, whose values are valid after `read`."""
        self._state = state_dict
        with self._stream.copy_after_computing():
            joined = join_small(state_dict, self._joined)
            staged: dict[str, Any] = self._stager.stage(joined, non_blocking=True)
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing: `read` waits."""

    def close(self) -> None:
        """Do nothing, because the memory is kept."""

    def drop_except(self, wanted: Iterable[Any]) -> None:
        """Do nothing, because everything is copied already or about to be."""

    def read(self, found: Any) -> Any:
        """Return what was staged, after waiting for it."""
        self._stream.wait()
        self._state = None
        return found

    def give_back(self) -> None:
        """Make the device finish the copies before the state changes."""
        self._stream.hold_computing()


class _Planner(DefaultSavePlanner):
    """Save planner that reads lent tensors, and of replicated data what this rank writes."""

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
    """File that may be flushed after it was closed.

    torch's streams flush it on deletion. If the disk was full, this happens after it was closed,
    and Python 3.13 reports an ignored exception each time.
    """

    def flush(self) -> None:
        if not self.closed:
            super().flush()


class _ThroughCache(FileSystem):
    """Writer like torch's, without warnings when a closed file is flushed again."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with _QuietWriter(io.FileIO(path, mode)) as file:
            yield file


class _PastCache(FileSystem):
    """Writer that bypasses the page cache, which would take memory from the computation."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with DirectWriter(Path(path)) as file:
            yield file


class _Writer(_FileSystemWriter):
    """Writer without torch's checksum of each tensor, since the files have a better one.

    It derives from the class below `FileSystemWriter`, so that a stager makes the copies.
    `past_cache`: bypass the page cache, for writing during a step. These files sync themselves to
    disk.
    """

    def __init__(self, folder: Path, past_cache: bool = False) -> None:
        super().__init__(folder, sync_files=not past_cache)
        self.fs = _PastCache() if past_cache else _ThroughCache()
        if past_cache:
            # CPU tensors are not copied ahead, even if there are other devices.
            self.per_thread_copy_ahead = 0

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        before = get_crc32_options()  # for this thread, which writes
        set_crc32_options(False)
        try:
            return super().write_data(plan, planner)
        finally:
            set_crc32_options(before)


def can_lend(state: dict[str, Any]) -> bool:
    """Return whether all tensors are plain ones on a CPU."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return all(type(one) in (Tensor, nn.Parameter) and one.is_cpu for one in tensors)


def pinned_copies(state: dict[str, Any]) -> PinnedCopies | None:
    """Return copies for a state with tensors on a GPU; None for others."""
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
    """Write in the background, from `lent` tensors, or from a copy made before this returns."""
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
    """Write in the foreground; DCP's metadata on rank 0. Raises `ERRORS`."""
    return save(state, storage_writer=_Writer(folder), process_group=group)


def read_state(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Fill the tensors of `state` from a checkpoint written by any number of ranks.

    Raises BadInputError for a checkpoint of something else, or one that would run code.
    """
    reader = RestrictedReader(folder)
    try:
        load(state, storage_reader=reader, planner=PlainLoadPlanner(), process_group=group)
    except ERRORS as error:
        reason = first_reason(error)
        if _OTHER_BLOCKS.search(reason):
            raise BadInputError(
                f"checkpoint {folder} has optimizer states in 8 or 4 bits, in blocks that tensor "
                "parallelism splits: with another --tp, the blocks differ and cannot be read. "
                "Resume with the --tp that saved it."
            ) from None
        raise BadInputError(
            f"checkpoint {folder} does not fit this model and optimizer: {reason}"
        ) from None


def collect_tensors(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None, trained_only: bool
) -> dict[str, Any]:
    """Return the tensors to save or to fill, by their names in a single process.

    If the optimizer keeps fp32 copies of weights, these replace the weights. The checkpoint is then
    like that of an fp32 run, and either kind of run can resume from it.
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
    """Leave trainable 16-bit weights out of a checkpoint.

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
    """Apply the values that were read to `state`."""
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
    """Drop empty parameter groups, which torch refuses; a rank may have no share of a group."""
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        filled = iter(optimizer.param_groups)
        optimizer.param_groups = [next(filled) if group["params"] else group for group in groups]
