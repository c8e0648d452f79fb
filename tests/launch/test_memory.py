"""What `outpace memory` makes of settings that training would settle on its way."""

import pytest

from outpace.launch.memory import question
from outpace.records.errors import BadInputError
from outpace.records.settings import TrainSettings

DEFAULTS = dict.fromkeys(TrainSettings.model_fields, "default")


def test_the_optimizer_in_backward_has_one_micro_batch():
    asked = question(
        TrainSettings(optimizer_in_backward=True, clip=0, nproc=2, strategy="zero3"),
        DEFAULTS,
        None,
        1,
    )
    assert asked.accumulation == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"micro_batch": "auto"}, "Give a number of samples"),
        ({"memory_budget": "8GiB"}, "Say what is recomputed"),
        ({"task": "classify"}, "which a classifier has not"),
    ],
)
def test_what_training_finds_or_has_no_trace_is_refused(values, said):
    with pytest.raises(BadInputError, match=said):
        question(TrainSettings.parse(values, "test"), DEFAULTS, None, 1)
