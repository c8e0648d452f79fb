"""One run in processes of its own: what is left of another, limits, and why one failed."""

import psutil
import pytest

from outpace.experiment.arms import RunFailure, run_command, train_once
from outpace.records.comparison import Arm, Experiment
from outpace.records.measurement import Measurement
from outpace.records.run import RunRecord


def test_what_was_interrupted_is_begun_anew_and_its_record_has_what_may_differ(tmp_path):
    corpus, run = tmp_path / "corpus.txt", tmp_path / "runs" / "0-a-000"
    corpus.write_text("def a():\n    return 1\n" * 400)
    (run / "utilisation").mkdir(parents=True)
    (run / "run.json").write_text("{")  # of a run that Ctrl-C ended
    given = {"model": "outpace-tiny", "data": [str(corpus)], "seq_len": 16, "global_batch": 4,
             "steps": 4, "cache_dir": str(tmp_path / "cache")}  # fmt: skip
    found = train_once(given, run, tmp_path / "a.toml", {"NCCL_DEBUG": "WARN", "OTHER": "1"})
    assert isinstance(found, Measurement) and found.steps == 4
    record = RunRecord.load(run / "run.json")
    assert record.environment["NCCL_DEBUG"] == "WARN" and "OTHER" not in record.environment
    assert record.load_before is not None and bool(record.changes) == bool(
        record.uncommitted_changes
    )


# As a launcher does: a worker in a session of its own, which holds the output and does not listen.
STUCK = """
import os, signal, subprocess, sys, time
if "worker" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("pid", "w").write(f"{os.getpid()}")
else:
    subprocess.Popen([sys.executable, __file__, "worker"], start_new_session=True)
print("began", flush=True)
time.sleep(200)
"""


def instead_of_outpace(program, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    (folder / "outpace").mkdir()
    (folder / "outpace" / "__init__.py").touch()
    (folder / "outpace" / "__main__.py").write_text(program)


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_run_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    instead_of_outpace(STUCK, tmp_path, monkeypatch)
    found = train_once({}, tmp_path / "run", tmp_path / "a.toml", limit_s=2.0)
    assert found == RunFailure(None, "stopped at the limit of 2 s")
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("print('{\"error\": \"out of memory: rank 0.\\\\n1. zero3\", \"exit_code\": 4}'); exit(4)",
         4, "exit code 4: out of memory: rank 0."),
        ("print('outpace: bad'); print('{\"error\": \"bad\", \"exit_code\": 2}'); exit(2)",
         2, "exit code 2: bad"),
        ("raise ValueError('of mine')", 1, "exit code 1: ValueError: of mine"),
        ("import os; os.kill(os.getpid(), 9)", -9, "exit code -9: no output"),
    ],
)  # fmt: skip
def test_a_failure_is_told_in_the_runs_own_words(tmp_path, monkeypatch, program, code, words):
    instead_of_outpace(program, tmp_path, monkeypatch)
    assert train_once({}, tmp_path / "run", tmp_path / "a.toml") == RunFailure(code, words)


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-3"])
def test_a_metric_is_a_number_above_0(tmp_path, value):
    arms = tuple(Arm(name=name, command=f"echo t={value}") for name in "ab")
    experiment = Experiment(arms=arms, metric="t=(.*)")
    outcome = run_command(experiment, arms[0], 0, tmp_path)
    assert outcome.value is None and "ratios need a number above 0" in outcome.failure


def test_arms_whose_names_are_alike_as_files_keep_apart(tmp_path):
    names = ("a/b" * 30, "a b" * 30)
    arms = tuple(Arm(name=name, command=f"echo t={n}") for n, name in enumerate(names, 1))
    experiment = Experiment(arms=arms, metric="t=(.*)")
    found = [run_command(experiment, arm, 0, tmp_path) for arm in arms]
    assert [(tmp_path / one.run).read_text() for one in found] == ["t=1\n", "t=2\n"]
