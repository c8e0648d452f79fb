"""Throttling and others' processes on a GPU, with a stand-in for NVML."""

import os
import time
from types import SimpleNamespace

import pytest
import torch

from outpace.probing.utilisation.gpu_throttling import (
    GpuObservation,
    GpuWatch,
    gpus_disturbed,
    slowed_words,
    watch_gpu,
)

OWN, OTHER = 10, 99
CAP, HEAT = 0x4, 0x40


class Library:
    """Answers as pynvml does, of one device."""

    class NVMLError(Exception):
        pass

    def __init__(self, reasons=0, pids=(OWN,)):
        self.reasons, self.pids, self.looks = reasons, pids, 0

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802
        assert handle == "handle"
        self.looks += 1
        if self.reasons is None:
            raise self.NVMLError("Not Supported")
        return self.reasons

    nvmlDeviceGetCurrentClocksThrottleReasons = nvmlDeviceGetCurrentClocksEventReasons  # noqa: N815

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        if self.pids is None:
            raise self.NVMLError("No permission")
        return [SimpleNamespace(pid=pid) for pid in self.pids]


def looked(own=(OWN,), pids_known=True, **library):
    return GpuWatch(Library(**library), "handle", "GPU 3", own, pids_known).observe()


def test_heat_and_others_are_told_apart_from_a_cap_that_is_always_there():
    assert gpus_disturbed([looked()]) is None
    assert gpus_disturbed([looked(reasons=CAP)]) is None
    assert slowed_words([looked(reasons=CAP)]) == ["GPU 3 was slowed down: power cap"]
    why = gpus_disturbed([looked(), looked(reasons=CAP | HEAT)])
    assert why == "GPU 3 was slowed down during the measurement: temperature (hardware)"
    assert "another process used GPU 3" in gpus_disturbed([looked(pids=(OWN, OTHER))])
    assert "2 other processes used" in gpus_disturbed([looked(pids=(OTHER, OTHER + 1))])


def test_what_the_driver_does_not_tell_is_nothing():
    assert looked(reasons=None, pids=None) == GpuObservation("GPU 3")


def test_where_numbers_are_the_hosts_as_many_as_the_probe_has_are_its_own():
    assert looked(pids=(7,), pids_known=False).others == 0
    assert looked(pids=(7, 8), pids_known=False).others == 1
    assert looked(pids=(7, 8), own=(OWN, OWN + 1), pids_known=False).others == 0
    # One of them is ours: so the numbers are those that are seen here.
    assert looked(pids=(OWN, OTHER), pids_known=False).others == 1


def test_what_is_seen_for_a_moment_is_kept(monkeypatch):
    monkeypatch.setattr("outpace.probing.utilisation.gpu_throttling._PERIOD_S", 0.01)
    library, seen = Library(), []
    watch = GpuWatch(library, "handle", "GPU 3", {OWN}, True)
    with watch.record(seen):
        library.reasons, library.pids = HEAT, (OWN, OTHER)
        before = library.looks
        while library.looks < before + 3:  # the first may have begun before
            time.sleep(0.01)
        library.reasons, library.pids = 0, (OWN,)
    assert seen == [GpuObservation("GPU 3", frozenset({"temperature (hardware)"}), 1)]
    with watch.record(seen):
        pass
    assert seen[1] == GpuObservation("GPU 3")


def test_of_each_gpu_all_looks_count_together():
    looks = [GpuObservation("GPU 0", frozenset({"power cap"})), GpuObservation("GPU 1"),
             GpuObservation("GPU 0", frozenset({"sync boost"}))]  # fmt: skip
    assert slowed_words(looks) == ["GPU 0 was slowed down: power cap, sync boost"]


def test_a_processor_has_no_watch():
    assert watch_gpu(torch.device("cpu"), (), 1.0) is None


@pytest.mark.parametrize("told", [True, False])
def test_a_gpu_is_found_by_its_identity_not_by_its_number(told, monkeypatch):
    """CUDA_VISIBLE_DEVICES numbers GPUs anew; a part of one (MIG) has another kind of identity."""
    library = Library(pids=(os.getppid(), os.getpid()))

    def handle(uuid):
        if not told:
            raise library.NVMLError("Not Found")
        assert uuid == b"GPU-abc"
        return "handle"

    library.nvmlDeviceGetHandleByUUID = handle
    library.nvmlDeviceGetIndex = lambda handle: 5
    monkeypatch.setattr(
        "outpace.probing.utilisation.gpu_throttling.open_nvml", lambda timeout_s: library
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="abc")
    )
    watch = watch_gpu(torch.device("cuda", 0), (), 1.0)
    # What started this process holds its GPU meanwhile, and is no other.
    assert (None if watch is None else watch.observe()) == (
        GpuObservation("GPU 5") if told else None
    )
