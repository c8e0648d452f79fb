"""`outpace compare`: arms in turn, verdicts, what is kept, what is refused."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from outpace.cli.main import main
from outpace.planner.communication.volume import step_traffic
from outpace.records.comparison import Comparison, Outcome
from outpace.records.run import RunRecord

METRIC = "--metric=t=([0-9.]+)"


def compared(capsys, tmp_path, *words, out="c"):
    folder = tmp_path / out
    assert main(["compare", *words, "--out", str(folder), "--json"]) == 0
    found = Comparison.parse(json.loads(capsys.readouterr().out), "stdout")
    assert found == Comparison.load(folder / "comparison.json")
    return found


def test_a_clear_difference_is_claimed_with_its_size_and_ends_it(capsys, tmp_path):
    found = compared(capsys, tmp_path, "--command=echo t=2.0", "--command=echo t=2.2", METRIC)
    (verdict,) = found.verdicts().values()
    assert verdict.claimed and verdict.slowdown == pytest.approx(0.1)
    assert found.stopped == "the verdict is clear" and verdict.rounds < 15
    assert [arm.metric for arm in found.arms] == [2.0, 2.2]


def test_arms_take_turns_in_an_order_that_is_drawn(capsys, tmp_path):
    words = [f"--command=echo t=1.{n}" for n in range(3)]
    found = compared(capsys, tmp_path, *words, METRIC, "--rounds", "8")
    rounds = [[o.arm for o in found.outcomes if o.round == n] for n in range(8)]
    assert all(sorted(one) == sorted(rounds[0]) for one in rounds)
    assert any(one != other for one, other in pairwise(rounds))


def test_what_is_alike_is_not_told_apart(capsys, tmp_path):
    same = "i=$(($(cat n 2>/dev/null || echo 0)+1)); echo $i > n; echo t=1.00$((i * 7 % 5))"
    words = [f"--command=cd {tmp_path}; {same}", f"--command=cd {tmp_path}; {same} # b", METRIC]
    found = compared(capsys, tmp_path, *words, "--rounds", "25")
    (verdict,) = found.verdicts().values()
    assert not verdict.claimed and max(abs(verdict.low), abs(verdict.high)) < 0.005
    assert "no difference larger than" in verdict.words("b", "a")


def test_an_arm_that_fails_is_a_result(capsys, tmp_path):
    words = ["--command=echo t=1", "--command=echo broken >&2; exit 3", "--command=echo t=2"]
    found = compared(capsys, tmp_path, *words, METRIC, "--rounds", "3")
    broken = [one for one in found.outcomes if one.value is None]
    assert len(broken) == 2 and broken[0].failure == "exit code 3: broken"
    assert found.arms[1].verdict.rounds == 0 and found.arms[2].verdict.rounds == 3
    assert main(["compare", *words, METRIC, "--rounds=2", f"--out={tmp_path / 'd'}"]) == 0
    printed = capsys.readouterr()
    assert "round 1 of at most 2: echo t=1: metric 1\n" in printed.err
    shown = " ".join(printed.out.split())
    assert "failed: exit code 3: broken" in shown and "2 rounds cannot decide between" in shown
    assert "In the median so far, echo t=2 is 100.0 % higher than echo t=1." in shown
    assert "at least 11 are needed" in shown  # of three arms
    assert "outpace: 2 rounds cannot decide, whatever they measure: use --rounds 11" in printed.err


def test_a_comparison_goes_on_where_it_stopped(capsys, tmp_path):
    words = ["--command=echo t=1", "--command=echo t=2", METRIC]
    first = compared(capsys, tmp_path, *words, "--rounds", "3")
    outcomes = tmp_path / "c" / "outcomes.jsonl"
    outcomes.write_text(outcomes.read_text()[:-20])  # killed within a round, and a line
    again = compared(capsys, tmp_path, *words, "--rounds=4", "--budget=900", "--resume")
    assert again.outcomes[:4] == first.outcomes[:4] and len(again.outcomes) == 8
    assert again.experiment.seed == first.experiment.seed
    assert again.took_s >= sum(one.took_s for one in again.outcomes) > 0
    same = compared(capsys, tmp_path, *words, "--resume")  # as many rounds as were asked for last
    assert same.outcomes == again.outcomes
    assert main(["compare", *words, f"--out={tmp_path / 'c'}"]) == 2
    assert "--resume" in capsys.readouterr().err
    other = ["--command=echo t=1", "--command=echo t=3", METRIC]
    assert main(["compare", *other, f"--out={tmp_path / 'c'}", "--resume"]) == 2
    assert "a different experiment" in capsys.readouterr().err
    outcomes.write_text("{\n")
    assert main(["compare", *words, f"--out={tmp_path / 'c'}", "--resume"]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_a_stored_comparison_is_repeated_and_stood_beside(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--command=echo t=1", "--command=echo t=2", METRIC]
    assert main(["compare", *words, "--out=my c", "--rounds=12"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "again: outpace compare 'my c/comparison.json'" in shown
    first = Comparison.load(tmp_path / "my c" / "comparison.json")
    stored = first.model_copy(update={"machine": first.machine.model_copy(update={"cpu": "old"})})
    stored.save(tmp_path / "my c" / "comparison.json")
    assert main([*first.command[1:], "--out=again"]) == 0
    assert "agrees with +100.0%" in capsys.readouterr().out
    again = Comparison.load(tmp_path / "again" / "comparison.json")
    assert again.experiment == first.experiment
    assert any(line.startswith("processor was old, ") for line in again.beside)
    assert main(list(first.command[1:])) == 0  # as it was printed: into a folder of its own
    assert len(list((tmp_path / "comparisons").iterdir())) == 1
    capsys.readouterr()
    assert main([*first.command[1:], "--rounds=3", "--no-compile", "--out=c"]) == 2
    refused = capsys.readouterr().err
    assert "a repeated comparison takes its arms" in refused
    assert "Leave out --rounds, --compile" in refused
    other = compared(capsys, tmp_path, *words, "--rounds=1")
    assert other.experiment.seed != first.experiment.seed


def test_an_experiments_file_has_arms_a_grid_and_variables(capsys, tmp_path):
    file = tmp_path / "experiment.toml"
    file.write_text(
        'rounds = 1\nmetric = "t=([0-9.]+)"\n'
        '[[arm]]\ncommand = "echo t=$SPEED"\nenvironment = { SPEED = "3" }\n'
        '[[arm]]\nname = "slow"\ncommand = "echo t=$SPEED"\nenvironment = { SPEED = 4 }\n'
    )
    found = compared(capsys, tmp_path, str(file))
    assert [(arm.arm, arm.metric) for arm in found.arms] == [("echo t=$SPEED", 3), ("slow", 4)]
    file.write_text(
        'rounds = 1\nseed = 7\nmetric = "t=([0-9.]+)"\n[[arm]]\nname = "a"\n'
        'command = "echo t=$SPEED"\n[grid]\nSPEED = [3, 4]\n'
    )
    found = compared(capsys, tmp_path, str(file), out="d")
    assert [(arm.arm, arm.metric) for arm in found.arms] == [("a, SPEED=3", 3), ("a, SPEED=4", 4)]
    assert found.experiment.seed == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grid = [1]", "grid: write it as a table"),
        ("[grid]\nseed = 1", "seed needs a list of values"),
        ('[[arm]]\nstrategy = "ddp"\nenvironment = 3', "environment: write it as a table"),
        (
            'metric = "(t)"\n[[arm]]\ncommand = "a"\n[grid]\nseed = [1, 2]',
            "seed would have no effect",
        ),
        ('metric = "(t)"\n[grid]\nseed = [1, 2]', "no arm is a command. Leave out metric"),
    ],
)
def test_a_bad_experiments_file_is_refused(text, said, capsys, tmp_path):
    (tmp_path / "experiment.toml").write_text(text)
    assert main(["compare", str(tmp_path / "experiment.toml"), f"--out={tmp_path / 'c'}"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "c").exists()


def test_an_interrupted_one_is_kept_and_its_folder_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slow = "test -e now || { touch began; sleep 100; }; echo t=2"
    words = ["compare", "--command=echo t=1", f"--command={slow}", METRIC, "--rounds=2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "outpace", *words], stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "began").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    (folder,) = (tmp_path / "comparisons").iterdir()
    name = folder.relative_to(tmp_path)
    first, *_, last = [line for line in said.splitlines() if "interrupted" not in line]
    assert "at most 2 rounds, none started after 600 s" in first and str(name) in first
    assert shlex.split(last) == ["outpace", *words, "--out", str(name), "--resume"]
    kept = Comparison.load(folder / "comparison.json")
    assert kept.stopped == "it was interrupted"
    (tmp_path / "now").touch()
    assert main([*shlex.split(last)[1:], "--json"]) == 0
    assert len(Comparison.load(folder / "comparison.json").outcomes) == 4
    assert main([*words, "--resume"]) == 2
    assert "--resume needs a comparison. Give its directory" in capsys.readouterr().err


def test_strategies_on_one_process_are_compared_and_said_to_be_the_same(
    capsys, tmp_path, monkeypatch
):
    def trained(experiment, arm, number, folder):
        return Outcome(arm=arm.name, round=number, value=0.02)

    monkeypatch.setattr("outpace.experiment.arms.run_training", trained)
    words = ["compare", "ddp", "zero3", "--rounds=1", "--data=nowhere", f"--out={tmp_path / 'c'}"]
    assert main(words) == 0  # as outpace train does
    said = capsys.readouterr().err
    assert "ddp, zero3: on one process, all strategies compute the same thing" in said
    assert "Start several processes with --nproc N" in said
    assert "ddp on 1 process, zero3 on 1 process: at most 1 round," in said
    assert "round 1 of at most 1: ddp takes 20.0 ms a step" in said
    assert (
        main(["compare", str(tmp_path / "c" / "comparison.json"), f"--out={tmp_path / 'd'}"]) == 0
    )


def test_one_that_is_interrupted_before_its_first_run_says_how_to_go_on(
    capsys, tmp_path, monkeypatch
):
    def interrupted(settings, heard):
        raise KeyboardInterrupt

    monkeypatch.setattr("outpace.jobs.inputs.inputs.prepare_data", interrupted)
    words = ["compare", "ddp", "zero3", "--nproc=2", f"--out={tmp_path / 'my c'}"]
    for again in ([], ["--resume"]):
        assert main([*words, *again]) == 130
        said = capsys.readouterr().err.splitlines()
        assert shlex.join(["outpace", *words, "--resume"]) in said


def test_help_says_what_its_own_folder_is(capsys):
    assert main(["compare", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "directory for the comparison" in shown and "directory of the run" not in shown
    assert "resume the comparison" in shown and "checkpoint in --out" not in shown


TINY = json.dumps({"family": "gpt2", "layers": 2, "hidden": 32, "heads": 2, "vocab": 300,
                   "max_positions": 32})  # fmt: skip


def by_formula(run):
    """What all ranks of a run send in a step."""
    record = RunRecord.load(run / "run.json")
    sent = (
        step_traffic(record.plan, record.model, global_batch=record.settings.global_batch,
                     seq_len=record.seq_len, rank=rank)
        for rank in range(record.plan.world_size)
    )  # fmt: skip
    return sum(tally.bytes for tally in sent)


@pytest.mark.gloo
def test_strategies_are_compared_by_training_them(capsys, tmp_path, monkeypatch):
    (tmp_path / "tiny.json").write_text(TINY)
    text = tmp_path / "text 😀.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400)
    found = compared(
        capsys, tmp_path, "ddp", "sharded:zero3", f"--model={tmp_path / 'tiny.json'}",
        f"--data={text}", "--nproc=2", "--steps=6", "--global-batch=4",
        "--seq-len=16", "--rounds=1", "--price=2", f"--cache-dir={tmp_path / 'cache'}",
    )  # fmt: skip
    assert [arm.arm for arm in found.arms] == ["ddp", "sharded"]
    assert not [one.failure for one in found.outcomes if one.failure]
    for arm in found.arms:
        assert arm.step_time_s > 0 and arm.tokens_per_s > 0 and arm.peak_memory_bytes > 0
        paid = 2 / 3600 / arm.tokens_per_s * 1e6  # for the host
        assert arm.price_per_million_tokens == pytest.approx(paid) and arm.parts.total_s > 0
        assert 0 < arm.idle_share < 1 and 0 < arm.core_utilisation <= 1
        assert arm.device_utilisation is None  # GPUs that are there compute nothing of it
        (outcome,) = (one for one in found.outcomes if one.arm == arm.arm)
        assert arm.sent_bytes == by_formula(tmp_path / "c" / outcome.run) > 10_000
    assert not found.differing
    assert found.losses.startswith("Losses agree in all steps, as they must")
    run = tmp_path / "c" / found.outcomes[0].run
    assert (run / "metrics.jsonl").is_file() and not (run / "model").exists()
    runs = [str(tmp_path / "c" / one.run) for one in found.outcomes]
    assert main(["compare", "--runs", *runs, "--price=2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "were not interleaved" in shown and "Losses agree in all steps" in shown
    assert "sent per step" in shown and "cores busy" in shown and "GPU busy" not in shown
    assert "in these two runs (with too few steps" in shown and "per M" in shown
    assert main(["compare", *runs[:1], str(tmp_path / "missing")]) == 2
    assert f"there is no folder {tmp_path / 'missing'}" in capsys.readouterr().err
    apart = [word for run in runs for word in ("--runs", run)]
    (stored := compared(capsys, tmp_path, *apart, out="again")).experiment
    assert [one.arm for one in stored.arms] == [Path(run).name for run in runs]
    assert stored.experiment.common["nproc"] == 2  # what trains the same again, and no more
    assert not {"out", "measure_only", "sample_tokens"} & stored.experiment.common.keys()
    monkeypatch.chdir(tmp_path / "c" / "runs")  # the runs are found from anywhere
    names = sorted(path.name for path in (tmp_path / "c" / "runs").iterdir())
    of_runs = compared(capsys, tmp_path, "--runs", *names, out="r")
    assert {one.run for one in of_runs.outcomes} == set(map(str, map(os.path.abspath, names)))
    assert main(["compare", "--runs", *names, "--rounds=3", "--steps=9"]) == 2
    assert "Leave out --rounds, --steps" in capsys.readouterr().err
    assert main(["compare", "--runs", runs[0], str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ddp"], "nothing to compare ddp with: name at least two arms, as in outpace compare"),
        ([], "nothing to compare: name at least two"),
        (
            ["ddp", "zero4"],
            "'zero4' is neither a strategy nor the folder of a run. Did you mean 'zero",
        ),
        (
            ["runs/a", "runs/b"],
            "arm 'runs/a': there is no folder runs/a. Give the folder of a run.",
        ),
        (["ddp", "/"], "arm '/': / holds no run (no run.json)."),
        (["ddp,", "zero3"], "arm 'ddp,': '' is neither a strategy nor the folder of a run."),
        (["exp/a.toml", "ddp"], "or the .toml file of an experiment"),
        (["ddp", "micro_bach=2"], "'micro_bach' is not a setting. Did you mean 'micro_batch'"),
        (["ddp", "precision=fp23"], "'fp23' is not one of"),
        (["ddp", "ddp"], "two arms are called ddp. Give each its own name, as in NAME:SETTINGS"),
        (["single", "ddp,zero3"], "arm 'ddp,zero3' has two values of strategy"),
        (["ddp", "zero3", "--resume", "--out=none"], "there is no comparison in none"),
        (["--command=a", "--command=b"], "commands need a metric"),
        (["--command=", "--command=b", "--metric=(t)"], "--command: name"),
        ([":ddp", "zero3"], "arm ':ddp': name"),
        (["--command=a", "--command=b", "--metric=t="], "has 0 groups"),
        (["--command=a", "--command=b", "--metric=(t="], "is not a regular expression"),
        (["ddp", "--command=b", "--metric=(t)"], "some arms are commands and others are settings"),
        (["missing.toml"], "cannot read missing.toml"),
        (["ddp", "zero3", "--steps=3"], "arm ddp: all 3 steps would be warm-up"),
        (["ddp", "zero3", "--metric=(t)"], "no arm is a command. Leave out metric"),
        (["--command=a", "--command=b", "--metric=(t)", "--steps=9"], "steps would have no effect"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
