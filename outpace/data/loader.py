"""Loader of one rank's micro-batches, which can start at any step."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, default_collate

from outpace.data.order import samples_at
from outpace.data.seeding import seed_generators
from outpace.data.workers import start_method, starting_workers, worker_troubles
from outpace.records.errors import BadInputError

Batch = Any


_STEPS_LOCATED = 32
_SAMPLES_LOCATED = 2**17
_ENDED = object()
_OWN = 0x6F776E  # makes these seeds differ from those of steps


class Loader:
    """Iterator over training steps that yields a list of this rank's micro-batches for each.

    Slot s of a global batch belongs to rank r in accumulation step a if s // micro_batch = a ·
    data_parallel + r. The samples of a step therefore do not depend on the number of ranks or
    workers, or on where training was resumed. If `rank` is None, nothing is read and every
    micro-batch is None. Raises BadInputError if workers die, or deliver no batch within `timeout_s`
    seconds (0: no limit).
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        rank: int | None,
        data_parallel: int,
        start_step: int,
        total_steps: int,
        workers: int,
        pin_memory: bool,
        device: torch.device,
        timeout_s: float = 0.0,
    ) -> None:
        dataset = dataset if hasattr(dataset, "locate") else _SeededDataset(dataset, seed)
        self._dataset = dataset
        self._slots = _MicroBatchSampler(
            self._dataset,
            seed,
            global_batch,
            micro_batch,
            rank or 0,
            data_parallel,
            start_step,
            total_steps,
        )
        self._reads = rank is not None
        self._workers = workers
        self._timeout_s = timeout_s
        self._pin = pin_memory
        self._device = device
        self._running: Any = None

    def __iter__(self) -> Iterator[list[Batch]]:
        if not self._reads:
            yield from self._slots.empty_steps()
            return
        batches = self._load_in_workers() if self._workers else self._load_in_process()
        if self._device.type == "cuda":
            yield from self._prefetch_to_device(self._group_by_step(batches))
        else:
            for step in self._group_by_step(batches):
                yield [to_device(batch, self._device) for batch in step]

    def _group_by_step(self, batches: Iterator[Batch]) -> Iterator[list[Batch]]:
        while True:
            step = [batch for _, batch in zip(range(self._slots.passes), batches, strict=False)]
            if len(step) < self._slots.passes:
                return
            yield step

    def _load_in_process(self) -> Iterator[Batch]:
        for keys in self._slots:
            batch = collate(self._dataset.__getitems__(keys))
            yield pin_batch(batch) if self._pin else batch

    def _load_in_workers(self) -> Iterator[Batch]:
        with worker_troubles(self._workers), starting_workers() as begin:
            self._running = iter(
                DataLoader(
                    self._dataset,
                    batch_sampler=self._slots,
                    num_workers=self._workers,
                    collate_fn=collate,
                    pin_memory=self._pin,
                    worker_init_fn=begin,
                    multiprocessing_context=start_method(),
                    prefetch_factor=2,
                    timeout=self._timeout_s,
                )
            )
        while True:
            with worker_troubles(self._workers, self._exit_codes):
                batch = next(self._running, _ENDED)
            if batch is _ENDED:
                return
            yield batch

    def _exit_codes(self) -> list[int | None]:
        return [worker.exitcode for worker in self._running._workers]

    def _prefetch_to_device(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield each step's batches on the device while copying those of the next step."""
        side = torch.cuda.Stream(self._device)

        def copy_step(step: list[Batch] | None) -> list[Batch] | None:
            if step is None:
                return None
            with torch.cuda.stream(side):
                return [to_device(batch, self._device) for batch in step]

        following = copy_step(next(steps, None))
        while following is not None:
            torch.cuda.current_stream(self._device).wait_stream(side)
            for batch in following:
                _map_tensors(batch, lambda t: t.record_stream(torch.cuda.current_stream()))
            current, following = following, copy_step(next(steps, None))
            yield current

    def close(self) -> None:
        """Shut down the workers."""
        if self._running is not None and hasattr(self._running, "_shutdown_workers"):
            self._running._shutdown_workers()
        self._running = None


class _MicroBatchSampler:
    """Batch sampler of one rank: yields the sample keys of one micro-batch at a time, in order."""

    def __init__(
        self,
        dataset: Any,
        seed: int,
        global_batch: int,
        micro_batch: int,
        rank: int,
        data_parallel: int,
        start_step: int,
        total_steps: int,
    ) -> None:
        if len(dataset) == 0:
            raise BadInputError("the data set has no samples. Give one with samples.")
        self._dataset = dataset
        self._seed = seed
        self._global_batch = global_batch
        self._steps = range(start_step, total_steps)
        self.passes = global_batch // (micro_batch * data_parallel)
        firsts = (np.arange(self.passes) * data_parallel + rank) * micro_batch
        self._slots = firsts[:, None] + np.arange(micro_batch)

    def __iter__(self) -> Iterator[list[Any]]:
        # Process many steps at once unless they are large: permuting hundreds of positions takes
        # about as long as permuting one.
        many = min(_STEPS_LOCATED, max(1, _SAMPLES_LOCATED // self._slots.size))
        for begin in range(self._steps.start, self._steps.stop, many):
            steps = np.arange(begin, min(begin + many, self._steps.stop))
            positions = steps[:, None, None] * self._global_batch + self._slots
            keys = self._dataset.locate(self._seed, positions.reshape(-1))
            for first in range(0, len(keys), self._slots.shape[1]):
                yield keys[first : first + self._slots.shape[1]]

    def empty_steps(self) -> Iterator[list[None]]:
        for _ in self._steps:
            yield [None] * self.passes

    def __len__(self) -> int:
        return len(self._steps) * self.passes


class _SeededDataset(Dataset[Any]):
    """Wrapper of a user's data set that seeds random generators by training position."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def locate(self, seed: int, positions: Any) -> list[tuple[int, int]]:
        """Return each training position with the index of its sample."""
        indices = samples_at(seed, positions, len(self))
        return list(zip(positions.tolist(), indices.tolist(), strict=True))

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        """Return the samples for several keys at once, as torch's DataLoader asks for them.

        The `__getitems__` of the user's data set is used if it exists.
        """
        if hasattr(self._dataset, "__getitems__"):
            seed_generators(self._seed, keys[0][0], _OWN)
            found = self._dataset.__getitems__([index for _, index in keys])
            if isinstance(found, list) and len(found) != len(keys):
                raise BadInputError(
                    f"__getitems__ of the data set returned a list of {len(found)} for "
                    f"{len(keys)} indices. Return a list of that many samples, or a batch as a "
                    "dict or a tuple."
                )
            return found
        return [self._read_sample(*key) for key in keys]

    def _read_sample(self, position: int, index: int) -> Any:
        seed_generators(self._seed, position, _OWN)
        return self._dataset[index]


def collate(found: Any) -> Batch:
    """Collate a list of samples; return anything else, an already collated batch, unchanged.

    Raises BadInputError if torch cannot collate the samples.
    """
    if not isinstance(found, list):
        return found
    try:
        return default_collate(found)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        first = str(error).splitlines()[0].strip().removesuffix(".")
        said = _describe_unequal_shapes(found) or f"{type(error).__name__}: {first}"
        raise BadInputError(
            f"the data set's samples cannot be collated: {said}. Pad them to one shape and leave "
            "out None values, or collate them in the data set itself: a method "
            "__getitems__(self, indices) returns the batch as a dict or a tuple."
        ) from error


def _describe_unequal_shapes(samples: Sequence[Any]) -> str | None:
    arrays = [
        [tuple(one.shape) for one in tree_leaves(sample) if hasattr(one, "shape")]
        for sample in samples
    ]
    for shapes in zip(*arrays, strict=False):
        different = [shape for shape in shapes if shape != shapes[0]]
        if different:
            return f"one has shape {shapes[0]}, another {different[0]}"
    return None


def _map_tensors(batch: Batch, change: Any) -> Batch:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_map_tensors(value, change) for value in batch)
    if is_dataclass(batch):
        changed = copy.copy(batch)
        for field in fields(batch):
            value = _map_tensors(getattr(batch, field.name), change)
            object.__setattr__(changed, field.name, value)
        return changed
    return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to `device`, asynchronously if its memory is pinned."""
    if device.type == "cpu":
        return batch
    return _map_tensors(batch, lambda t: t.to(device, non_blocking=True))


def pin_batch(batch: Batch) -> Batch:
    """Copy a batch to pinned (page-locked) memory."""
    return _map_tensors(batch, lambda t: t.pin_memory())
