"""With dropout a strategy cannot equal one process, but laws hold."""

from pathlib import Path

import pytest

DROPOUT = Path(__file__).with_name("dropout.py")


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("arguments", "masks_alike"),
    [
        (["ddp"], False),  # of other samples
        # Of other parts of the sequence.
        pytest.param(["tp"], False, marks=pytest.mark.slow),
        # Of the same hidden states.
        pytest.param(["tp", "whole"], True, marks=pytest.mark.slow),
        pytest.param(["cp"], False, marks=pytest.mark.slow),
        # Each block is on one rank.
        pytest.param(["gpipe"], None, marks=pytest.mark.slow),
    ],
    ids=["ddp", "tp", "tp whole", "cp", "gpipe"],
)
def test_dropout_draws_as_it_should(arguments, masks_alike, on_ranks):
    for said in on_ranks(2, DROPOUT, *arguments):
        assert said["same_again"] and said["other_draws"]
        assert said["recomputed_apart"] < 1e-12
        assert said["masks_alike"] is masks_alike
        # The mean loss over 64 draws is that of one process over as many of its own.
        assert said["off_by_standard_errors"] < 4
