"""`outpace train` to its end, on its own and with processes of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from outpace.cli.main import main


def outpace(*argv: str) -> list[str]:
    return [sys.executable, "-m", "outpace", *argv]


def test_a_person_sees_progress_on_stderr_and_the_summary_on_stdout(
    train_flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", *train_flags, f"--out={tmp_path / 'run'}"]) == 0
    output = capsys.readouterr()
    assert "global batch 8 = micro-batch 8 × accumulation 1 × data-parallel 1" in output.err
    assert "step 6/6" in output.err
    for words in ("validation after", "tokens/s", "MFU", "peak memory", "communication", "Sample"):
        assert words in output.out
    assert str(tmp_path / "run") in output.out.replace("\n", "").replace(" ", "")


def test_with_json_stdout_is_the_measurement_alone(
    train_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", *train_flags, "--json", f"--out={out}"]) == 0
    document = json.loads(capsys.readouterr().out)
    written = json.loads((out / "result.json").read_text())
    written.pop("xxh3_128")  # of the file
    assert document == written
    recorded = json.loads((out / "run.json").read_text())
    assert recorded["command"][:2] == ["outpace", "train"]
    assert recorded["origins"]["steps"] == "command line"
    assert recorded["origins"]["lr"] == "default"


def test_a_finished_run_is_not_overwritten(
    run: Path, train_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "result.json").read_bytes()
    assert main(["train", *train_flags, f"--out={run}"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (run / "result.json").read_bytes() == before


def test_resume_takes_the_run_s_settings_and_goes_further(
    train_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", *train_flags, f"--out={out}"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", f"--out={out}", "--steps=8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 8
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))


def test_bad_input_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    missing = tmp_path / "none"
    assert main(["train", "--model=gpt22", f"--out={out}", f"--data={missing}"]) == 2
    assert "gpt22" in capsys.readouterr().err
    assert main(["train", "--model=outpace-tiny", f"--out={out}", f"--data={missing}"]) == 2
    output = capsys.readouterr()
    assert str(missing) in output.err
    assert "Traceback" not in output.err
    assert list(tmp_path.iterdir()) == []


def test_nproc_contradicting_the_launcher_is_refused(
    train_flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *train_flags, "--nproc=4"]) == 2
    assert "the launcher has started 1 processes" in capsys.readouterr().err


@pytest.mark.gloo
def test_two_processes_print_one_document(
    train_flags: list[str], tmp_path: Path, command: Callable[..., Any]
) -> None:
    out = tmp_path / "run"
    done = command("outpace", "train", *train_flags, "--nproc=2", "--json", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 2
    assert "data-parallel 2" in done.stderr


@pytest.mark.gloo
@pytest.mark.slow
def test_a_mistake_that_all_ranks_find_is_said_once(train_flags: list[str], tmp_path: Path) -> None:
    flags = [flag for flag in train_flags if not flag.startswith("--model")]
    command = outpace("train", *flags, "--model=gpt22", "--nproc=2", f"--out={tmp_path / 'run'}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("gpt22") == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.gloo
def test_one_ctrl_c_saves_and_ends_with_75(train_flags: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        outpace("train", *train_flags, "--steps=100000", "--nproc=2", f"--out={out}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 600
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=600)
    finally:
        with suppress(ProcessLookupError):  # a run that goes on slows all other tests down
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 75, errors
    assert errors.count("--resume") >= 1
    assert "Traceback" not in errors
    assert list((out / "checkpoints").glob("step-*"))
