"""A run's tensors as torch's distributed checkpoint (DCP) takes, writes and reads them.

Apart from `checkpoint`, which says when and where: loading DCP takes half a second, which a
run that saves nothing, or not yet, does not wait for.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
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

from outpace.optim.build import fill_state
from outpace.records.errors import BadInputError
from outpace.train.checkpoint import reason
from outpace.train.restricted import Planner, Reader

# What saving and loading raise: DCP wraps the ranks' errors in a BaseException.
ERRORS = (Exception, CheckpointException)


def _options(trained_only: bool) -> StateDictOptions:
    """Each parameter's optimizer state under its own name, so that any layout finds what it needs.

    Without frozen parameters what is not in a checkpoint is missing in the file, and found out
    there; that the rest of the model is not there either is no error.
    """
    if not trained_only:
        return StateDictOptions(flatten_optimizer_state_dict=True)
    return StateDictOptions(
        flatten_optimizer_state_dict=True, ignore_frozen_params=True, strict=False
    )


class _Writer(_FileSystemWriter):
    """Leaves out torch's checksum of each tensor: files have a better one.

    Of the class below `FileSystemWriter`, which would make the copies, too, rather than torch's own
    stager.
    """

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        before = get_crc32_options()  # of this thread, which is the one that writes
        set_crc32_options(False)
        try:
            return super().write_data(plan, planner)
        finally:
            set_crc32_options(before)


def begin(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> Future[Any]:
    """Write in the background, from a copy that is made before this returns."""
    written = async_save(state, storage_writer=_Writer(folder), process_group=group)
    assert isinstance(written, Future)
    return written


def write(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> Any:
    """Write here and now; DCP's metadata on rank 0. Raises `ERRORS`."""
    return save(state, storage_writer=_Writer(folder), process_group=group)


def read(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Fill the tensors of `state`, whatever number of ranks wrote them.

    Raises BadInputError for a checkpoint of something else, or one that would run code.
    """
    reader = Reader(folder)
    try:
        load(state, storage_reader=reader, planner=Planner(), process_group=group)
    except ERRORS as error:
        raise BadInputError(
            f"checkpoint {folder} does not fit this model and optimizer: {reason(error)}"
        ) from None


def take(
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    trained_only: bool,
) -> dict[str, Any]:
    """The tensors to save or to fill, by the names that they have in a single process."""
    if model is None:
        return {}
    if optimizer is None:
        return {"model": get_model_state_dict(model, options=_options(trained_only))}
    fill_state(optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_options(trained_only))
    return {"model": model_state, "optimizer": optimizer_state}


def put(
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    trained_only: bool,
) -> None:
    """Take over what was read into `state`."""
    if model is None:
        return
    if optimizer is None:
        set_model_state_dict(model, state["model"], options=_options(trained_only))
        return
    with _without_empty_groups(optimizer):
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_options(trained_only),
        )


@contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A rank that holds a share of the parameters may have none of a group, which torch expects."""
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        filled = iter(optimizer.param_groups)
        optimizer.param_groups = [next(filled) if group["params"] else group for group in groups]
