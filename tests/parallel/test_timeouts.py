"""A rank that hangs ends the others' waiting within --comm-timeout-s, in whatever group."""

from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("timeouts_ranks.py")


@pytest.mark.gloo
@pytest.mark.parametrize(
    "strategy",
    ["3d", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ring", "1f1b", "hsdp"))],
)
def test_every_group_waits_as_the_default_one_does(strategy, on_ranks):
    waits = on_ranks(4, RANKS, strategy)
    assert waits and set(waits) == {60.0}
