"""scripts/gpu-check, on a CPU with everything small, and what it makes of its results."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# Only what hangs is ended: cores that others use, too, are no reason.
pytestmark = pytest.mark.timeout(1900)
# Stands for a package that hangs, or one that takes the process with it, when it is first used.
BROKEN = {
    "hangs": "import time\ntime.sleep(1000)\n",
    "crashes": "import os\nos.abort()\n",
}


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of benchmarks/ import each other by name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def gpu_check(
    out: Path, *options: str, peft: str | None = None, limit_s: float = 1800
) -> subprocess.CompletedProcess[str]:
    """Run the script; `peft` is a module in the package's place."""
    environ = {**os.environ, "PYTHON": sys.executable}
    if peft is not None:
        (out.parent / "broken").mkdir()
        (out.parent / "broken" / "peft.py").write_text(peft)
        environ["PYTHONPATH"] = f"{out.parent / 'broken'}:{environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [ROOT / "scripts" / "gpu-check", "--cpu", "--out", out, *options],
        capture_output=True, text=True, env=environ, cwd="/", timeout=limit_s + 20, check=False,
    )  # fmt: skip


def sections(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.read_text())["sections"]
    return found


# Start programs of their own, or train what others train here, too.
SLOW = {"caches", "llama-3.2-1b", "gpt2 batch 4", "gpt2 batch 48", "llama-3.2-1b batch 8",
        "optimizers", "first use", "probed time", "two ranks", "micro-batch auto",
        "documents"}  # fmt: skip


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every section that is not slow, once."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu.sections import SECTIONS

    quick = [section.name for section in SECTIONS if section.name not in SLOW]
    return run(tmp_path_factory.mktemp("gpu") / "cpu.json", ",".join(quick))


def run(out: Path, only: str, *options: str) -> Path:
    done = gpu_check(out, "--only", only, *options)
    assert done.returncode == 0, done.stderr
    found = sections(out)
    assert set(found) == set(only.split(","))
    assert {name: told["status"] for name, told in found.items() if told["status"] != "done"} == {}
    assert failures(found) == []
    return out


def failures(value: Any) -> list[str]:
    """Every failure in a result, however deep."""
    if isinstance(value, dict):
        own = [value["failure"]] if isinstance(value.get("failure"), str) else []
        return own + [one for inner in value.values() for one in failures(inner)]
    return []


@pytest.mark.slow
def test_every_section_says_what_ran_it_and_where(everything):
    document = json.loads(everything.read_text())
    assert document["commit"] and document["versions"]["torch"] and document["machine"]["cpu"]
    assert document["targets"] == []  # of tiny models on a CPU nothing is asked
    for told in document["sections"].values():
        assert told["call"]["command"][:2] == ["python", "benchmarks/gpu_check.py"]
        assert told["took_s"] < told["limit_s"]


@pytest.mark.slow
def test_what_starts_programs_runs_too(tmp_path):
    out = run(tmp_path / "cpu.json", ",".join(["environment", "gpt2", *sorted(SLOW)]))
    found = sections(out)
    assert set(found["first use"]["rows"]) == {"doctor", "probe", "tune", "train", "report"}
    row = found["probed time"]["rows"]["gpt2: outpace, eager"]
    assert row["low_s"] <= row["step_time_s"] <= row["high_s"] and "probe" in row["basis"]
    assert found["micro-batch auto"]["rows"]["search"]["search_s"] > 0
    for section, row, over in (("optimizers", "adamw-8bit", "over_fused"),
                               ("documents", "documents", "over_causal")):  # fmt: skip
        assert found[section]["rows"][row][over] > 0


@pytest.mark.slow
def test_compiled_code_is_made_where_it_is_asked_for(tmp_path):
    out = run(tmp_path / "cpu.json", "gpt2,loss", "--compile")
    found = sections(out)
    assert found["gpt2"]["rows"]["outpace, compiled"]["plan"]["compile"] is True
    assert found["loss"]["rows"]["64 × 32 × 512, compiled"]["step_time_s"] > 0


@pytest.mark.slow
def test_speed_is_a_ratio_of_windows_that_alternate(everything):
    from statistics import median

    row = sections(everything)["gpt2"]["rows"]["outpace, eager"]
    assert len(row["windows_s"]) == len(row["hand_windows_s"]) == 2
    assert row["ratio"] == median(row["hand_windows_s"]) / median(row["windows_s"])
    assert 0.5 < row["told_over_wall"] <= 1.1
    assert row["predicted"]["step_time_s"] > 0 and row["losses"][0] > 0


def test_targets_count_the_worst_row_and_missed_ones_come_first():
    from gpu.targets import judge

    def said(**rows: dict[str, float]) -> dict[str, Any]:
        return {"rows": {name.replace("_", ", "): row for name, row in rows.items()}}

    judged = judge({
        "gpt2": said(outpace_compiled={"ratio": 1.32, "told_over_wall": 0.995},
                     outpace_eager={"ratio": 1.1, "told_over_wall": 0.98}),
        "loss": {"rows": {"16,384 × 2,048 × 128,256, compiled": {"step_time_s": 0.0431,
                                                                 "peak_bytes": 6 * 2**30}}},
        "attention": {"rows": {"a, documents": {"over_causal": 1.2},
                               "b, documents": {"failure": "RuntimeError: none"}}},
    })  # fmt: skip
    by_name = {one["target"]: one for one in judged}
    assert [one["met"] for one in judged] == sorted(
        (one["met"] for one in judged), key=[False, None, True].index
    )
    reached = {
        name: (one["reached"], one["met"]) for name, one in by_name.items() if one["reached"]
    }
    assert reached == {
        "GPT-2, 16 × 1,024: speed relative to the compiled handwritten loop": (1.32, True),
        "GPT-2, 16 × 1,024, eager: speed relative to the eager handwritten loop": (1.1, False),
        "GPT-2, 16 × 1,024: reported over wall time": (0.98, False),
        "loss of 16,384 tokens, vocabulary of 128,256": (pytest.approx(43.1), False),
        "loss of 16,384 tokens, vocabulary of 128,256: memory": (6.0, True),
        "attention within documents, over causal": (1.2, True),
    }


@pytest.mark.slow
def test_the_pages_show_predictions_beside_measurements_and_misses_first(everything):
    from figures_gpu import gpu
    from gpu.targets import judge

    document = json.loads(everything.read_text())
    page = gpu({**document, "targets": judge(document["sections"])})
    row = document["sections"]["gpt2"]["rows"]["outpace, eager"]
    (line,) = [
        line for line in page.splitlines() if line.startswith("| GPT-2, 16 × 1,024 | outpace, e")
    ]
    assert f"{row['step_time_s'] * 1e3:.1f} ms" in line and f"{row['ratio']:.2f} ×" in line
    assert f"{row['predicted']['step_time_s'] * 1e3:.1f} ms" in line
    words = [line.split(" | ")[0] for line in page.splitlines() if "Llama-3.2-1B: " not in line]
    assert words.index("| **missed**") < words.index("| not measured") < words.index("| reached")


def test_what_is_no_section_is_refused_with_a_sentence(tmp_path):
    done = gpu_check(tmp_path / "cpu.json", "--only", "attention,losses")
    assert done.returncode == 2
    assert "there is no section 'losses'" in done.stderr and "Traceback" not in done.stderr


def test_what_there_is_no_time_for_is_left_out_and_added_later(tmp_path):
    out = tmp_path / "cpu.json"
    done = gpu_check(out, "--only", "ceilings,attention", "--limit", "0")
    assert done.returncode == 0, done.stderr
    assert "--only 'ceilings,attention'" in done.stdout
    assert {told["status"] for told in sections(out).values()} == {"left out"}
    done = gpu_check(out, "--only", "ceilings", "--no-fork")
    assert done.returncode == 0, done.stderr
    statuses = {name: told["status"] for name, told in sections(out).items()}
    assert statuses == {"ceilings": "done", "attention": "left out"}


def test_without_what_is_needed_a_sentence_names_it_and_nothing_is_made(tmp_path):
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "gpu-check", root / "scripts")
    (root / "bin").mkdir()
    for tool in ("dirname", "sh"):
        (root / "bin" / tool).symlink_to(str(shutil.which(tool)))
    # Without site-packages: whatever is not Python's own is missing.
    bare = root / "bin" / "python3"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    before = sorted(root.rglob("*"))
    done = subprocess.run([root / "scripts" / "gpu-check"], capture_output=True, text=True,
                          env={"PATH": str(root / "bin"), "PYTHON": "no-such-python"},
                          check=False)  # fmt: skip
    assert done.returncode == 2
    assert "no-such-python is not there" in done.stderr
    assert "python3 lacks torch, transformers, pydantic, " in done.stderr
    assert "datasets" not in done.stderr and "plotly" not in done.stderr
    assert sorted(root.rglob("*")) == before


def test_told_time_is_compared_with_the_same_steps_wall_clock():
    from gpu.throughput import told_over_wall

    # Step 4 was said to take long, and came right after a turn of the handwritten loop.
    lines = [{"step_time_s": took_s} for took_s in (9.0, 9.0, 9.0, 5.0, 1.0, 1.0, 2.0)]
    reported_s = {3: 10.0, 4: 30.0, 5: 31.0, 6: 32.0, 7: 34.0}
    assert told_over_wall(lines, reported_s, range(4, 8)) == 1.0


def test_sections_share_compiled_code_and_a_first_step_shares_none(tmp_path, monkeypatch):
    from gpu import commands
    from gpu.check import COMPILER_CACHES, Check
    from gpu.runner import prepare

    check = Check("cuda", True, True, tmp_path, tmp_path, time.monotonic() + 6000)
    environ = {"TRITON_CACHE_DIR": "/own"}
    prepare(environ, check)
    assert environ["TRITON_CACHE_DIR"] == "/own"
    assert environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
    if sys.platform.startswith("linux"):
        assert environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    # In the place of the command: says which of the variables it sees, in its log.
    says = f"import os; print([n for n in {COMPILER_CACHES!r} if n in os.environ]); exit(3)"
    monkeypatch.setattr(commands, "_OUTPACE", (sys.executable, "-c", says))
    commands.first_step(check)
    assert {"not compiled", "compiled, empty cache", "compiled, again"} == set(check.rows)
    for row in check.rows.values():
        assert row["failure"].endswith("exit code 3: []")


def test_a_small_run_has_the_time_of_its_section_whatever_a_gpu_would_take(tmp_path):
    from gpu.check import Check
    from gpu.commands import command

    words = [sys.executable, "-c", "import time; time.sleep(1.2)"]
    small, large = (Check("cpu", small, False, tmp_path, tmp_path, time.monotonic() + 600)
                    for small in (True, False))  # fmt: skip
    assert command(small, words, limit_s=0.1)["took_s"] > 1
    with pytest.raises(RuntimeError, match="did not end in 1 s"):
        command(large, words, limit_s=0.1)


def test_what_another_section_was_to_measure_is_said_to_be_missing(tmp_path):
    from gpu.check import Check
    from gpu.predictions import probed_time, traced_memory

    check = Check("cuda", True, False, tmp_path, tmp_path, time.monotonic() + 6000)
    probed_time(check)
    assert "'first use'" in check.rows["probe"]["left_out"]
    plan = {"precision": "bf16", "optimizer": "adamw-fused", "compile": False, "lora_rank": None}
    row = {"step_time_s": 1.0, "peak_bytes": 1, "plan": plan}
    check.earlier["gpt2"] = {"rows": {"outpace, eager": row}}
    traced_memory(check)
    assert "'environment'" in check.rows["gpt2: outpace, eager"]["failure"]


@pytest.mark.parametrize("kind", [pytest.param("hangs", marks=pytest.mark.slow), "crashes"])
def test_a_section_that_hangs_or_crashes_loses_nothing_else(tmp_path, kind):
    out = tmp_path / "cpu.json"
    limit = ["--section-limit", "40"] if kind == "hangs" else []
    done = gpu_check(out, "--only", "lora,ceilings", *limit, peft=BROKEN[kind])
    assert done.returncode == 0, done.stderr
    found = sections(out)
    assert found["ceilings"]["rows"]["bf16 products"]["best_flops_per_s"] > 0
    ended = {"hangs": "out of time", "crashes": "ended by SIGABRT"}[kind]
    assert found["lora"]["status"] == ended and "peft.py" in found["lora"]["log"]
    assert f"lora: {ended}" in done.stdout
