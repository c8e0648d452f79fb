"""What goes wrong on one host, done to real trainings: nothing is lost, and who it was is named."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from outpace.jobs.ranks.hang_culprits import find_culprits
from outpace.launch.ssh_agent import MARK
from outpace.records.hang_report import CollectiveEvent, HangReport, RankSnapshot
from outpace.records.hosts import HostCommand
from outpace.records.interpreter import PYTHON
from outpace.records.ranks import RANK_NAME

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import faults

pytestmark = pytest.mark.gloo

TINY = ("train", "--model", "outpace-tiny", "--seq-len", 32, "--global-batch", 8, "--eval-batches",
        1, "--sample-tokens", 0, "--precision", "fp32", "--threads", 1)  # fmt: skip
# A model of one's own, of which the second rank does something else at its tenth forward.
ODD = """
import os, time
import torch

class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(512, 16)
        self.head = torch.nn.Linear(16, 512)
        self.calls = 0
    def forward(self, ids):
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls >= 10:
            {what}
        return self.head(self.table(ids))

def build():
    return Odd()
"""


def start(*words, cwd, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "outpace", *map(str, words)], cwd=cwd, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, **more,
    )  # fmt: skip


def run(*words, cwd, limit_s=900):
    process = start(*words, cwd=cwd)
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"it did not end: {process.communicate()}")
    return process.returncode, output, errors


def odd(tmp_path, what):
    (tmp_path / "odd.py").write_text(ODD.format(what=what))
    # The check of the first batch moves counters on, and would meet the fault itself.
    return ("--model", "odd.py:build", "--nproc", 2, "--check", "off")


def steps(folder):
    with suppress(FileNotFoundError):
        return len((folder / "metrics.jsonl").read_text().splitlines())
    return 0


def at_step(process, folder, step):
    while steps(folder) < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def rank_of(process, rank):
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.Error):
            if child.name() == f"{RANK_NAME}{rank}":
                return child
    raise AssertionError(f"no rank {rank}")


@pytest.mark.parametrize(
    ("strategy", "moments"),
    [
        pytest.param("ddp", ("saves",), id="ddp"),
        pytest.param("ddp", faults.MOMENTS, id="every moment", marks=pytest.mark.slow),
        pytest.param("zero3", ("saves", "waits"), id="zero3", marks=pytest.mark.slow),
        pytest.param("1f1b", ("computes", "saves"), id="1f1b", marks=pytest.mark.slow),
        pytest.param("tp", ("waits", "starts"), id="tp", marks=pytest.mark.slow),
    ],
)
def test_a_run_with_killed_ranks_ends_bitwise_equal_to_an_undisturbed_one(
    tmp_path, strategy, moments
):
    alone = faults.undisturbed(strategy, tmp_path / "alone")
    found, kills, said = faults.disturbed(strategy, tmp_path / "killed", moments, seed=3)
    assert found == alone
    assert alone.steps == tuple(range(1, faults.STEPS + 1))
    assert [kill.moment for kill in kills] == list(moments)
    assert f"(restart {len(moments)} of {len(moments)})" in said
    assert "was killed by SIGKILL" in said


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 4])
def test_a_damaged_checkpoint_is_skipped(tmp_path, seed):
    alone = faults.undisturbed("ddp", tmp_path / "alone")
    row = faults._damaged(tmp_path / "cut", faults.random.Random(seed), alone)
    assert row["said"] and row["same"], row


@pytest.mark.slow
def test_restarts_are_limited_and_a_wrong_setting_is_not_retried(tmp_path):
    words = (*TINY, *odd(tmp_path, "raise RuntimeError('a broken fan')"), "--steps", 30)
    code, _, errors = run(*words, "--max-restarts", 1, "--out", "run", cwd=tmp_path)
    assert code == 1, errors
    assert "rank 1 failed: RuntimeError: a broken fan. Resuming from the last checkpoint" in errors
    assert "The run has restarted 1 time, the limit set by --max-restarts 1" in errors
    code, _, errors = run(
        *TINY, "--nproc", 2, "--tp", 3, "--max-restarts", 3, "--out", "no", cwd=tmp_path
    )
    assert code == 2 and "Resuming" not in errors


@pytest.mark.slow
def test_the_failed_rank_is_reported_and_not_the_one_that_was_killed(tmp_path):
    (tmp_path / "odd.py").write_text(ODD.format(
        what="raise RuntimeError('a broken fan')\n        if self.calls == 10: time.sleep(20)"
    ))  # fmt: skip
    words = (*TINY, "--model", "odd.py:build", "--nproc", 2, "--steps", 30, "--out", "run")
    code, _, errors = run(*words, cwd=tmp_path)
    assert code == 1, errors
    assert "a broken fan" in errors and "SIGKILL" not in errors


@pytest.mark.slow
def test_a_slow_step_does_not_count_against_the_timeout_of_a_later_one(tmp_path):
    later = "if self.calls >= 20: raise RuntimeError('a broken fan')"
    slow = f"time.sleep({{10: 7, 15: 2}}.get(self.calls, 0))\n            {later}"
    words = (*TINY, *odd(tmp_path, slow))
    code, _, errors = run(*words, "--steps", 30, "--comm-timeout", 8, "--out", "run", cwd=tmp_path)
    assert code == 1, errors
    assert "rank 1 failed" in errors and "a broken fan" in errors


def standing(rank, state, **numbers):
    exchanges = [CollectiveEvent(group=group, number=number, name="all_reduce", state="started")
                 for group, number in numbers.items()]  # fmt: skip
    return RankSnapshot(rank=rank, host="a", pid=1, state=state, place="?", collectives=exchanges)


def test_a_rank_that_waits_in_another_process_group_is_not_blamed():
    """Two by two ranks: the third works, and the second waits for it, where the others go on."""
    found = [
        standing(0, "waits", dp_0=9, tp_0=80),
        standing(1, "waits", dp_1=9, tp_0=80),
        standing(2, "waits", dp_0=8, tp_1=50),
        standing(3, "works", dp_1=8, tp_1=49),
    ]
    assert [one.rank for one in find_culprits(found)] == [3]


@pytest.mark.slow
def test_ranks_end_when_their_launcher_falls_silent(tmp_path):
    """As when the host where commands are typed is lost: the input does not end."""
    training = (*TINY, "--steps", 100000, "--out", "run", "--save-every", 100000)
    command = (*PYTHON, "-m", "outpace", *map(str, training))
    work = HostCommand(
        folder=str(tmp_path), command=command, slots=1, nodes=1, node=0, endpoint="127.0.0.1:0",
        run_id="r", address="127.0.0.1",
    )  # fmt: skip
    words = [sys.executable, "-m", "outpace.launch.ssh_agent", "run"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        agent.stdin.write(work.model_dump_json() + "\n")
        agent.stdin.flush()
        at_step(agent, tmp_path / "run", 3)
        (saved,) = [line for line in agent.stdout if line.startswith(MARK)]
    (report,) = json.loads(saved.removeprefix(MARK))["reports"]
    assert report["exit_code"] == 75, report
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/complete.json"))


def test_a_finished_run_is_not_trained_again(tmp_path, command):
    words = ("outpace", *TINY, "--out", "run", "--auto-resume", "--steps")
    first, again = (command(*words, 3, "--json", cwd=tmp_path, check=True) for _ in range(2))
    assert json.loads(first.stdout) == json.loads(again.stdout)
    command(*words, 5, cwd=tmp_path, check=True)
    assert steps(tmp_path / "run") == 5


@pytest.mark.slow
def test_resuming_with_another_number_of_ranks_plans_a_new_layout(tmp_path):
    words = (*TINY, "--steps", 4, "--nproc", 2, "--tp", 2, "--out", "run")
    code, _, errors = run(*words, cwd=tmp_path)
    assert code == 0, errors
    more = (*TINY, "--steps", 8, "--nproc", 1, "--out", "run", "--auto-resume", "--json")
    code, output, errors = run(*more, cwd=tmp_path)
    assert code == 0, errors
    assert "the run had 2 ranks and resumes with 1: the layout is planned again" in errors
    assert json.loads(output)["strategy"] == "single" and steps(tmp_path / "run") == 8
    code, _, errors = run(*words, "--steps", 12, "--auto-resume", cwd=tmp_path)
    assert code == 0, errors
    assert "the run had 1 ranks and resumes with 2: the requested layout is kept" in errors


@pytest.mark.slow
def test_plan_auto_is_planned_again_when_the_number_of_ranks_changes(tmp_path):
    words = (*TINY, "--plan", "auto", "--out", "run", "--auto-resume")
    code, _, errors = run(*words, "--steps", 4, "--nproc", 2, cwd=tmp_path)
    assert code == 0, errors
    code, _, errors = run(*words, "--steps", 8, "--nproc", 1, cwd=tmp_path)
    assert code == 0, errors
    assert "the run had 2 ranks and resumes with 1" in errors and steps(tmp_path / "run") == 8


@pytest.mark.slow
def test_a_stopped_rank_is_named(tmp_path):
    process = start(*TINY, "--nproc", 2, "--steps", 5000, "--comm-timeout-s", 8, "--out", "run",
                    cwd=tmp_path)  # fmt: skip
    at_step(process, tmp_path / "run", 3)
    rank_of(process, 1).suspend()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 5
    assert "rank 1 on" in errors and "is stopped (by SIGSTOP, or a debugger)" in errors
    found = HangReport.load(tmp_path / "run" / "standstill.json")
    assert [one.state for one in found.ranks] == ["waits", "silent"]
    assert "step.py" in found.ranks[0].stacks
    page = (tmp_path / "run" / "standstill.html").read_text()
    assert "is stopped" in page and "what each rank was doing: run/standstill.html" in errors


def test_a_hanging_rank_is_named_with_its_line_of_code(tmp_path, command):
    words = (*TINY, *odd(tmp_path, "time.sleep(1000)"), "--steps", 30, "--comm-timeout-s", 20)
    ended = command("outpace", *words, "--out", "run", cwd=tmp_path)
    errors = ended.stderr
    assert ended.returncode == 5
    assert "rank 1 on" in errors and "time.sleep(1000)" in errors and "in step 10" in errors
    found = HangReport.load(tmp_path / "run" / "standstill.json")
    assert [one.state for one in found.ranks] == ["waits", "works"]
    assert "in forward" in found.ranks[1].place
    assert any(one.state != "completed" for one in found.ranks[0].collectives)


@pytest.mark.slow
def test_a_straggler_is_named_during_training(tmp_path):
    slow = "until = time.thread_time() + 0.05\n            while time.thread_time() < until: pass"
    words = (*TINY, *odd(tmp_path, slow), "--steps", 130)
    code, _, errors = run(*words, "--out", "run", cwd=tmp_path)
    assert code == 0, errors
    assert "rank 1 on" in errors and "is a straggler" in errors
    assert "rank 0 on" not in errors


def test_a_nan_loss_on_one_rank_ends_all_ranks(tmp_path, command):
    words = (*TINY, *odd(tmp_path, "return self.head(self.table(ids)) * float('nan')"))
    words = (*words, "--steps", 30, "--max-restarts", 2, "--out", "run")
    ended = command("outpace", *words, cwd=tmp_path)
    assert ended.returncode == 3 and "the loss became nan at step 10" in ended.stderr
    assert "Resuming" not in ended.stderr


@pytest.mark.slow
def test_two_trainings_on_one_machine_do_not_mix(tmp_path):
    both = [
        start(*TINY, "--nproc", 2, "--steps", 8, "--out", f"run-{number}", cwd=tmp_path)
        for number in range(2)
    ]
    for process in both:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    one, other = (tmp_path / f"run-{n}" / "metrics.jsonl" for n in range(2))
    losses = [[json.loads(line)["loss"] for line in path.read_text().splitlines()]
              for path in (one, other)]  # fmt: skip
    assert len(losses[0]) == 8 and losses[0] == losses[1]


def test_a_port_in_use_is_named(tmp_path, command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        ended = command("outpace", *TINY, "--steps", 4, "--comm-timeout-s", 20, cwd=tmp_path,
                        env={**os.environ, **place})  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert f"port {port}" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_a_process_asked_to_end_saves_first(tmp_path, whom):
    process = start(*TINY, "--nproc", 2, "--steps", 5000, "--max-restarts", 2, "--out", "run",
                    cwd=tmp_path)  # fmt: skip
    at_step(process, tmp_path / "run", 3)
    (process if whom == "launcher" else rank_of(process, 1)).send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75 and "saved after step" in errors and "restart" not in errors
