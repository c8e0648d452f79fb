"""A rank that is lost ends all the others within the time limit: whatever they do, at any moment.

Strategies × moments × faults, by signals and servers that are real. What is not marked slow is a
sample of them.
"""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from outpace.records.base import TEMPORARY_PREFIX
from outpace.records.ranks import RANK_NAME

pytestmark = pytest.mark.gloo

STRATEGIES = ("ddp", "zero1", "zero3", "ring", "dp", "ps", "tp", "gpipe", "1f1b", "zb", "zbv", "mp")
MOMENTS = ("start", "step", "evaluation", "save", "end")
TIMEOUT_S = 6
# The time limit, a look at all ranks, an end in order, and the launcher's patience with the rest:
# by far more than these take, by far less than the six hours that a save may.
LIMIT_S = 600
STEPS = 40
TINY = ("train", "--model", "outpace-tiny", "--seq-len", 32, "--global-batch", 8, "--steps", STEPS,
        "--save-every", 2, "--eval-every", 2, "--eval-batches", 1, "--sample-tokens", 0,
        "--precision", "fp32", "--threads", 1, "--device", "cpu",
        "--comm-timeout-s", TIMEOUT_S)  # fmt: skip

DEEP = (
    '{"family": "gpt2", "layers": 4, "hidden": 32, "heads": 2, "vocab": 512, "max_positions": 64}'
)

SAMPLE = {("ddp", "save", signal.SIGSTOP, 1)}
CASES = [
    pytest.param(
        *case, id="-".join((*case[:2], case[2].name, str(case[3]))),
        marks=() if case in SAMPLE else pytest.mark.slow,
    )
    for case in itertools.product(STRATEGIES, MOMENTS, (signal.SIGSTOP, signal.SIGKILL), (0, 1))
]  # fmt: skip


@pytest.fixture
def start(started):
    def run(*words, cwd, **environ):
        return started("outpace", *words, cwd=cwd, env={**os.environ, **environ})

    return run


@pytest.fixture
def start_ranks(start, hold_port):
    """Ranks that no launcher looks after."""

    def run(*words, cwd, world_size=2, **environ):
        place = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hold_port()),
                 **environ}  # fmt: skip
        return [start(*words, cwd=cwd, RANK=str(rank), LOCAL_RANK=str(rank), **place)
                for rank in range(world_size)]  # fmt: skip

    return run


def find_ranks(launcher):
    """The processes of both ranks, as soon as they are there."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        found = {}
        for child in psutil.Process(launcher.pid).children():
            with contextlib.suppress(psutil.Error, ValueError):
                found[int(child.name().removeprefix(RANK_NAME))] = child
        if len(found) == 2:
            return found[0], found[1]
        time.sleep(0.01)
    raise AssertionError("no ranks")


def wait_for(moment, run):
    """Until a run is at a moment, as far as its files tell; not for longer than it takes."""

    def steps():
        path = run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def at():
        if moment == "start":
            return True
        if moment == "step":
            return steps() >= 3
        if moment == "evaluation":
            path = run / "evals.jsonl"
            return path.is_file() and path.read_bytes().count(b"\n") >= 2
        if moment == "save":
            folders = list((run / "checkpoints").glob("step-*"))
            return any(not (folder / "complete.json").exists() for folder in folders)
        return steps() == STEPS

    until_s = time.monotonic() + LIMIT_S
    while not at() and time.monotonic() < until_s and not (run / "result.json").is_file():
        time.sleep(0.001)


def end_in_time(processes):
    """Their exit codes and what they said; all are gone after the test."""
    until_s = time.monotonic() + LIMIT_S
    try:
        for process in processes:
            process.wait(max(until_s - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        pytest.fail("it hangs")
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, process.communicate()[1]) for process in processes]


@pytest.fixture
def words(corpus, token_cache):
    return (*TINY, "--data", corpus, "--cache-dir", token_cache)


def wait_until_gone(processes):
    _, left = psutil.wait_procs(processes, timeout=LIMIT_S)
    for one in left:
        one.kill()
    return not left


@pytest.mark.parametrize(("strategy", "moment", "signum", "victim"), CASES)
def test_all_end_when_a_rank_is_lost(tmp_path, words, strategy, moment, signum, victim, start):
    pipeline = ("--pp-microbatches", 4) if strategy in ("gpipe", "1f1b", "zb", "zbv") else ()
    if strategy in ("zb", "zbv"):  # two stages on each rank
        (tmp_path / "model.json").write_text(DEEP)
        pipeline = (*pipeline, "--model", "model.json")
    launcher = start(
        *words, "--nproc", 2, "--strategy", strategy, *pipeline, "--out", "run", cwd=tmp_path
    )
    ranks = find_ranks(launcher)
    wait_for(moment, tmp_path / "run")
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks[victim].send_signal(signum)
    ((code, said),) = end_in_time([launcher])
    assert wait_until_gone(ranks)
    assert "Traceback" not in said, said
    if code != 0:  # it was over before the signal came
        assert f"rank {victim}" in said or "find the others" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_end_without_a_launcher_too(tmp_path, words, moment, victim, start_ranks):
    """The stopped rank 0 has the store where all meet, and answers nobody."""
    processes = start_ranks(*words, "--strategy", "ddp", "--out", "run", cwd=tmp_path)
    wait_for(moment, tmp_path / "run")
    processes[victim].send_signal(signal.SIGSTOP)
    try:
        ((code, said),) = end_in_time([processes[1 - victim]])
    finally:
        processes[victim].kill()
        processes[victim].communicate()
    assert "Traceback" not in said, said
    assert code != 0 or moment == "end", said


def test_ranks_end_with_their_launcher(tmp_path, words):
    """After SIGKILL, which it cannot pass on; they save first, and nothing goes on unseen.

    In a process of its own: what torch logs is set before it is imported.
    """
    more = ("--steps", 5000, "--nproc", 2, "--out", "run")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "outpace", *map(str, (*words, *more))], cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    ranks = find_ranks(launcher)
    wait_for("step", tmp_path / "run")
    launcher.kill()
    assert wait_until_gone(ranks)
    _, said = launcher.communicate()
    assert "which started this one, has ended" in said
    assert len(said) < 20_000
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/complete.json"))


@contextlib.contextmanager
def server(answer):
    """The port of a program that is no rank: it answers so, or not at all."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk(connection):
            with contextlib.suppress(OSError), connection:
                while connection.recv(4096):
                    if answer is not None:
                        connection.sendall(answer)

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(
                        target=talk, args=(listening.accept()[0],), daemon=True
                    ).start()

        threading.Thread(target=accept, daemon=True).start()
        yield str(listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def rank_alone(start, hold_port):
    """Exit code and words of one rank of two, of which the other is not there."""

    def run(words, cwd, rank=1, **environ):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                 "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(hold_port()), **environ}  # fmt: skip
        (found,) = end_in_time([start(*words, "--comm-timeout-s", 2, cwd=cwd, **place)])
        return found

    return run


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(None, "does not answer as rank 0 would", id="silent",
                     marks=pytest.mark.slow),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program", id="http"),
    ],
)  # fmt: skip
def test_a_rank_does_not_wait_for_another_program(tmp_path, words, answer, said, rank_alone):
    with server(answer) as port:
        code, errors = rank_alone(words, tmp_path, MASTER_PORT=port)
    assert code == 1 and said in errors and "rank 1 did not find the others" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("rank", "environ", "code", "said"),
    [
        pytest.param(1, {"MASTER_ADDR": "no-such-host.invalid"}, 2,
                     "outpace: rank 1: environment: MASTER_ADDR = 'no-such-host.invalid' does "
                     "not resolve on this host after 2 s", id="a name that leads nowhere"),
        pytest.param(0, {}, 1, "(rank 1 did not join)", id="a rank that never comes",
                     marks=pytest.mark.slow),
        pytest.param(1, {}, 1, "rank 1 did not find the others", id="rank 0 never comes",
                     marks=pytest.mark.slow),
        # TEST-NET-1 of RFC 5737: no packet comes back
        pytest.param(1, {"MASTER_ADDR": "192.0.2.1"}, 1, "did not find the others at 192.0.2.1",
                     id="an address that nobody answers at", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_rank_does_not_wait_for_ever_to_meet(
    tmp_path, words, rank, environ, code, said, rank_alone
):
    found, errors = rank_alone(words, tmp_path, rank, **environ)
    assert found == code and said in errors, errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_signal_is_heard_while_a_rank_waits_for_the_others(tmp_path, words, start, hold_port):
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hold_port())}  # fmt: skip
    process = start(*words, "--comm-timeout-s", 600, cwd=Path(tmp_path), **place)
    time.sleep(15)
    process.send_signal(signal.SIGTERM)
    ((code, said),) = end_in_time([process])
    assert code == 75 and "nothing was trained" in said, said


# A forward on rank 1 that stands for a compiler at work; rank 0 waits for it in a collective.
WAITING = """
import os, time
import torch

class Waiting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)

    def forward(self, x):
        if torch.is_grad_enabled() and type(x) is torch.Tensor and os.environ["RANK"] == "1":
            open("waits", "w").close()
            time.sleep(600)
        return self.inner(x)

def build():
    return Waiting(), lambda module, x: module(x).square().mean(), [torch.ones(4)] * 16
"""


@pytest.mark.parametrize(
    "victims", [pytest.param((0,), id="waits in a collective"),
                pytest.param((1,), id="works", marks=pytest.mark.slow),
                pytest.param((0, 1), id="both", marks=pytest.mark.slow),
                pytest.param((), id="the launcher", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_signal_within_the_first_step_ends_all_ranks(tmp_path, victims, start, start_ranks):
    (tmp_path / "waiting.py").write_text(WAITING)
    words = ("train", "--model", "waiting.py:build", "--global-batch", 4, "--steps", 2,
             "--precision", "fp32", "--threads", 1, "--device", "cpu", "--strategy", "ddp",
             "--comm-timeout-s", 600, "--out", "run")  # fmt: skip
    if victims:
        processes = start_ranks(*words, cwd=tmp_path)
        told = [processes[victim] for victim in victims]
    else:
        told = processes = [start(*words, "--nproc", 2, cwd=tmp_path)]
    try:
        until_s = time.monotonic() + LIMIT_S
        while not (tmp_path / "waits").exists() and time.monotonic() < until_s:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        time.sleep(1.5)  # rank 0 has come to the collective
        for process in told:
            process.send_signal(signal.SIGTERM)
    finally:
        ended = end_in_time(processes)
    for code, _ in ended:
        assert code == 75, ended
    assert "nothing was trained" in ended[0][1] and "Traceback" not in ended[0][1], ended
    assert not (tmp_path / "run").exists()


# Evaluations after the first step take minutes; one sample a second.
EVALUATING = """
import time
import torch

class Evaluating(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)
        self.trained = False

    def forward(self, x):
        if torch.is_grad_enabled():
            self.trained = True
        elif self.trained:
            open("evaluates", "w").close()
            time.sleep(1)
        return self.inner(x)

def build():
    samples = [torch.ones(4)] * 400
    return Evaluating(), lambda module, x: module(x).square().mean(), samples, samples
"""


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_the_evaluation_of_all_and_saves(tmp_path, start_ranks):
    (tmp_path / "evaluating.py").write_text(EVALUATING)
    processes = start_ranks(
        "train", "--model", "evaluating.py:build", "--global-batch", 2, "--steps", 4,
        "--eval-every", 2, "--eval-batches", 200, "--precision", "fp32",
        "--threads", 1, "--device", "cpu", "--strategy", "ddp", "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    try:
        until_s = time.monotonic() + LIMIT_S
        while not (tmp_path / "evaluates").exists() and time.monotonic() < until_s:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        processes[1].send_signal(signal.SIGTERM)
    finally:
        ended = end_in_time(processes)
    for code, said in ended:
        assert code == 75 and "Traceback" not in said, ended
    assert "saved after step 2 of 4" in ended[0][1], ended
    assert (tmp_path / "run" / "checkpoints" / "step-2" / "complete.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "signum"), [(1, signal.SIGINT), (2, signal.SIGTERM)], ids=["one rank", "one of two"]
)
def test_a_signal_ends_the_final_evaluation_and_the_run_can_be_finished(
    tmp_path, nproc, signum, start, start_ranks
):
    (tmp_path / "evaluating.py").write_text(EVALUATING)
    words = ("train", "--model", "evaluating.py:build", "--global-batch", 2, "--steps", 2,
             "--precision", "fp32", "--threads", 1, "--device", "cpu", "--out", "run")  # fmt: skip
    long = (*words, "--eval-batches", 200)
    processes = start_ranks(*long, cwd=tmp_path) if nproc == 2 else [start(*long, cwd=tmp_path)]
    try:
        until_s = time.monotonic() + LIMIT_S
        while not (tmp_path / "evaluates").exists() and time.monotonic() < until_s:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        processes[-1].send_signal(signum)
    finally:
        ended = end_in_time(processes)
    for code, said in ended:
        assert code == 75 and "Traceback" not in said, ended
    assert "saved after step 2, the last one" in ended[0][1], ended
    run = tmp_path / "run"
    assert (run / "checkpoints" / "step-2" / "complete.json").is_file()
    assert not (run / "model").exists() and not (run / "result.json").exists()
    ((code, said),) = end_in_time(
        [start("train", "--resume", "run", "--nproc", nproc, "--eval-batches", 1, cwd=tmp_path)]
    )
    assert code == 0 and (run / "model").is_dir() and (run / "result.json").is_file(), said


# Rank 7 does something else after all have saved, for longer than an interrupted rank may take. In
# two broadcasts by gloo rank 0 waits for those that are two sends away; this one is three away.
BUSY = """
import os, time
import torch
from outpace.jobs.train.utilisation import Recording

averages = Recording.averages

def busy(recording):
    found = averages(recording)  # a collective; none follows it but the wait for all
    if os.environ["RANK"] == "7":
        open("busy", "w").close()
        time.sleep(8)
    return found

Recording.averages = busy

def build():
    samples = [torch.ones(4)] * 16
    return torch.nn.Linear(4, 1), lambda module, x: module(x).square().mean(), samples, samples
"""


@pytest.mark.slow
def test_a_signal_while_a_rank_comes_late_to_the_end_says_what_was_saved(tmp_path, start_ranks):
    (tmp_path / "busy.py").write_text(BUSY)
    processes = start_ranks(
        "train", "--model", "busy.py:build", "--global-batch", 8, "--steps", 2, "--precision",
        "fp32", "--threads", 1, "--device", "cpu", "--out", "run", cwd=tmp_path,
        world_size=8,
    )  # fmt: skip
    try:
        until_s = time.monotonic() + LIMIT_S
        while not (tmp_path / "busy").exists() and time.monotonic() < until_s:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        time.sleep(1)  # rank 0 waits for it, or has gone on
        processes[0].send_signal(signal.SIGTERM)
    finally:
        ended = end_in_time(processes)
    assert [code for code, _ in ended] == [75] * 8, ended
    assert "saved after step 2, the last one" in ended[0][1], ended
    assert not any("nothing was trained" in said for _, said in ended), ended
    assert (tmp_path / "run" / "checkpoints" / "step-2" / "complete.json").is_file()


# A signal, once, when the model's folder is there and its weights are about to be written.
EXPORTING = """
import os, pathlib, signal
import torch

class Exporting(torch.nn.Linear):
    def state_dict(self, *args, **more):
        begun = [str(path) for path in pathlib.Path("run").glob("TEMPORARY*.tmp") if path.is_dir()]
        if begun and not os.path.exists("signalled"):
            pathlib.Path("signalled").write_text(begun[0])
            os.kill(os.getpid(), signal.SIGTERM)
        return super().state_dict(*args, **more)

def build():
    return Exporting(4, 1), lambda module, x: module(x).square().mean(), [torch.ones(4)] * 16
"""


@pytest.mark.slow
def test_a_signal_while_the_model_is_written_leaves_nothing_of_it(tmp_path, start):
    (tmp_path / "exporting.py").write_text(EXPORTING.replace("TEMPORARY", TEMPORARY_PREFIX))
    words = ("train", "--model", "exporting.py:build", "--global-batch", 2, "--steps", 2,
             "--precision", "fp32", "--threads", 1, "--device", "cpu", "--out", "run")  # fmt: skip
    ((code, said),) = end_in_time([start(*words, cwd=tmp_path)])
    assert (tmp_path / "signalled").is_file(), said
    assert code == 75 and "Traceback" not in said, said
    assert "saved after step 2, the last one" in said
    run = tmp_path / "run"
    assert not (run / "model").exists() and not list(run.glob(f"{TEMPORARY_PREFIX}*"))
    assert not (run / "result.json").exists()
    ((code, said),) = end_in_time([start("train", "--resume", "run", cwd=tmp_path)])
    assert code == 0 and (run / "model").is_dir() and (run / "result.json").is_file(), said


# Rank 0 comes late: the other has looked by then who holds it up, and written that down.
LATE = """
import os, pathlib, signal, time
import torch

class Late(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)
        self.calls = 0
        pathlib.Path(f"{{os.environ['RANK']}}.pid").write_text(str(os.getpid()))

    def forward(self, x):
        self.calls += 1
        if os.environ["RANK"] == "0" and self.calls == 10:
            while not os.path.exists("run/standstill.json"):
                time.sleep(0.01)
            {then}
        return self.inner(x)

def build():
    return Late(), lambda module, x: module(x).square().mean(), [torch.ones(4)] * 160
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "found"),
    [
        ('os.kill(int(open("1.pid").read()), signal.SIGKILL)', "rank 1 on"),
        ('raise RuntimeError("a broken fan")', "a broken fan"),
    ],
    ids=["lost", "fails"],
)
def test_a_verdict_by_which_nobody_ended_is_forgotten(tmp_path, then, found, start_ranks):
    """The rank that it names is there, and finds out what went wrong since."""
    (tmp_path / "late.py").write_text(LATE.format(then=then))
    processes = start_ranks(
        "train", "--model", "late.py:build", "--global-batch", 4, "--steps", 40, "--precision",
        "fp32", "--threads", 1, "--device", "cpu", "--strategy", "ddp", "--comm-timeout-s",
        TIMEOUT_S, "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    (code, said), _ = end_in_time(processes)
    assert code == 1 and found in said, said
    assert "rank 0 on" not in said, said


# The second stage waits for each micro-batch of the first, but never as long as ranks wait for
# each other; the step as a whole takes several times that.
LONG_STEP = """
import os, time
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if os.environ["RANK"] == "0" and 17 <= self.calls < 25:
            time.sleep({sleep_s})
        return self.inner(x)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def build():
    return Model(), lambda module, x: module(x).square().mean(), [torch.ones(4)] * 160
"""


@pytest.mark.slow
def test_a_step_longer_than_ranks_wait_goes_on_while_its_collectives_do(tmp_path, start_ranks):
    (tmp_path / "long.py").write_text(LONG_STEP.format(sleep_s=TIMEOUT_S / 2))
    processes = start_ranks(
        "train", "--model", "long.py:build", "--global-batch", 8, "--pp-microbatches", 8,
        "--steps", 6, "--precision", "fp32", "--threads", 1, "--device", "cpu", "--strategy",
        "gpipe", "--check", "off", "--comm-timeout-s", TIMEOUT_S, "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    for code, said in end_in_time(processes):
        assert code == 0, said


UNEQUAL = """
import os
import torch

def build():
    samples = [torch.ones(4)] * (32 if os.environ["RANK"] == "0" else 16)
    return torch.nn.Linear(4, 1), lambda module, x: module(x).square().mean(), samples
"""


@pytest.mark.slow
def test_ranks_whose_data_differ_in_length_are_refused(tmp_path, start_ranks):
    """Each would take its share of an order of its own: some samples twice, others never."""
    (tmp_path / "unequal.py").write_text(UNEQUAL)
    processes = start_ranks(
        "train", "--model", "unequal.py:build", "--global-batch", 4, "--steps", 2, "--precision",
        "fp32", "--threads", 1, "--device", "cpu", "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    (code, said), (other, _) = end_in_time(processes)
    assert (code, other) == (2, 2), said
    assert "has a different number of training samples from rank 0 (on " in said
    assert "): 16 instead of 32. Give all hosts the same files" in said
    assert not (tmp_path / "run").exists()


def test_two_jobs_at_one_port_do_not_mix(tmp_path, words, start_ranks, hold_port):
    """Rank 1 of the second comes with that of the first; its rank 0 finds the port in use."""
    place, long = {"MASTER_PORT": str(hold_port())}, (*words, "--steps", 10**6)
    first, second = (
        start_ranks(
            *long, "--comm-timeout-s", 60, "--out", f"run-{job}", cwd=tmp_path, SLURM_JOB_ID=job,
            **place,
        )
        for job in ("12", "13")
    )  # fmt: skip
    started = [*first, *second]
    until_s = time.monotonic() + LIMIT_S
    while sum(one.poll() is not None for one in started) < 2 and time.monotonic() < until_s:
        time.sleep(0.05)
    trained = 0 if first[0].poll() is None else 1  # whose rank 0 came first
    for one in started:  # the job that trains, which must outlive the other
        one.send_signal(signal.SIGTERM)
    ends = end_in_time(started)
    codes = [code for code, _ in ends]
    assert codes == ([75, 75, 2, 2] if trained == 0 else [2, 2, 75, 75]), ends
    (_, refused_0), (_, refused_1) = ends[2:] if trained == 0 else ends[:2]
    assert "another program listens there" in refused_0
    assert "found another job at this MASTER_ADDR" in refused_1 and "SLURM_JOB_ID=1" in refused_1


def test_a_rank_that_comes_twice_is_refused_and_rank_0_says_so(
    tmp_path, words, start, start_ranks, hold_port
):
    """Either may be of another job: nothing is trained, unless it comes after training began."""
    place = {"MASTER_PORT": str(hold_port())}
    processes = start_ranks(*words, "--out", "run", cwd=tmp_path, **place)
    processes.append(
        start(*words, "--out", "run", cwd=tmp_path, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2",
              LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", **place)
    )  # fmt: skip
    (code, said), *others = end_in_time(processes)
    assert "tried to join as rank 1, which had already joined" in said
    assert any("found another job at this MASTER_ADDR" in one for _, one in others)
    codes = sorted(code for code, _ in others)
    # Of a refusal in a collective, the rank that was there first may hear that rank 0 is gone.
    assert (code, codes) in ((2, [2, 2]), (2, [1, 2]), (0, [0, 2])), (said, others)
    assert (tmp_path / "run").exists() == (code == 0)
