"""What a tuning says of its result in a terminal."""

from outpace.records.tuning import Tuning
from outpace.reporting.answers.tuning import tuning_answer


def verdict(tuning):
    return " ".join(tuning_answer(tuning).verdict)


def test_a_tuning_of_one_plan_says_that_nothing_was_compared(tuning):
    found = Tuning.load(tuning)
    assert found.compares and "Nothing was compared" not in verdict(found)
    alone = found.model_copy(update={"trials": found.trials[:1], "default": 1, "gain": 0.0})
    assert "Nothing was compared" in verdict(alone) and "--budget" in verdict(alone)


def test_a_default_that_was_not_measured_is_said_so(tuning):
    found = Tuning.load(tuning).model_copy(update={"default": None, "gain": None})
    assert "The default could not be measured." in verdict(found)
