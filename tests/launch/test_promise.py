"""What a run says of its first steps, beside what was expected of them."""

import pytest

from outpace.launch.promise import Promised
from outpace.records.measurement import StepTimeCheck
from outpace.train.accounting import OPENING_STEPS, Costs, Ledger
from outpace.train.callbacks import Callback


class Heard(Callback):
    """Keeps hints."""

    def __init__(self) -> None:
        self.hints: list[str] = []

    def on_hint(self, text: str) -> None:
        """Keep it."""
        self.hints.append(text)


def hints(took_s: float, expected_s: float) -> list[str]:
    """What is told after enough steps of `took_s`."""
    heard = Heard()
    ledger = Ledger(Costs(1, 1, None, None, None), tokens=0, samples=0)
    ledger.opening_s.extend([took_s] * OPENING_STEPS)
    Promised(ledger, expected_s, [heard]).on_step(None)  # type: ignore[arg-type]
    return heard.hints


def test_only_slower_steps_are_a_hint() -> None:
    assert hints(0.47, 0.53) == []
    assert hints(0.53, 0.53) == []
    (told,) = hints(0.60, 0.53)
    assert "600.0 ms where 530.0 ms was expected (+13.2%)" in told and "outpace tune" in told


@pytest.mark.parametrize(
    ("took_s", "kept", "verdict"),
    [
        (0.47, False, "Faster than expected"),
        (0.53, True, "As expected"),
        (0.60, False, "Slower than expected"),
    ],
)
def test_a_verdict_says_which_way(took_s: float, kept: bool, verdict: str) -> None:
    found = StepTimeCheck(expected_s=0.53, step_time_s=took_s, steps=100, kept=kept)
    assert found.verdict == verdict
    assert found.slower == (verdict == "Slower than expected")
