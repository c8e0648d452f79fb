"""The record that a probe makes of a machine."""

from pathlib import Path
from types import SimpleNamespace

import torch

from outpace.jobs.probe import job
from outpace.jobs.probe.request import ProbeRequest
from outpace.probing.hardware.nvidia_smi import parse
from outpace.probing.timing.section import ProbeSection
from outpace.records.machine import Device, Machine
from outpace.records.probe_results import Steadiness
from outpace.records.settings import TrainSettings
from outpace.records.topology import nvlinks

FILE = Path(__file__).parents[1] / "probing" / "topologies" / "2x-titan-rtx-nvlink.txt"


def record(monkeypatch, devices):
    machine = Machine(host_cores=2, host_memory_bytes=1, cpu="", devices=devices)
    topology = parse(FILE.read_text(), "nvidia-smi topo -m")
    monkeypatch.setattr(job, "identify", lambda find: machine)
    monkeypatch.setattr(job, "read_if_there", lambda timeout_s: topology)
    request = ProbeRequest(("matmul",), True, TrainSettings(), "outpace probe matmul", None)
    here = SimpleNamespace(request=request, device=torch.device("cpu"))
    return job._build_machine(here, ProbeSection(), Steadiness(), 1.0, 1)


def test_links_between_devices_are_in_it(monkeypatch):
    devices = (Device(name="NVIDIA TITAN RTX"),) * 2
    found = record(monkeypatch, devices)
    assert nvlinks(found.topology.link_between("GPU0", "GPU1")) == 2
    assert found.probed.command == "outpace probe matmul"


def test_a_host_without_devices_is_not_asked_for_them(monkeypatch):
    assert record(monkeypatch, ()).topology is None
