"""What a tuning says of its result in a terminal."""

from outpace.records.tuning import Tuning
from outpace.reporting.documents.tuning import tuning_document
from outpace.reporting.terminal.tuning import verdict_line


def test_a_tuning_of_one_plan_says_that_nothing_was_compared(tuning):
    found = Tuning.load(tuning)
    assert found.compares and "Nothing was compared" not in verdict_line(found)
    alone = found.model_copy(update={"trials": found.trials[:1], "default": 1, "gain": 0.0})
    assert "Nothing was compared" in verdict_line(alone) and "--budget" in verdict_line(alone)
    assert any("Nothing was compared" in str(one) for one in tuning_document(alone).verdict)
