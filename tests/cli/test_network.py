"""`outpace network`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.links import LINKS
from outpace.catalog.nodes import NODES
from outpace.cli.main import main
from outpace.probing.collectives.advice import network_advice
from outpace.records.figure import Figure, Key
from outpace.records.machine import Machine
from outpace.records.plan import Plan, PlanFile
from outpace.records.probe_results import LinkFit, ProbeRecord
from outpace.records.units import show_count

BLOOM = ("network", "--model=bloom-176b", "--machine=hgx-a100", "--nodes=48",
         "--network=4 x omni-path-100", "--global-batch=2048", "--tp=4", "--pp=12",
         "--precision=bf16-pure", "--checkpointing=full")  # fmt: skip
TINY = ("network", "--model=outpace-tiny", "--machine=dgx-a100")


def said(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_strategies_are_compared_and_assumptions_shown(capsys, monkeypatch):
    answer = said(capsys, *BLOOM)
    needs = {need["title"]: need for need in answer["needs"]}
    assert set(needs) == {
        "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, 1 pass", "TP 4 × PP 12 × replicas 8",
    }  # fmt: skip
    product, zero3 = needs["TP 4 × PP 12 × replicas 8"], needs["ZeRO-3"]
    assert zero3["least_node_bytes_per_s"] > 2 * product["least_node_bytes_per_s"]
    assert product["own"]["slowdown"] < 0.05 < zero3["own"]["slowdown"]
    assert needs["DDP"]["fits"] is False and zero3["fits"] is True
    assert answer["rate"]["origin"] == "catalog" and answer["share"] is None
    assert answer["own"]["origin"] == "catalog"
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*BLOOM]) == 0
    shown = capsys.readouterr().out
    assert "TFLOP/s per device, catalog;" in " ".join(shown.split())
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 100
    assert "network is too slow: a step" in shown and "network is fast enough: it costs" in shown


def test_a_share_of_the_peak_takes_the_place_of_published_rates(capsys):
    shares = [said(capsys, *BLOOM, f"--share={share}") for share in (0.2, 0.4)]
    assert [answer["share"] for answer in shares] == [0.2, 0.4]
    assert shares[1]["rate"]["value"] == pytest.approx(0.4 * 312e12)
    # Pure computing, beside what waits for latencies: half the rate takes twice as long.
    slow, fast = (answer["needs"][0]["compute_s"] for answer in shares)
    assert slow == pytest.approx(2 * fast, rel=0.02)
    assert main([*BLOOM, "--share=0.4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ASSUMED: 0.4 of the catalog's peak, as asked" in shown


SIDES = {"m": 4096, "n": 4096, "k": 4096}


def figure(kind, what, unit, value, **of):
    key = Key(kind=kind, what=what, of=of)
    return Figure(key=key, unit=unit, value=value, origin="measured")


def link(axis, ranks, rate):
    return LinkFit(
        collective="all-reduce", axis=axis, backend="nccl", device="cuda", ranks=ranks,
        latency=figure("all-reduce", "latency", "s", 1e-5, axis=axis),
        bandwidth=figure("all-reduce", "bandwidth", "B/s", rate, axis=axis), residual=0.01,
    )  # fmt: skip


def probe(path, *fits, ranks=1, hosts=1):
    """A machine file of a probe with these links, and what it takes to reckon with it."""
    figures = (
        figure("matmul", "best", "FLOP/s", 250e12, dtype="fp32", **SIDES),
        figure("matmul", "best", "FLOP/s", 250e12, dtype="bf16", **SIDES),
        figure("memory", "copy", "B/s", 9e12, bytes=1000),
        figure("memory", "copy", "B/s", 1.5e12, bytes=10**9),
    )
    probed = ProbeRecord(date="", versions={}, command="", sections=(), quick=True, took_s=1.0,
                    figures=figures, fits=fits, world_size=ranks, hosts=hosts)  # fmt: skip
    Machine(host_cores=8, host_memory_bytes=1, cpu="", probed=probed).save(path)
    return f"--probe={path}"


def test_a_plan_alone_with_what_was_measured(capsys, tmp_path):
    probed = probe(
        tmp_path / "m.json", link("all", 16, 25e9), link("node", 8, 200e9), link("across", 2, 40e9),
        ranks=16, hosts=2,
    )  # fmt: skip
    plan = Plan(strategy="zero3", dp_shard=16, precision="bf16")
    plan.save(tmp_path / "plan.json")
    words = ["--nodes=2", f"--plan={tmp_path / 'plan.json'}", probed]
    answer = said(capsys, *TINY, *words)
    (need,) = answer["needs"]
    assert answer["rate"]["value"] == 250e12 and answer["share"] is None
    assert answer["memory_rate"]["value"] == 1.5e12
    # Eight groups at once, each of a rank on either node.
    assert answer["own"]["origin"] == "measured" and answer["own"]["bytes_per_s"] == 8 * 40e9
    assert answer["inside"]["origin"] == "measured" and answer["inside"]["bytes_per_s"] == 200e9
    assert {one["part"] for one in need["exchanged"]} == {"gathers", "gradients", "control"}
    assert [one["value"] for one in answer["measured"]] == [25e9, 200e9, 40e9]
    assert main([*TINY, *words]) == 0
    assert "Measured by outpace probe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fits", "ranks", "hosts", "per_node", "own", "inside"),
    [
        # Of two nodes of four, asked for as many or for another number of them.
        ((link("all", 8, 2e9), link("node", 4, 30e9), link("across", 2, 5e9)), 8, 2, 4, 20e9, 30e9),
        # A rank on each host: all of them are the network, and nothing is inside.
        ((link("all", 4, 6e9),), 4, 4, 1, 6e9, None),
        # One host: all of them are inside.
        ((link("all", 4, 7e9),), 4, 1, 4, None, 7e9),
    ],
)
@pytest.mark.parametrize("nodes", [1, 3])
def test_measured_links_are_a_nodes_and_a_devices(
    capsys, tmp_path, nodes, fits, ranks, hosts, per_node, own, inside
):
    probed = probe(tmp_path / "m.json", *fits, ranks=ranks, hosts=hosts)
    words = ["network", "--model=outpace-tiny", probed, f"--nodes={nodes}"]
    answer = said(capsys, *words)
    assert answer["devices_per_node"] == per_node
    assert (answer["own"] and answer["own"]["bytes_per_s"]) == own
    assert (answer["inside"] and answer["inside"]["bytes_per_s"]) == inside
    assert main(words) == 0
    assert ("Within a node: one device" in capsys.readouterr().out) == (inside is None)


def test_all_ranks_of_many_hosts_are_no_link_within_one(capsys, tmp_path):
    probed = probe(tmp_path / "m.json", link("all", 8, 2e9), ranks=8, hosts=2)
    answer = said(capsys, *TINY, probed)
    assert answer["inside"]["origin"] == "catalog"
    assert main(["network", "--model=outpace-tiny", probed]) == 2
    assert "the links within a node are not known" in capsys.readouterr().err
    probed = probe(tmp_path / "m.json", link("across", 2, 2e9), ranks=7, hosts=2)
    assert main(["network", "--model=outpace-tiny", probed]) == 2
    assert "not the same number on each" in capsys.readouterr().err


def test_the_probe_says_of_a_node_what_the_network_question_reckons_with(capsys, tmp_path):
    fits = (link("node", 8, 200e9), link("across", 2, 5e9))
    nodes = (tuple(range(8)), tuple(range(8, 16)))
    (unknown,) = network_advice([], nodes)
    assert "the bandwidth between nodes is unknown" in unknown.text
    assert network_advice([], nodes[:1]) == []
    (advice,) = network_advice(fits, nodes)
    assert "320.00 Gbit/s per node" in advice.text
    probed = probe(tmp_path / "m.json", *fits, ranks=16, hosts=2)
    assert said(capsys, *TINY, probed)["own"]["bytes_per_s"] == 320e9 / 8


def test_tensor_and_pipeline_parallelism_alone_where_they_can_be(capsys):
    answer = said(capsys, "network", "--model=gpt2", "--machine=4x-v100", "--precision=fp16")
    plans = {need["title"]: need["plan"] for need in answer["needs"]}
    assert (plans["TP"]["strategy"], plans["TP"]["tp"]) == ("tp", 4)
    assert (plans["PP"]["strategy"], plans["PP"]["pp"]) == ("1f1b", 4)
    assert "TP 4" not in plans  # once is enough
    answer = said(capsys, "network", "--model=gpt2", "--machine=dgx-a100", "--nodes=2")
    assert answer["refused"]["TP"] == "16 devices cannot share 12 heads and 12 kv_heads evenly"
    assert answer["refused"]["PP"] == "12 layers are fewer than 16 devices"


def test_a_single_node_needs_no_network(capsys):
    answer = said(capsys, *TINY)
    assert all(
        need["least_node_bytes_per_s"] == need["node_bytes"] == 0 for need in answer["needs"]
    )
    assert answer["inside"]["bytes_per_s"] == 12 * LINKS["NVLink 3"].bytes_per_s


def test_on_one_host_the_links_between_its_devices_are_compared(capsys, monkeypatch):
    """The seeds' two TITAN RTX: with NVLink, and over PCIe alone."""
    monkeypatch.setenv("COLUMNS", "100")
    words = ("network", "--model=gpt2", "--machine=2x-titan-rtx-nv2", "--precision=fp16")
    answer = said(capsys, *words)
    (ddp,) = (need for need in answer["needs"] if need["title"] == "DDP")
    costs = {one["network"]["name"].split(", ")[0]: one["slowdown"] for one in ddp["device_costs"]}
    rates = [one["network"]["bytes_per_s"] for one in ddp["device_costs"]]
    assert rates == sorted(set(rates))
    assert {"PCIe 3 x16", "PCIe 6 x16", "2 × NVLink 2", "18 × NVLink 5"} <= set(costs)
    assert ddp["own_inside"]["slowdown"] == costs["2 × NVLink 2"] > 0.05
    least, cheapest = ddp["least_device_bytes_per_s"], ddp["cheapest_inside"]["bytes_per_s"]
    assert 50e9 < least <= cheapest == min(rate for rate in rates if rate >= least)
    bridged, slotted = (
        next(need for need in said(capsys, *words[:2], f"--machine={machine}", words[3])["needs"]
             if need["title"] == "DDP")["own_inside"]["slowdown"]
        for machine in ("2x-titan-rtx-nv2", "2x-titan-rtx")
    )  # fmt: skip
    # Gradients take 5.1 times as long through the host, and as much of them hides.
    assert 5.5 < slotted / bridged < 6.0
    assert main([*words]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 100
    shown = " ".join(shown.split())
    assert "2 × NVLink 2 ◂" in shown
    longer = f"{100 * ddp['own_inside']['slowdown']:.0f} %"
    assert f"link is too slow: a step takes {longer} longer. 2 × NVLink 2 carries 50" in shown
    needs = show_count(least, "B/s")
    assert f"carries 50.00 GB/s, but the plan needs {needs} per device." in shown
    assert main(["network", "--model=gpt2", "--machine=dgx-h100", "--global-batch=512",
                 "--micro-batch=64"]) == 0  # fmt: skip
    shown = " ".join(capsys.readouterr().out.split())
    assert "DDP: this machine's link is faster than needed" in shown


def test_a_network_stands_by_the_name_that_it_was_asked_by(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    words = (*TINY, "--nodes=2", "--network=4 x omni-path-100")
    (need, *_) = said(capsys, *words)["needs"]
    names = {one["network"]["bytes_per_s"]: one["network"]["name"] for one in need["costs"]}
    assert names[50e9].startswith("4 × Omni-Path 100, InfiniBand NDR")
    assert main([*words]) == 0
    assert "4 × Omni-Path 100 ◂" in capsys.readouterr().out


def rates(path, **by_dtype):
    best = tuple(
        figure("matmul", "best", "FLOP/s", rate, dtype=dtype, **SIDES) if rate else
        figure("matmul", "best", "FLOP/s", 1e9, dtype=dtype, **SIDES).model_copy(
            update={"value": None, "unstable": "it drifted"})
        for dtype, rate in by_dtype.items()
    )  # fmt: skip
    copy = figure("memory", "copy", "B/s", 9e12, bytes=1000)
    probed = ProbeRecord(date="", versions={}, command="", sections=(), quick=True, took_s=1.0,
                    figures=(*best, copy))  # fmt: skip
    Machine(host_cores=8, host_memory_bytes=1, cpu="", probed=probed).save(path)
    return f"--probe={path}"


@pytest.mark.parametrize(
    ("measured", "precision"),
    [
        ({"fp32": 200e9, "bf16": 800e9}, "bf16"),
        ({"fp32": 200e9, "bf16": 50e9}, "fp32"),  # emulated
        ({"fp32": 200e9, "bf16": None}, "fp32"),
        ({"fp32": 1e12, "bf16": 50e12, "fp16": 51e12}, "bf16"),  # alike, and less trouble
        ({"fp32": 1e12, "bf16": 9e12, "fp16": 60e12}, "fp16"),
    ],
)
def test_what_was_measured_as_fastest_is_the_precision(capsys, tmp_path, measured, precision):
    probed = rates(tmp_path / "m.json", **measured)
    answer = said(capsys, "network", "--model=outpace-tiny", probed)
    assert {need["plan"]["precision"] for need in answer["needs"]} == {precision}
    answer = said(capsys, *TINY, probed)  # what was measured comes before what is published
    on_gpu = "bf16-master" if precision == "bf16" else precision  # as outpace trains there
    assert {need["plan"]["precision"] for need in answer["needs"]} == {on_gpu}


def test_names_of_the_catalog_are_the_nearest_and_a_count(capsys):
    assert main(["network", "--model=gpt2", "--machine=dgx-h1000"]) == 2
    message = capsys.readouterr().err
    assert "Did you mean 'dgx-h100'" in message and "more; docs/reference/catalog.md" in message
    assert len(message) < 400
    file = Path(__file__).parents[2] / "docs" / "reference" / "catalog.md"
    page = file.read_text(encoding="utf-8")
    names = [name.casefold().replace(" ", "-") for name in (*NODES, *ACCELERATORS, *LINKS)]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_no_torch_is_imported():
    words = [*BLOOM, "--json"]
    code = (
        f"import sys; from outpace.cli.main import main; assert main({words!r}) == 0; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("network", "--model=gpt2"), "no machine is given"),
        (("network", "--model=gpt2", "--machine=foo"), "machine 'foo' is not in the catalog"),
        (("network", "--model=gpt2", "--machine=laptop"), "Measure it with outpace probe matmul"),
        ((*TINY, "--network=fast"), "link 'fast' is not in the catalog"),
        ((*TINY, "--precision=fp64"), "no machine's fp64 rate is known"),
        ((*TINY, "--share=2"), "2 is not at least 0.01 and at most 1"),
        ((*TINY, "--nodes=10000000"), "at most 100000"),
        ((*TINY, "--tp=3"), "--tp 3: tp 3 does not divide"),
        ((*TINY, "--network=-50Gbit/s"), "a rate must be a number above 0"),
        ((*TINY, "--network=50"), "--network 50: its unit is missing. Write 50Gbit/s or 50GB/s."),
    ],
)
def test_what_cannot_be_is_a_sentence(words, sentence, capsys):
    assert main([*words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_plan_for_another_number_of_devices_is_refused(capsys, tmp_path):
    Plan(strategy="ddp", dp_replicate=4).save(tmp_path / "plan.json")
    assert main([*TINY, f"--plan={tmp_path / 'plan.json'}"]) == 2
    assert "is for 4 devices, but 1 × 8 = 8 are requested" in capsys.readouterr().err


def test_a_batch_that_cannot_be_shared_out_is_said(capsys):
    words = ["network", "--model=llama-3-8b", "--machine=dgx-h100", "--nodes=4"]
    assert main([*words, "--global-batch=7"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Not every plan can split --global-batch 7 evenly. Batches used: 8 (" in shown
    assert "8 (TP 8 × replicas 4)" in shown
    assert said(capsys, *words, "--global-batch=32")["notes"] == []


def test_a_plan_is_answered_for_its_own_length_and_batch(capsys, tmp_path):
    file = tmp_path / "plan.json"
    PlanFile.from_plan(Plan(strategy="ddp", dp_replicate=8), 64, 32).save(file)
    answer = said(capsys, *TINY, f"--plan={file}")
    assert (answer["seq_len"], answer["needs"][0]["global_batch"]) == (64, 32)
    answer = said(capsys, *TINY, f"--plan={file}", "--seq-len=32", "--global-batch=16")
    assert (answer["seq_len"], answer["needs"][0]["global_batch"]) == (32, 16)


def test_what_is_assumed_of_a_machine_is_said_as_the_planner_does(capsys):
    words = ["network", "--model=outpace-tiny", "--machine=8xh100", "--seq-len=32", "--nodes=2"]
    answer = said(capsys, *words)
    assert answer["own"]["name"] == "8 × InfiniBand NDR"
    taken, assumed = answer["notes"]
    assert "8xh100 is read as H100 SXM" in taken
    assert "is sold without network cards: 8 × InfiniBand NDR is assumed" in assumed
    assert "one device" not in assumed
    single = said(capsys, *words, "--machine=h100")["notes"][-1]
    assert single.endswith("Each node has one device. If yours have 8, use --machine 8xh100-sxm.")
    alone = said(capsys, *words[:-1])
    assert alone["notes"] == [taken] and alone["own"] is None
