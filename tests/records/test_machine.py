"""A machine's record, old and new."""

import json
from pathlib import Path

from outpace.probing.hardware.nvidia_smi import parse
from outpace.records.errors import nearest_of
from outpace.records.machine import Device, Machine
from outpace.records.units import show_size

TOPOLOGIES = Path(__file__).parents[1] / "probing" / "topologies"


def test_a_record_has_the_links_between_devices_and_old_ones_load(tmp_path):
    old = {"host_cores": 2, "host_memory_bytes": 1, "cpu": ""}
    (tmp_path / "old.json").write_text(json.dumps(old))
    machine = Machine.load(tmp_path / "old.json")
    assert machine.topology is None
    topology = parse((TOPOLOGIES / "dgx-1-v100.txt").read_text(), "nvidia-smi topo -m")
    machine.model_copy(update={"topology": topology}).save(tmp_path / "new.json")
    kept = Machine.load(tmp_path / "new.json").topology
    assert kept == topology and kept.link_between("GPU0", "GPU4") == "NV2"


def test_machines_differ_in_what_decides_how_fast_they_compute():
    one = Machine(host_cores=2, host_memory_bytes=1, cpu="a")
    assert one.differences(one.model_copy(update={"host_memory_bytes": 2})) == ()
    assert one.differences(Machine(host_cores=4, host_memory_bytes=1, cpu="b")) == (
        "cpu",
        "host_cores",
    )
    with_gpu = one.model_copy(update={"devices": (Device(name="a GPU"),)})
    assert one.differences(with_gpu) == ("devices",) and with_gpu.differences(with_gpu) == ()


def test_long_lists_of_names_are_cut_to_the_nearest():
    names = [f"machine-{at}" for at in range(40)] + ["hgx"]
    said = nearest_of("hgx", names)
    assert said.startswith("hgx, ") and said.endswith(" and 35 more")
    assert nearest_of("a", ["b", "a"]) == "a, b"


def test_round_sizes_are_shown_round():
    sizes = (4, 4096, 65536, 64 << 20, 1536)
    assert [show_size(size) for size in sizes] == ["4 B", "4 KiB", "64 KiB", "64 MiB", "1.50 KiB"]
