"""What a run says of its first steps, beside what was expected of them."""

import pytest

from outpace.jobs.train.step_time_check import StepTimeMonitor
from outpace.records.measurement import StepTimeCheck
from outpace.training.accounting import OPENING_STEPS, Costs, Ledger
from outpace.training.callbacks import Callback


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
    StepTimeMonitor(ledger, expected_s, [heard]).on_step(None)  # type: ignore[arg-type]
    return heard.hints


def test_only_slower_steps_are_a_hint() -> None:
    assert hints(0.47, 0.53) == []
    assert hints(0.53, 0.53) == []
    (told,) = hints(0.60, 0.53)
    assert "600.0 ms (median); 530.0 ms was expected (+13.2%)" in told and "outpace tune" in told


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


@pytest.mark.parametrize(
    ("mean_s", "verdict", "told"),
    [
        (1.19, "Slower than expected", "1.19 s on average; 480.0 ms was expected (+147.9%)"),
        (0.4900, "As expected", "490.0 ms on average; 480.0 ms was expected (+2.1%)"),
        (0.4500, "Faster than expected", "441.0 ms (median); 480.0 ms was expected (-8.1%)"),
    ],
)
def test_a_mean_far_above_the_median_is_what_is_compared(
    mean_s: float, verdict: str, told: str
) -> None:
    ledger = Ledger(Costs(1, 1, None, None, None), tokens=0, samples=0)
    ledger.opening_s.extend([0.441] * 45 + [(67 * mean_s - 45 * 0.441) / 22] * 22)
    found = ledger.check_step_time(0.480)
    assert found is not None
    assert found.verdict == verdict
    assert told in found.words
    assert "441.0 ms (median)" in found.words
    assert ("delayed" in found.words) == (mean_s > 0.485)
