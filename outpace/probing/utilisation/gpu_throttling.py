"""Detection of throttled clocks and of other processes on a GPU during a measurement."""

import os
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import psutil
import torch

from outpace.probing.hardware.nvml import computing_pids, throttle_reasons
from outpace.probing.utilisation.sampler import open_nvml, same_pids

_PERIOD_S = 0.5
# A driver that hangs must not keep a probe from finishing.
_PATIENCE_S = 10.0
# Transient causes, which may be absent in a repeat. Other causes, such as a power cap or clocks set
# by a user, also apply during training: they are reported, and the figures remain valid.
_PASSING = frozenset(
    {"hardware slowdown", "temperature (driver)", "temperature (hardware)", "power brake"}
)


@dataclass(frozen=True)
class GpuObservation:
    """Reasons why one GPU was throttled in a period, and its use by other programs.

    `others` is the largest number of processes of other programs that computed on the GPU.
    """

    gpu: str
    slowed_by: frozenset[str] = frozenset()
    others: int = 0

    def __or__(self, more: "GpuObservation") -> "GpuObservation":
        return GpuObservation(
            self.gpu, self.slowed_by | more.slowed_by, max(self.others, more.others)
        )


class GpuWatch:
    """Monitor that queries NVML about one GPU.

    `probe_pids`: processes of this probe on this host. `pids_known`: whether NVML's process IDs are
    the ones visible here. In a container, NVML may report those of the host. Then, the probe's
    processes cannot be recognised, and their number is subtracted from that of all processes.
    """

    def __init__(
        self, library: Any, handle: Any, gpu: str, probe_pids: Collection[int], pids_known: bool
    ) -> None:
        self._library, self._handle, self._gpu = library, handle, gpu
        self._probe_pids, self._pids_known = frozenset(probe_pids), pids_known

    def observe(self) -> GpuObservation:
        """Return why the GPU is throttled now, and how many processes of others compute on it.

        What the driver does not report counts as none.
        """
        slowed = throttle_reasons(self._library, self._handle) or ()
        pids = computing_pids(self._library, self._handle) or frozenset()
        foreign = len(pids - self._probe_pids)
        if not self._pids_known and not pids & self._probe_pids:
            foreign = max(0, len(pids) - len(self._probe_pids))
        return GpuObservation(self._gpu, frozenset(slowed), foreign)

    @contextmanager
    def record(self, into: list[GpuObservation]) -> Iterator[None]:
        """Observe the GPU during the context, and append the result to the list `into`."""
        ended = threading.Event()

        def watch() -> None:
            into.append(self.observe())
            done = False
            while not done:
                done = ended.wait(_PERIOD_S)
                into[-1] |= self.observe()

        thread = threading.Thread(target=watch, name="gpu watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_PATIENCE_S)


def watch_gpu(
    device: torch.device, probe_pids: Collection[int], timeout_s: float
) -> GpuWatch | None:
    """Return a monitor of a CUDA device; None without one, or if the driver does not answer."""
    library = open_nvml(timeout_s) if device.type == "cuda" else None
    if library is None:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    nvml: Any = library
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        name = f"GPU {nvml.nvmlDeviceGetIndex(handle)}"
    except Exception:  # a part of a GPU (MIG), or a library without this query
        return None
    return GpuWatch(
        library, handle, name, {*probe_pids, *_process_and_ancestor_pids()}, same_pids()
    )


def _process_and_ancestor_pids() -> list[int]:
    """Return the PIDs of this process and its ancestors, which may keep the GPU open."""
    try:
        return [os.getpid(), *(parent.pid for parent in psutil.Process().parents())]
    except psutil.Error:
        return [os.getpid()]


def _combine_by_gpu(seen: Iterable[GpuObservation]) -> list[GpuObservation]:
    of: dict[str, list[GpuObservation]] = {}
    for one in seen:
        of.setdefault(one.gpu, []).append(one)
    return [reduce(GpuObservation.__or__, some) for some in of.values()]


def gpus_disturbed(seen: Iterable[GpuObservation]) -> str | None:
    """Explain why measurements on these GPUs are invalid; None if they are valid."""
    for one in _combine_by_gpu(seen):
        if one.others:
            who = "another process" if one.others == 1 else f"{one.others} other processes"
            return f"{who} used {one.gpu} during the measurement"
        if passing := sorted(one.slowed_by & _PASSING):
            return f"{one.gpu} was slowed down during the measurement: {', '.join(passing)}"
    return None


def slowed_words(seen: Iterable[GpuObservation]) -> list[str]:
    """Describe why GPUs were slowed down, for each GPU that was."""
    return [
        f"{one.gpu} was slowed down: {', '.join(sorted(one.slowed_by))}"
        for one in _combine_by_gpu(seen) if one.slowed_by
    ]  # fmt: skip
