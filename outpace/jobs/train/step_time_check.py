"""A warning during a run if its first steps take longer than expected."""

from collections.abc import Sequence

from outpace.records.measurement import StepRecord
from outpace.training.accounting import OPENING_STEPS, Ledger
from outpace.training.callbacks import Callback, notify


class StepTimeMonitor(Callback):
    """Compares the first step times with the plan's, once enough steps are done."""

    def __init__(self, ledger: Ledger, expected_s: float, heard: Sequence[Callback]) -> None:
        self._ledger, self._expected_s, self._heard = ledger, expected_s, heard
        self._looked = False

    def on_step(self, record: StepRecord) -> None:
        """Check the first steps, once there are enough."""
        if self._looked or len(self._ledger.opening_s) < OPENING_STEPS:
            return
        self._looked = True
        found = self._ledger.check_step_time(self._expected_s)
        if found is not None and found.slower:
            notify(
                self._heard,
                "on_hint",
                f"{found.words}: the machine may be busy with something else, or another plan may "
                "be faster. Tune again with outpace tune",
            )
