"""Whether a GPU is slowed down, or others compute on it, while it is measured."""

import os
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import psutil
import torch

from outpace.probe.nvml import computing, slowed_by
from outpace.probe.utilisation import open_nvml, same_pids

_PERIOD_S = 0.5
# A driver that hangs must not keep a probe from its end.
_PATIENCE_S = 10.0
# What comes and goes, so that a repeat would not find the same. A power cap, clocks that a person
# set and the like hold the clocks down all the time, in training too: they are said, and figures
# stand.
_PASSING = frozenset(
    {"hardware slowdown", "temperature (driver)", "temperature (hardware)", "power brake"}
)


@dataclass(frozen=True)
class Seen:
    """Of one GPU for a while. `others`: the most processes at once that are none of ours."""

    gpu: str
    slowed_by: frozenset[str] = frozenset()
    others: int = 0

    def __or__(self, more: "Seen") -> "Seen":
        """Both, of the same GPU."""
        return Seen(self.gpu, self.slowed_by | more.slowed_by, max(self.others, more.others))


class GpuWatch:
    """Asks NVML about one GPU again and again. `own`: the processes of this probe on this host.

    `pids_known`: whether NVML's process numbers are those that are seen here. In a container they
    may be the host's: then as many processes as the probe has are taken to be its own.
    """

    def __init__(
        self, library: Any, handle: Any, gpu: str, own: Collection[int], pids_known: bool
    ) -> None:
        self._library, self._handle, self._gpu = library, handle, gpu
        self._own, self._pids_known = frozenset(own), pids_known

    def look(self) -> Seen:
        """What is to be seen now; what the driver does not tell is none."""
        slowed = slowed_by(self._library, self._handle) or ()
        pids = computing(self._library, self._handle) or frozenset()
        foreign = len(pids - self._own)
        if not self._pids_known and not pids & self._own:
            foreign = max(0, len(pids) - len(self._own))
        return Seen(self._gpu, frozenset(slowed), foreign)

    @contextmanager
    def noted(self, into: list[Seen]) -> Iterator[None]:
        """Put what is seen meanwhile at the end of a list."""
        ended = threading.Event()

        def watch() -> None:
            into.append(self.look())
            done = False
            while not done:
                done = ended.wait(_PERIOD_S)
                into[-1] |= self.look()

        thread = threading.Thread(target=watch, name="gpu watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_PATIENCE_S)


def watch_gpu(device: torch.device, own: Collection[int], timeout_s: float) -> GpuWatch | None:
    """The watch of a CUDA device; None where there is none, or its driver does not answer."""
    library = open_nvml(timeout_s) if device.type == "cuda" else None
    if library is None:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    door: Any = library
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = door.nvmlDeviceGetHandleByUUID(uuid.encode())
        name = f"GPU {door.nvmlDeviceGetIndex(handle)}"
    except Exception:  # a part of a GPU (MIG), or a library that does not know the question
        return None
    return GpuWatch(library, handle, name, {*own, *_ancestors()}, same_pids())


def _ancestors() -> list[int]:
    """What started this process: a probe that waits for its ranks holds its GPU meanwhile."""
    try:
        return [os.getpid(), *(parent.pid for parent in psutil.Process().parents())]
    except psutil.Error:
        return [os.getpid()]


def _by_gpu(seen: Iterable[Seen]) -> list[Seen]:
    of: dict[str, list[Seen]] = {}
    for one in seen:
        of.setdefault(one.gpu, []).append(one)
    return [reduce(Seen.__or__, some) for some in of.values()]


def gpus_disturbed(seen: Iterable[Seen]) -> str | None:
    """Why what was measured on these GPUs is worth nothing; None where it is."""
    for one in _by_gpu(seen):
        if one.others:
            who = "another process" if one.others == 1 else f"{one.others} other processes"
            return f"{who} used {one.gpu} while it was measured"
        if passing := sorted(one.slowed_by & _PASSING):
            return f"{one.gpu} was slowed down while it was measured: {', '.join(passing)}"
    return None


def slowed_words(seen: Iterable[Seen]) -> list[str]:
    """Of each GPU that was slowed down, by what."""
    return [
        f"{one.gpu} was slowed down: {', '.join(sorted(one.slowed_by))}"
        for one in _by_gpu(seen) if one.slowed_by
    ]  # fmt: skip
