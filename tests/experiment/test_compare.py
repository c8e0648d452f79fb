"""When a comparison ends, and what it goes on with, without running anything."""

import pytest

from outpace.catalog.accelerators import find_accelerator
from outpace.experiment.compare import compare, whole_rounds
from outpace.experiment.results import steps_of
from outpace.experiment.sequential import verdict
from outpace.probing.hardware.machine import identify
from outpace.records.comparison import Arm, ArmResult, Comparison, Experiment, Outcome
from outpace.records.errors import BadInputError
from outpace.reporting.answers.comparison import verdict_lines

ARMS = tuple(Arm(name=name) for name in "abc")


def experiment(**changed):
    return Experiment(arms=ARMS, **changed)


def outcome(arm, number, value=1.0, took_s=10.0):
    return Outcome(arm=arm, round=number, value=value, took_s=took_s)


def runner(values):
    def run(experiment, arm, number, folder):
        return outcome(arm.name, number, values[arm.name])

    return run


def test_arms_that_are_out_are_waited_for_no_more(tmp_path):
    ended = compare(experiment(), tmp_path, runner({"a": 1.0, "b": 1.1, "c": None}))
    assert ended.stopped == "the verdict is clear"
    assert sum(one.arm == "c" for one in ended.outcomes) == 2


def test_what_was_spent_before_counts(tmp_path):
    before = [outcome(arm, 0) for arm in "abc"]
    for budget_s, stopped in ((30.0, "the budget of 30 s is spent"), (31.0, "all 2 rounds")):
        asked = experiment(budget_s=budget_s, rounds=2)
        ended = compare(asked, tmp_path, runner(dict.fromkeys("abc", 1.0)), before, clock=lambda: 0)
        assert ended.stopped.startswith(stopped)


def test_a_round_without_who_was_left_out_is_whole():
    failed = [outcome("c", number, None) for number in (0, 1)]
    whole = [*failed, *(outcome(arm, number) for number in range(3) for arm in "ab")]
    assert whole_rounds(experiment(), whole) == whole
    assert whole_rounds(experiment(), whole[:-1]) == whole[:-2]
    assert whole_rounds(experiment(), []) == []


def test_a_claim_whose_median_has_turned_since_is_not_told_with_a_negative_size():
    ratios = [1.1] * 12 + [0.95] * 14
    found = verdict(ratios, [1.0] * len(ratios), 0.01, 0.95, True)
    assert found.claimed and found.slower and found.slowdown < 0
    words = found.words("b", "a")
    assert "slower than a in most rounds at the time of the claim" in words
    told = "the median is now -5.0 %"
    assert told in words and "is -" not in words and "now -" not in words.replace(told, "")


def test_arms_that_failed_after_a_figure_are_told_with_why(tmp_path):
    outcomes = [outcome(arm, number) for number in range(2) for arm in "abc"]
    outcomes += [Outcome(arm="c", round=n, value=None, failure="no memory") for n in (2, 3)]
    machine = identify(find_accelerator)
    comparison = Comparison(
        experiment=experiment(), command=(), outcomes=tuple(outcomes), stopped="s", took_s=1.0,
        arms=tuple(ArmResult(arm=arm) for arm in "abc"), machine=machine, started="now",
    )  # fmt: skip
    assert "c was dropped after a few rounds: no memory" in verdict_lines(comparison)


def test_a_step_that_is_damaged_in_the_midst_is_refused_and_a_cut_last_one_left_out(tmp_path):
    step = '{"step_time_s": 1.0, "samples": 2, "loss": 3.0}\n'
    (tmp_path / "metrics.jsonl").write_text(step * 3 + step[:10])
    assert len(steps_of(tmp_path)) == 3
    (tmp_path / "metrics.jsonl").write_text(step + step[:10] + "\n" + step)
    with pytest.raises(BadInputError, match="line 2, is not a JSON object"):
        steps_of(tmp_path)
