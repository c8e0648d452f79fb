"""Device and links of the catalog's machines, of a probe's record and of a host."""

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.node_names import find_node
from outpace.catalog.nodes import NODES
from outpace.catalog.references import references
from outpace.planner.calibration.cluster import DEFAULT_NETWORKS, of_catalog, of_host, of_probe
from outpace.planner.calibration.prediction_interval import QuestionKind, interval
from outpace.planner.hardware.device import matmul_s
from outpace.planner.hardware.networks import read_network
from outpace.planner.model.outline import outline
from outpace.planner.model.outline_flops import forward_flops
from outpace.records.errors import BadInputError
from outpace.records.figure import Figure, Key
from outpace.records.hardware import Architecture
from outpace.records.machine import Device, Machine
from outpace.records.probe_results import LinkFit, ProbeRecord

MACHINES = sorted(name for name, node in NODES.items() if node.accelerator is not None)
GIB = 2**30
H200_PROBE = Path(__file__).parents[3] / "benchmarks" / "data" / "h200-machine.json"


@pytest.mark.parametrize("name", [*MACHINES, *(one.replace(" ", "-") for one in ACCELERATORS)])
@pytest.mark.parametrize("nodes", [1, 3])
def test_every_machine_of_the_catalog_can_be_planned_for(name, nodes):
    node = find_node(name)
    chip = ACCELERATORS[node.accelerator]
    if nodes > 1 and chip.architecture == "apple":
        with pytest.raises(BadInputError, match="so a Mac trains alone"):
            of_catalog(node, nodes)
        return
    found = of_catalog(node, nodes)
    assert found.devices == nodes * node.processes and not found.probed
    assert found.device.memory_bytes == chip.usable_bytes < chip.memory_bytes
    assert found.device.nominal_bytes == chip.memory_bytes and found.device.kind == "cuda"
    fabric = found.fabric
    assert fabric.protocols and fabric.sources and 0 < fabric.across_bytes_per_s < 1e13
    if node.processes > 1:
        assert 0 < fabric.pair_bytes_per_s <= fabric.inside_bytes_per_s < chip.memory_bytes_per_s
    else:
        assert fabric.inside_bytes_per_s == math.inf
    assumed = nodes > 1 and not node.nics
    assert len(found.notes) == assumed
    assert all("--network" in note and "is assumed" in note for note in found.notes)


def test_every_architecture_has_a_network_that_it_is_sold_with():
    assert set(DEFAULT_NETWORKS) == set(get_args(Architecture))
    newer, older = (of_catalog(find_node(name), 2) for name in ("8xmi355x", "8xmi300x"))
    assert newer.fabric.across_bytes_per_s == older.fabric.across_bytes_per_s
    assert "InfiniBand NDR is assumed" in newer.notes[0]


@pytest.mark.parametrize(
    ("name", "devices", "share"),
    [("mi300x-platform", 2, 1 / 7), ("4x-v100", 2, 1 / 3), ("hgx-h100", 4, 1)],
)
def test_some_devices_of_a_mesh_use_the_links_between_them(name, devices, share):
    node = find_node(name)
    whole, some = of_catalog(node, 1).fabric, of_catalog(node, 1, devices=devices).fabric
    assert some.per_node == devices
    assert some.inside_bytes_per_s == pytest.approx(share * whole.inside_bytes_per_s)
    assert some.pair_bytes_per_s == whole.pair_bytes_per_s
    if name == "mi300x-platform":
        bought = of_catalog(find_node("2xmi300x"), 1).fabric
        assert bought.inside_bytes_per_s == pytest.approx(some.inside_bytes_per_s)
        assert bought.pair_bytes_per_s == pytest.approx(some.pair_bytes_per_s)


def test_devices_without_links_of_their_own_go_through_the_host():
    bare, bridged = (
        of_catalog(find_node(name), 1).fabric for name in ("2x-titan-rtx", "2x-titan-rtx-nv2")
    )
    assert bare.inside_bytes_per_s < bridged.inside_bytes_per_s
    assert bare.protocols[0].inside_s > bridged.protocols[0].inside_s


def test_sums_over_nodes_may_go_over_nccls_trees():
    fabric = of_catalog(find_node("dgx-h100"), 128).fabric
    rings = replace(fabric, protocols=tuple(p for p in fabric.protocols if not p.by_size))
    assert len(rings.protocols) == 3 < len(fabric.protocols)
    small = np.array([1e6]), np.array([1024]), np.array([1])
    assert fabric.sum_s(*small)[0] < rings.sum_s(*small)[0] / 5
    assert fabric.gather_s(*small)[0] == rings.gather_s(*small)[0]


def test_direct_links_are_shared_out_among_the_others():
    mesh = of_catalog(find_node("4x-v100"), 1).fabric
    assert mesh.pair_bytes_per_s == pytest.approx(mesh.inside_bytes_per_s / 3)
    switch = of_catalog(find_node("hgx-h100"), 1).fabric
    assert switch.pair_bytes_per_s == switch.inside_bytes_per_s


@pytest.mark.parametrize(
    ("machine", "ranks", "tokens", "hidden", "measured_us"),
    [
        pytest.param(
            "8xh100-sxm",
            8,
            4096,
            2048,
            316,
            marks=pytest.mark.xfail(strict=True, reason="predicted 17 % too slow"),
        ),
        ("8xh100-sxm", 8, 4096, 4096, 576),
        ("8xh100-sxm", 8, 16384, 7168, 3513),
        ("8xb200", 8, 4096, 2048, 316),
        ("8xb200", 8, 16384, 7168, 2128),
        ("8xgb200", 8, 16384, 2048, 1116),
        ("8xgb200", 8, 4096, 7168, 553),
        ("72xgb200", 32, 4096, 7168, 888),
    ],
)
def test_tokens_reach_their_experts_as_fast_as_was_measured(
    machine, ranks, tokens, hidden, measured_us
):
    """Mean of dispatching and combining, on H100 combining: DeepEP; the last two are HybridEP.

    Eight experts each.
    """
    fabric = of_catalog(find_node(machine), 1).fabric
    nbytes = np.array([2.0 * tokens * hidden])
    groups = np.array([ranks]), np.array([1])
    found = fabric.all_to_all_s(nbytes, 8, *groups, once=True, tokens=tokens)
    assert found[0] * 1e6 == pytest.approx(measured_us, rel=0.16)


def test_another_network_may_be_said():
    node = find_node("hgx-h100")
    said = of_catalog(node, 2, read_network("400Gbit/s"))
    assert said.fabric.across_bytes_per_s <= 50e9 and not said.notes
    own = of_catalog(find_node("dgx-h100"), 2)
    assert said.fabric.across_bytes_per_s < own.fabric.across_bytes_per_s / 4


def test_a_machine_without_accelerators_has_to_be_measured():
    with pytest.raises(BadInputError, match="outpace probe"):
        of_catalog(NODES["laptop"], 1)


def figure(kind, what, unit, value, samples=(), **of):
    unstable = None if value is not None else "its samples differ"
    return Figure(key=Key(kind=kind, what=what, of=of), unit=unit, value=value, unstable=unstable,
                  origin="measured", rounds=(samples,) if samples else ())  # fmt: skip


def matmul(size, rate, dtype="fp32", what="curve", samples=()):
    return figure("matmul", what, "FLOP/s", rate, samples, dtype=dtype, m=size, n=size, k=size)


PRODUCTS = (
    matmul(64, 20e9), matmul(512, 80e9), matmul(2048, 100e9),
    matmul(512, 60e9, what="candidate"),
)  # fmt: skip
COPIES = (
    figure("memory", "copy", "B/s", 60e9, bytes=2**15),
    figure("memory", "copy", "B/s", 12e9, bytes=2**30),
)


def link(rate, ranks=2, axis="all"):
    return LinkFit(
        collective="all-reduce", axis=axis, backend="gloo", device="cpu", ranks=ranks,
        latency=figure("all-reduce", "latency", "s", 1e-4, axis=axis),
        bandwidth=figure("all-reduce", "bandwidth", "B/s", rate, axis=axis), residual=0.01,
    )  # fmt: skip


def machine(figures=(*PRODUCTS, *COPIES), fits=(), devices=(), probed=True, **values):
    record = ProbeRecord(date="", versions={}, command="", sections=(), quick=True, took_s=1.0,
                    figures=figures, fits=fits, world_size=2 if fits else 1, hosts=1)  # fmt: skip
    return Machine(
        host_cores=4, host_memory_bytes=16 * GIB, cpu="a CPU", devices=devices,
        cpu_features=("avx2",), probed=record if probed else None, **values,
    )  # fmt: skip


def test_a_probed_cpu_is_shared_by_its_ranks(tmp_path):
    machine(fits=(link(3e9),)).save(tmp_path / "machine.json")
    read = Machine.load(tmp_path / "machine.json")
    one, two = (of_probe(read, ranks) for ranks in (1, 2))
    assert one.probed and one.nodes == 1 and two.devices == 2
    assert one.device.kind == "cpu" and one.device.rate("fp32") == 100e9
    assert two.device.rate("fp32") == 50e9 and two.device.memory_bytes == 8 * GIB
    assert one.device.memory_bytes_per_s == 12e9  # of the largest copy: no cache holds it
    sizes, shares = zip(*one.device.curve, strict=True)
    assert sizes == (2 * 64**3, 2 * 512**3, 2 * 2048**3) and shares == (0.2, 0.8, 1.0)
    assert two.fabric.inside_bytes_per_s == 3e9
    assert two.fabric.protocols[0].base_s == pytest.approx(5e-5)
    assert not one.notes


def test_loading_is_as_fast_as_the_best_loader_that_was_probed():
    loaders = (
        figure("loader", "tokens", "tokens/s", 2e6, loader="outpace", workers=0),
        figure("loader", "tokens", "tokens/s", 5e6, loader="outpace", workers=2),
        figure("loader", "tokens", "tokens/s", 9e6, loader="torch", workers=2),
    )
    assert of_probe(machine((*PRODUCTS, *COPIES, *loaders)), 1).loader_tokens_per_s == 5e6
    assert of_probe(machine(), 1).loader_tokens_per_s == float("inf")
    # Two processes on four cores load twice as much: each worker has a core.
    two = machine((*PRODUCTS, *COPIES, *loaders), (link(1e9),))
    assert of_probe(two, 2).loader_tokens_per_s == 10e6


def steps(ranks, slower=1.0, device="cpu", digest=None):
    """Steps of a probe, as fast as matmuls alone would make them, or slower."""
    found = []
    for one in references(ranks, "cpu").values():
        flops = 3 * forward_flops(outline(one.spec, "m"), one.seq_len, one.global_batch)
        of = {"reference": one.name, "ranks": ranks, "device": device,
              "digest": digest or one.digest}  # fmt: skip
        found.append(figure("step", "time", "s", slower * flops / 50e9, **of))
    return tuple(found)


def test_steps_that_were_probed_put_the_rates_right():
    parts = (*PRODUCTS, *COPIES)
    found = of_probe(machine((*parts, *steps(1, slower=4.0))), 1)
    assert found.calibrated and found.device.rate("fp32") < 0.5 * 100e9
    (note,) = found.notes
    assert "rates are fitted to" in note


@pytest.mark.parametrize(
    "others", [steps(2), steps(1, device="cuda"), steps(1, digest="of another version")]
)
def test_steps_of_other_ranks_devices_and_versions_are_left_alone(others):
    parts = (*PRODUCTS, *COPIES)
    found = of_probe(machine((*parts, *others)), 1)
    assert not found.calibrated and found == of_probe(machine(parts), 1)


def test_unsteady_figures_count_with_their_median_and_are_told():
    figures = (matmul(512, None, samples=(10e9, 30e9, 20e9)), *COPIES)
    found = of_probe(machine(figures), 1)
    assert found.device.rate("fp32") == 20e9
    (note,) = found.notes
    assert "1 figures of the probe were not stable;" in note


def test_an_accelerator_of_the_catalog_keeps_its_measured_rates():
    figures = (matmul(4096, 600e12, "bf16"), figure("memory", "copy", "B/s", 3e12, bytes=2**30))
    held = 79 * GIB
    device = Device(name="NVIDIA H100 80GB HBM3", memory_bytes=held)
    found = of_probe(machine(figures, devices=(device,) * 2), 2)
    assert found.device.kind == "cuda"
    assert matmul_seconds(found.device, 4096, 4096, 4096) == pytest.approx(2 * 4096**3 / 600e12)
    assert found.device.memory_bytes_per_s == 3e12 and found.device.memory_bytes == held
    assert found.device.peak_flops_per_s["bf16"] == pytest.approx(989.5e12, rel=0.01)


def matmul_seconds(device, m, n, k, dtype="bf16"):
    sides = (np.array([float(side)]) for side in (m, n, k))
    return float(matmul_s(device, np.array([device.rate(dtype)]), *sides, np.array([2.0]))[0])


def test_a_plan_on_a_probed_accelerator_uses_what_was_measured():
    # benchmarks/data/h200-machine.json: outpace probe --quick on one H200, whose figures these are.
    found = of_probe(Machine.load(H200_PROBE), 1)
    device, catalog = found.device, of_catalog(find_node("h200-sxm"), 1).device
    measured = {(16384, 2304, 768): 641.5e12, (16384, 768, 3072): 735.3e12}
    for shape, rate in measured.items():
        assert matmul_seconds(device, *shape) == pytest.approx(2 * np.prod(shape) / rate, rel=0.03)
    # The head's 50,257 columns at 119.6 TFLOP/s; 4,097 for 4,096 cost 6.4 and 5.7 times.
    head = matmul_seconds(device, 16384, 50257, 768)
    assert head == pytest.approx(2 * 16384 * 50257 * 768 / 119.6e12, rel=0.2)
    assert 5 < 1 / device.unaligned < 7
    assert 14e-6 < device.operator_s < 19e-6 < catalog.operator_s
    assert device.memory_bytes_per_s == pytest.approx(4.042e12, rel=1e-3)
    assert device.optimizer_share == pytest.approx(2.679 / 4.042, rel=1e-3)
    # Steps are compared, and nothing is fitted to them: they widen the interval.
    assert len(found.residuals) == 5 and found.calibrated
    assert device.rate("bf16") == catalog.rate("bf16")
    low, high, basis, _ = interval(True, kind=QuestionKind("hopper"), residuals=found.residuals)
    published = interval(False, kind=QuestionKind("hopper"))
    assert low < published.low and published.high < high and "5 steps of the probe" in basis
    assert "which widens the interval" in found.notes[0]


def test_an_accelerator_that_the_catalog_has_not_is_as_it_was_measured():
    figures = (matmul(4096, 90e12, "bf16"), figure("memory", "copy", "B/s", 1e12, bytes=2**30))
    device = Device(name="Some Accelerator 9000", memory_bytes=24 * GIB)
    found = of_probe(machine(figures, devices=(device,) * 2), 2)
    assert found.device.kind == "cuda" and found.device.memory_bytes == 24 * GIB
    assert found.device.rate("bf16") == 90e12  # each rank has one of its own
    with pytest.raises(BadInputError, match="Some Accelerator 9000 is not in the catalog"):
        of_host(machine(devices=(device,)), 1)
    with pytest.raises(BadInputError, match="outpace probe memory"):
        of_probe(machine(figures[:1], devices=(device,)), 1)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (machine(probed=False), "has no measurements"),
        (machine(figures=COPIES), "has no matmuls"),
    ],
)
def test_what_was_not_measured_is_asked_for(record, sentence):
    with pytest.raises(BadInputError, match=sentence):
        of_probe(record, 1)


def test_a_host_that_nothing_was_measured_on():
    host = machine(probed=False)
    whole, half = (of_host(host, ranks) for ranks in (1, 2))
    assert whole.device.kind == "cpu" and whole.device.rate("fp32") > 1e9
    assert half.device.rate("fp32") == pytest.approx(whole.device.rate("fp32") / 2)
    assert "outpace probe" in whole.notes[0] and whole.source == "guessed"
    bare = of_host(Machine(host_cores=1, host_memory_bytes=GIB, cpu="?"), 1)
    assert bare.device.rate("fp32") > 1e9
    cards = (Device(name="NVIDIA GeForce RTX 4090", memory_bytes=23 * GIB),) * 2
    two = of_host(machine(probed=False, devices=cards), 2)
    assert two.devices == 2 and two.device.memory_bytes == 23 * GIB and not two.probed
    assert replace(two.device, memory_bytes=None).name == "RTX 4090" and two.source == "catalog"
