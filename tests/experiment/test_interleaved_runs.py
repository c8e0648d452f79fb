"""Trainings that take turns: who runs when, what is counted, and that nothing is left stopped."""

import itertools
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.experiment.arms import RunFailure
from outpace.experiment.interleaved_runs import TurnResult, TurnTraining, train_in_turn
from outpace.experiment.trials import fit_together, paired_s
from outpace.records.machine import Device, Machine
from outpace.records.measurement import Measurement
from outpace.records.plan import Plan
from outpace.records.tuning import PlanTrial

# Says when each step began and ended, by a child as a launcher's rank is, in a session of its own.
STEPS = """
import json, os, shutil, subprocess, sys, time, tomllib
if "rank" not in sys.argv:
    child = subprocess.Popen([sys.executable, *sys.argv, "rank"], start_new_session=True)
    sys.exit(child.wait())
values = tomllib.load(open(sys.argv[sys.argv.index("--config") + 1], "rb"))
os.makedirs(values["out"])
with open(values["out"] + "/metrics.jsonl", "w", buffering=1) as file:
    for step in range(values["steps"]):
        if step == values["seed"]:
            sys.exit("broken")
        began = time.monotonic()
        time.sleep(0.2)
        ended = time.monotonic()
        line = {"step_time_s": ended - began, "samples": step, "loss": 1.0, "at": [began, ended]}
        file.write(json.dumps(line) + "\\n")
shutil.copy("result.json", values["out"])
"""
RESULT = dict.fromkeys(name for name, field in Measurement.model_fields.items()
                       if field.is_required()) | {
    "run": "r", "steps": 1, "samples": 1, "parameters": 1, "world_size": 1, "parts": {},
    "train_runtime": 1.0, "train_samples_per_second": 1.0, "train_steps_per_second": 1.0,
    "step_time_s": 0.1,
}  # fmt: skip


@pytest.fixture
def entrant(tmp_path, monkeypatch):
    """By name, each of which fails at a step, or never."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "outpace").mkdir()
    (tmp_path / "outpace" / "__init__.py").touch()
    (tmp_path / "outpace" / "__main__.py").write_text(STEPS)
    (tmp_path / "result.json").write_text(json.dumps(RESULT))

    def one(name, fails_at=10**6):
        return TurnTraining({"seed": fails_at}, tmp_path / name, tmp_path / f"{name}.toml", 3)

    return one


def times_of(run):
    return [json.loads(line)["at"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def _without_repeats(names):
    return [name for name, _ in itertools.groupby(names)]


def test_one_runs_at_a_time_and_steps_with_a_pause_do_not_count(entrant):
    names = ("a", "b", "c")
    found = train_in_turn([entrant(name) for name in names], 3, 600.0)
    assert all(isinstance(one.result, Measurement) for one in found)
    for one in found:
        # Where others keep the machine busy turns may end late: the last is shorter by as much.
        assert len(one.turns) == 3 and all(len(turn) >= 3 for turn in one.turns[:-1])
    spans = []
    for name, one in zip(names, found, strict=True):
        took = [(end - begin, begin, end) for begin, end in times_of(Path(name))]
        own = {seconds for turn in one.turns for seconds in turn}
        spans += [(begin, end, name) for seconds, begin, end in took if seconds in own]
    spans.sort()
    assert len(spans) == sum(len(turn) for one in found for turn in one.turns)
    # None holds a pause: those of others lie between.
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    counted = [
        name
        for turn, order in enumerate(("abc", "bca", "cab"))
        for name in order
        if found[names.index(name)].turns[turn]
    ]
    assert _without_repeats(name for *_, name in spans) == _without_repeats(counted)


def test_one_that_fails_leaves_the_others_to_go_on(entrant):
    good, bad = train_in_turn([entrant("a"), entrant("b", fails_at=7)], 3, 600.0)
    assert isinstance(good.result, Measurement)
    assert [bool(turn) for turn in good.turns] == [True, True, True]
    assert bad == TurnResult(RunFailure(1, "exit code 1: broken"), bad.turns)
    good_s, none = paired_s([good, bad])
    assert none is None
    assert min(itertools.chain(*good.turns)) <= good_s <= max(itertools.chain(*good.turns))


def test_what_does_not_end_in_time_is_ended(entrant):
    (found,) = train_in_turn([entrant("a")], 50, 1.5)
    assert found.result == RunFailure(None, "stopped at the limit of 2 s")


def test_where_we_are_killed_nothing_stays_stopped(entrant, tmp_path):
    entrant("a")
    program = """
import pathlib, sys
sys.path[:] = [sys.argv[1], *(one for one in sys.path if one not in ("", sys.argv[2]))]
from outpace.experiment.interleaved_runs import TurnTraining, train_in_turn
path = pathlib.Path(".").resolve()
train_in_turn(
    [TurnTraining({"seed": 30}, path / n, path / (n + ".toml"), 3) for n in "ab"], 9, 600.0
)
"""
    own = subprocess.Popen(
        [sys.executable, "-c", program, Path(__file__).parents[2], tmp_path],
    )
    until_s, stopped = time.monotonic() + 600, set()
    while not stopped and time.monotonic() < until_s:
        started = psutil.Process(own.pid).children(recursive=True)
        stopped = {one for one in started if one.status() == psutil.STATUS_STOPPED}
        time.sleep(0.05)
    assert stopped
    own.send_signal(signal.SIGKILL)
    own.wait()
    _, left = psutil.wait_procs(started, timeout=600)
    assert not left  # they came to their end


def turned(*turns):
    return TurnResult(Measurement.model_validate(RESULT), turns)


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=8), st.floats(0.5, 2.0))
def test_what_slows_all_alike_tells_nothing(drift, ratio):
    several = [turned(*((d * r, d * r * 1.1) for d in drift)) for r in (1.0, ratio)]
    one, other = paired_s(several)
    assert math.isclose(other / one, ratio, rel_tol=1e-9)


def test_no_turns_are_not_compared():
    assert paired_s([]) == [] and paired_s([turned(), turned()]) == [None, None]
    assert paired_s([turned((), (1.0,)), turned((2.0,), (2.0,))]) == [None, 2.0]


def test_only_what_fits_beside_each_other_takes_turns():
    gib, plans = 2**30, [Plan(), Plan(strategy="ddp", dp_replicate=2)]
    trials = [PlanTrial(number=n, why="", title="", plan=plan, first_predicted_s=1, predicted_s=1,
                    peak_memory_bytes=gib, took_s=1, run="r")
              for n, plan in enumerate(plans, 1)]  # fmt: skip
    host = Machine(host_cores=1, host_memory_bytes=gib, cpu="x")
    assert fit_together(plans, trials, 3 * gib, host)
    assert not fit_together(plans, trials, 3 * gib - 1, host)
    assert not fit_together(plans, trials[:1], 9 * gib, host)
    for device_gib, fits in ((3, True), (2, False)):
        device = Device(name="x", memory_bytes=device_gib * gib)
        some = host.model_copy(update={"devices": (device,)})
        assert fit_together(plans, trials, None, some) is fits
    assert not fit_together(plans, trials, None, host)
