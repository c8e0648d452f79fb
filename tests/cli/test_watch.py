"""`outpace watch`: the machine, a run that goes on, a run that is over, and a command."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from outpace.cli.main import main
from outpace.records.measurement import Measurement
from outpace.records.utilisation import Utilisation

WATCH = [sys.executable, "-m", "outpace", "watch"]


def test_watching_for_a_while_prints_averages_and_keeps_the_series(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "a.json"
    assert main(["watch", "--for=0.75", "--every=0.2", f"--out={kept}", "--json"]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    seen = Utilisation.load(kept)
    assert document["series"] == [json.loads(seen.model_dump_json())]
    assert document["average"][0]["duration_s"] == pytest.approx(seen.duration_s)
    assert 1 <= len(seen.ends_s) <= 5 and seen.duration_s >= 0.7
    assert "cores" in output.err or "core " in output.err  # plain lines


def test_a_command_is_watched_and_its_exit_code_passed_on(tmp_path: Path) -> None:
    spin = (
        "import time\nwhile time.process_time() < 1: pass\n"
        "print('mine', time.process_time())\nraise SystemExit(7)"
    )
    done = subprocess.run(
        [*WATCH, "--json", "--every=0.2", "--", sys.executable, "-c", spin],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7
    document = json.loads(done.stdout)  # nothing of the command's own
    (said,) = [line for line in done.stderr.splitlines() if "mine" in line]
    mean = document["average"][0]
    # What was spent before the first and after the last look of the process is not seen; the
    # kernel counts in hundredths of a second.
    seen_s = mean["host"]["run_cores"] * mean["duration_s"]
    assert 0.1 < seen_s < float(said.split()[-1]) + 0.1


def test_a_command_that_a_signal_ends_is_said_as_a_shell_does(
    capfd: pytest.CaptureFixture[str],
) -> None:
    kill = "import os, time; time.sleep(0.3); os.kill(os.getpid(), 9)"
    assert main(["watch", "--", sys.executable, "-c", kill]) == 128 + 9
    assert "How busy" in capfd.readouterr().err


@pytest.mark.parametrize(("ending", "code"), [([], 0), (["--for=600"], 130)])
def test_ctrl_c_ends_it_with_the_table_and_the_file(
    tmp_path: Path, ending: list[str], code: int
) -> None:
    kept = tmp_path / "a.json"
    process = subprocess.Popen(
        [*WATCH, f"--out={kept}", "--every=0.2", *ending],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    process.stderr.readline()  # the first sample
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=600)
    assert process.returncode == code, errors
    assert "How busy" in out and "Traceback" not in errors
    assert Utilisation.load(kept).ends_s


def test_mistakes_are_said_and_cost_nothing(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["--"], "the command is missing"),
        ([str(run), "--", "true"], "Watch a run in progress, or start a command"),
        (["--for=3", "--", "true"], "Leave --for out"),
        (["--", "/no/such/program"], "cannot start /no/such/program"),
        ([str(tmp_path)], "holds no run"),
        (["--every=0"], "at least 0.2"),
    ):
        assert main(["watch", *words]) == 2
        output = capsys.readouterr()
        assert said in output.err and "Traceback" not in output.err


def test_a_run_has_recorded_its_own_load(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = Utilisation.load(run / "utilisation" / "host-0.json")
    mean = seen.average()
    assert mean is not None and mean.host.run_cores is not None and mean.host.run_cores > 0
    assert Measurement.load(run / "result.json").utilisation == (mean,)
    assert main(["watch", str(run)]) == 0
    assert "of the run" in capsys.readouterr().out


def test_a_run_that_goes_on_is_followed_and_one_that_is_interrupted_has_its_series(
    train_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "outpace", "train", *train_flags, "--steps=100000", f"--out={out}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 600
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        assert main(["watch", str(out), "--for=1.5", "--every=0.5", "--json"]) == 0
        output = capsys.readouterr()
        assert json.loads(output.out)["average"][0]["host"]["run_cores"] > 0
        assert "/100,000  loss" in output.err
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 75, errors
    assert len(list((out / "utilisation").glob("watch-*.json"))) == 1
    assert Utilisation.load(out / "utilisation" / "host-0.json").duration_s > 1


@pytest.mark.gloo
@pytest.mark.slow
def test_all_ranks_of_a_host_are_of_its_one_series_and_a_resumed_run_has_another(
    train_flags: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "outpace", "train", f"--out={out}", "--json"]
    for more in ([*train_flags, "--nproc=2"], ["--resume", "--steps=8", "--nproc=1"]):
        subprocess.run([*command, *more], capture_output=True, check=True)
    names = sorted(path.name for path in (out / "utilisation").iterdir())
    assert names == ["host-0-from-step-6.json", "host-0.json"]
    first, resumed = (
        Utilisation.load(out / "utilisation" / name).average() for name in reversed(names)
    )
    assert first is not None and resumed is not None
    assert first.host.run_memory_bytes and resumed.host.run_memory_bytes
    assert first.host.run_memory_bytes > 1.5 * resumed.host.run_memory_bytes  # two ranks, and one
    assert Measurement.load(out / "result.json").utilisation == (resumed,)
