"""The seed documents' results: all ten are there, with what the documents say, and they run."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.planner.pipeline.simulator import idle_share_formula
from outpace.reporting.render.screenshot import BROWSERS

ROOT = Path(__file__).parent.parent
SEEDS = ROOT / "benchmarks" / "seeds"
PAGE = (ROOT / "docs" / "results" / "seeds.md").read_text(encoding="utf-8")
PROGRAMS = sorted(path.stem for path in SEEDS.glob("s[0-9][0-9]_*.py"))
# What stands under a recorded figure.
STAND = {
    "date": "2026-01-01T00:00:00+00:00", "commit": "0" * 40, "uncommitted_changes": False,
    "versions": {"torch": "2", "python": "3"}, "command": ["python", "a.py"],
    "machine": {"host_cores": 2, "cpu": "a processor", "devices": []},
}  # fmt: skip


def loaded(name: str) -> ModuleType:
    """A program of the folder. They import each other, and other benchmarks, by name."""
    for folder in (str(SEEDS), str(SEEDS.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return importlib.import_module(name)


@pytest.fixture(autouse=True, scope="module")
def _path():
    before = list(sys.path)
    yield
    sys.path[:] = before


def quick(name: str) -> str:
    """What a program prints when it is small."""
    before = {path.name: path.stat().st_mtime_ns for path in (SEEDS.parent / "results").iterdir()}
    done = subprocess.run(
        [sys.executable, str(SEEDS / f"{name}.py"), "--quick"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    after = {path.name: path.stat().st_mtime_ns for path in (SEEDS.parent / "results").iterdir()}
    assert after == before
    return done.stdout


def test_there_are_ten_and_the_page_tells_each():
    assert [name[:3] for name in PROGRAMS] == [f"s{number:02}" for number in range(1, 11)]
    tables = loaded("figures_seeds").TABLES
    for number, name in enumerate(PROGRAMS, 1):
        marker = f"seeds_{loaded(name).EXPERIMENT.name}"
        assert marker in tables
        assert f"<!-- figures: {marker} -->" in PAGE
        assert f"## {number}. " in PAGE
        assert f"benchmarks/seeds/{name}.py" in PAGE
    assert len(tables) == len(PROGRAMS)


def test_all_runs_them_in_their_order():
    assert [program.stem for program in loaded("all").programs()] == PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_claim_has_its_document_and_hardware(name):
    documents = loaded("claims").DOCUMENTS
    experiment = loaded(name).EXPERIMENT
    assert experiment.claims
    for claim in experiment.claims:
        assert claim.document in documents
        assert claim.says.endswith((".", ")"))
        assert claim.hardware


def test_every_document_is_heard():
    claims = [claim for name in PROGRAMS for claim in loaded(name).EXPERIMENT.claims]
    assert {claim.document for claim in claims} == set(loaded("claims").DOCUMENTS)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("s01_slow_link", "seconds",
         {"DP, fast": 110.5948, "DDP, fast": 101.9003, "DDP, slow": 131.4367}),
        ("s02_utilisation", "total", {"Baseline": 0.94, "SPS": 0.55, "DPS": 3.71}),
        ("s03_loss_curves", "speedup", {"ddp": 2, "ring": 4}),
        ("s04_mixed_memory", "mib",
         {"8": [4247, 4163], "16": [4971, 4793], "32": [6827, 6207], "64": [10037, 8061]}),
        ("s07_checkpointing", "lost", [0.20, 0.25]),
    ],
)  # fmt: skip
def test_the_documents_figures_are_theirs(name, key, value):
    assert loaded(name).EXPERIMENT.claims[0].figures[key] == value


def test_what_the_documents_derive_from_their_figures():
    """10 % and 15 %; sums of devices; savings."""
    seconds = loaded("s01_slow_link").CLAIM.figures["seconds"]
    assert seconds["DP, fast"] / seconds["DDP, fast"] == pytest.approx(1.1, abs=0.02)
    assert 1 - seconds["DP, fast"] / seconds["DDP, slow"] == pytest.approx(0.15, abs=0.01)
    told = loaded("s02_utilisation").CLAIM.figures
    for way in ("SPS", "DPS"):
        assert sum(told["devices"][way]) == pytest.approx(told["total"][way], abs=0.005)
    mib = loaded("s04_mixed_memory").CLAIM.figures["mib"]
    assert [a - b for a, b in mib.values()] == [84, 178, 620, 1976]


@given(st.integers(1, 64), st.integers(1, 512))
def test_utilisation_is_what_idleness_leaves(ranks, microbatches):
    formula = loaded("s05_pipelines").formula
    assert formula(ranks, 1) == pytest.approx(1 / ranks)
    idle = idle_share_formula("gpipe", ranks, microbatches)
    assert formula(ranks, microbatches) == pytest.approx(1 - idle)


def predicted(name: str) -> dict[str, Any]:
    found: dict[str, Any] = loaded(name).EXPERIMENT.predict(True)
    return json.loads(json.dumps(found))


def test_the_slow_link_is_predicted_as_in_docs_accuracy():
    found = predicted("s01_slow_link")
    _, known = loaded("planner_accuracy").titans()
    told = {"DP, fast": "DP, NVLink", "DDP, fast": "DDP, NVLink", "DDP, slow": "DDP, no NVLink"}
    for name, other in told.items():
        assert found[name]["seconds"] == pytest.approx(known[other], rel=1e-3)


def test_a_leader_is_predicted_to_keep_devices_waiting():
    for ways in predicted("s02_utilisation").values():
        each = {name: ways[name]["total"] / len(ways[name]["devices"]) for name in ways}
        assert each["SPS"] < each["DPS"] <= each["Baseline"] <= 1
        assert all(one["needs_bytes"] <= one["memory_bytes"] for one in ways.values())


def test_mixed_precision_is_predicted_to_be_faster_where_there_are_tensor_cores():
    found = predicted("s03_loss_curves")
    assert len(found) == 4
    for name, one in found.items():
        assert (one["speedup"] > 1.5) == name.startswith("4x-v100"), name


def test_pipelines_are_predicted_as_their_formula():
    for count, one in predicted("s05_pipelines").items():
        # Stages are not quite alike, and sends take time.
        assert one["utilisation"] == pytest.approx(one["formula"], abs=0.02), count


def test_a_ring_is_predicted_to_stay_and_a_server_to_grow():
    nodes = list(predicted("s06_ring")["nodes"].values())
    rings, servers = ([one[key] for one in nodes] for key in ("ring_s", "server_s"))
    assert max(rings) < 2.5 * min(rings)
    assert servers[-1] == pytest.approx(servers[0] * 32, rel=0.01)


def test_recomputation_is_predicted_to_cost_a_forward_and_to_fit_more():
    for modes in predicted("s07_checkpointing").values():
        assert modes["none"]["batch"] < modes["selective"]["batch"] < modes["full"]["batch"]
        assert 0 <= modes["selective"]["lost"] < modes["full"]["lost"] < 0.3
        assert modes["full"]["with_larger"] > -modes["full"]["lost"]
        assert all(one["needs_bytes"] <= one["memory_bytes"] for one in modes.values())


def test_a_copy_of_tokens_is_predicted_to_take_next_to_nothing_of_a_step():
    for one in predicted("s08_loader").values():
        tokens, images = one["copies_s"].values()
        assert tokens < 0.01 * one["step_s"]
        assert images > tokens


def test_a_for_loop_is_predicted_to_wait_for_the_host():
    small = predicted("s09_optimizers")["small"]
    assert small["adamw-for-loop"] > 10 * small["adamw-foreach"] > small["adamw-fused"]


def test_sizes_that_divide_are_predicted_to_be_faster():
    rows = predicted("s10_tiles")["rows"]
    heads = {one["n"]: one["flops_per_s"] for one in rows if one["of"] == "heads"}
    assert heads[50257] < heads[50264] <= heads[50304]
    waves = {one["n"]: one["seconds"] for one in rows if one["of"] == "waves"}
    assert list(waves.values()) == sorted(waves.values())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("s09_optimizers", "`adamw-foreach`", marks=pytest.mark.slow),
        ("s10_tiles", "| heads | 50257 |"),
        pytest.param("s01_slow_link", "DDP, fast", marks=[pytest.mark.gloo, pytest.mark.slow]),
        pytest.param("s02_utilisation", "of 2 |", marks=[pytest.mark.gloo, pytest.mark.slow]),
        pytest.param("s03_loss_curves", "ring bf16", marks=[pytest.mark.gloo, pytest.mark.slow]),
        pytest.param("s04_mixed_memory", "optimizer state", marks=pytest.mark.slow),
        pytest.param("s05_pipelines", "compute", marks=[pytest.mark.gloo, pytest.mark.slow]),
        pytest.param("s06_ring", "1.00 Ψ", marks=[pytest.mark.gloo, pytest.mark.slow]),
        pytest.param("s07_checkpointing", "| measured | full |", marks=pytest.mark.slow),
        pytest.param("s08_loader", "| text |", marks=pytest.mark.slow),
    ],
)
def test_a_quick_one_runs_and_records_nothing(name, words):
    shown = quick(name)
    assert words in shown
    for claim in loaded(name).EXPERIMENT.claims:
        assert f"> *{claim.document}*: " in shown


def test_a_recorded_figure_says_where_it_is_from():
    experiment = loaded("s10_tiles").EXPERIMENT
    result = {**loaded("claims").found(experiment, True), **STAND}
    text = loaded("figures").WRITERS["seeds_tiles"](result)
    assert "Recorded 2026-01-01 at commit 0000000000: 2 cores of a processor" in text
    assert experiment.instead in text


def _curves():
    ways = ("ddp fp32", "ring fp32", "ddp bf16", "ring bf16")
    return {f"{way}, batch {n}": [5.0, 4.0, 3.0 + n] for way in ways for n in (8, 16)}


def test_each_batch_has_its_curves_side_by_side(monkeypatch):
    drawn = []
    monkeypatch.setattr(loaded("pictures"), "write_svg", lambda *given: drawn.append(given))
    loaded("figures_seeds").draw_curves({"measured": {"curves": _curves()}})
    ((_, traces, layout, _),) = drawn
    assert [(one["name"], one["xaxis"]) for one in traces[:5:4]] == [
        ("ddp fp32", "x"), ("ddp fp32", "x2"),
    ]  # fmt: skip
    assert len(traces) == 8 and [one["y"][2] for one in traces[:5:4]] == [11.0, 19.0]
    assert [one["text"] for one in layout["annotations"]] == ["batch 8", "batch 16"]


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="kaleido draws by Chromium")
def test_curves_are_drawn(tmp_path, monkeypatch):
    figures = loaded("figures_seeds")
    monkeypatch.setattr(figures, "PICTURE", tmp_path / "loss.svg")
    curves = _curves()
    figures.draw_curves({"measured": {"curves": curves}})
    drawn = (tmp_path / "loss.svg").read_bytes()
    assert b"<svg" in drawn
    figures.draw_curves({"measured": {"curves": curves}})
    assert (tmp_path / "loss.svg").read_bytes() == drawn


def test_curves_that_are_apart_say_so():
    apart = loaded("s03_loss_curves").apart
    curves = {
        "ddp fp32, batch 8": [4.0, 2.0], "ring fp32, batch 8": [4.0, 2.1],
        "ddp bf16, batch 8": [4.4, 2.0], "ring bf16, batch 8": [4.4, 2.0],
    }  # fmt: skip
    assert apart(curves) == pytest.approx(
        {
            "ring fp32, batch 8 from ddp fp32, batch 8": 0.05,
            "ddp bf16, batch 8 from ddp fp32, batch 8": 0.1,
            "ring bf16, batch 8 from ring fp32, batch 8": 0.1,
            "ring bf16, batch 8 from ddp bf16, batch 8": 0.0,
        }
    )


def test_without_root_there_is_no_network_of_ones_own(monkeypatch):
    links = loaded("links")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in links.why_not()


def test_a_recorded_command_can_be_pasted():
    program = loaded("recording").program
    assert program(SEEDS / "s01_slow_link.py") == "benchmarks/seeds/s01_slow_link.py"
    assert program(SEEDS.parent / "idle.py") == "benchmarks/idle.py"
