"""The record that a probe makes of a machine."""

from pathlib import Path
from types import SimpleNamespace

import torch

from outpace.launch import probing
from outpace.launch.probe_wishes import Wishes
from outpace.probe.section import Section
from outpace.probe.topology import parse
from outpace.records.machine import Device, Machine
from outpace.records.probed import Steadiness
from outpace.records.settings import TrainSettings

FILE = Path(__file__).parents[1] / "probe" / "topologies" / "2x-titan-rtx-nvlink.txt"


def record(monkeypatch, devices):
    machine = Machine(host_cores=2, host_memory_bytes=1, cpu="", devices=devices)
    topology = parse(FILE.read_text(), "nvidia-smi topo -m")
    monkeypatch.setattr(probing, "identify", lambda find: machine)
    monkeypatch.setattr(probing, "read_if_there", lambda timeout_s: topology)
    wishes = Wishes(("matmul",), True, TrainSettings(), "outpace probe matmul", None)
    here = SimpleNamespace(wishes=wishes, device=torch.device("cpu"))
    return probing._machine(here, Section(), Steadiness(), 1.0, 1)


def test_links_between_devices_are_in_it(monkeypatch):
    devices = (Device(name="NVIDIA TITAN RTX"),) * 2
    found = record(monkeypatch, devices)
    assert found.topology.nvlink_groups == (("GPU0", "GPU1"),)
    assert found.probed.command == "outpace probe matmul"


def test_a_host_without_devices_is_not_asked_for_them(monkeypatch):
    assert record(monkeypatch, ()).topology is None
