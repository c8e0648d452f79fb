"""When a comparison ends, and what it goes on with, without running anything."""

from outpace.experiment.compare import compare, whole_rounds
from outpace.records.comparison import Arm, Experiment, Outcome

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
