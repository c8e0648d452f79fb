"""What a tuning says of its result in a terminal."""

from outpace.records.machine import Device
from outpace.records.tuning import Tuning
from outpace.reporting.answers.tuning import tuning_answer
from outpace.reporting.render.document import Paragraph


def verdict(tuning):
    return " ".join(tuning_answer(tuning).verdict)


def test_a_tuning_of_one_plan_says_that_nothing_was_compared(tuning):
    found = Tuning.load(tuning)
    assert found.compares and "Nothing was compared" not in verdict(found)
    alone = found.model_copy(update={"trials": found.trials[:1], "default": 1, "gain": 0.0})
    assert "Nothing was compared" in verdict(alone) and "--budget" in verdict(alone)


def notes(tuning):
    return " ".join(
        part.text for part in tuning_answer(tuning).parts if isinstance(part, Paragraph)
    )


def test_what_is_not_tuned_is_said(tuning):
    found = Tuning.load(tuning)
    assert "memory: tensors of the fullest process." in notes(found)
    assert "Only speed was tuned, not settings that affect learning (learning rate" in notes(found)
    assert "torch.compile was not tried: on a CPU" in notes(found)
    asked = found.model_copy(update={"settings": {**found.settings, "compile": False}})
    machine = found.machine.model_copy(update={"devices": (Device(name="NVIDIA H200"),)})
    for other in (asked, found.model_copy(update={"machine": machine})):
        assert "torch.compile" not in notes(other)


def test_a_default_that_was_not_measured_is_said_so(tuning):
    found = Tuning.load(tuning).model_copy(update={"default": None, "gain": None})
    assert "The default could not be measured." in verdict(found)
