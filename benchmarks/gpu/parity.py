"""Losses on the GPU compared with a CPU's, of two runs, and of one interrupted and resumed."""

import os
import signal
from functools import partial
from typing import Any

from gpu.check import Check
from gpu.training import train_little
from outpace.records.errors import InterruptedRunError
from outpace.records.measurement import StepRecord
from outpace.training.callbacks import Callback


class StopAfterThree(Callback):
    """Interrupts the run as a batch system would."""

    def on_step(self, record: StepRecord) -> None:
        """Interrupt after the third step."""
        if record.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def parity(check: Check) -> None:
    """Check deterministic runs first, as cuBLAS allocates its workspace once per process."""
    for deterministic in (True, False):
        name = "two runs and one resumed" + (", deterministic" if deterministic else "")
        check.row(name, 10.0, partial(_repeated, check, deterministic))
    if check.cuda:
        check.row("fp32, GPU and CPU", 10.0, lambda: _beside_a_cpu(check))


def _beside_a_cpu(check: Check) -> dict[str, Any]:
    losses = {
        device: train_little(
            check,
            f"fp32 {device}",
            device=device,
            precision="fp32",
            compile=False,
            steps=4,
            global_batch=4,
        ).losses
        for device in ("cpu", check.device)
    }
    return {"losses": losses, "off": _off(losses["cpu"], losses[check.device])}


def _repeated(check: Check, deterministic: bool) -> dict[str, Any]:
    """Compare two runs at a length of several key blocks, whose sums may be reordered.

    Steps are in flight while earlier ones are reported, so step 3's signal arrives some steps
    later.
    """
    settings = {"measure_only": False, "steps": 10, "precision": "bf16", "compile": False,
                "seq_len": 64 if check.small else 512, "deterministic": deterministic}  # fmt: skip
    whole = train_little(check, f"whole {deterministic}", **settings).losses
    again = train_little(check, f"again {deterministic}", **settings).losses
    ended = None
    cut = f"cut {deterministic}"
    try:
        train_little(check, cut, [StopAfterThree()], **settings)
    except InterruptedRunError as error:
        ended = type(error).__name__
    resumed = train_little(check, cut, resume=True, **settings).losses
    return {"ended_by": ended, "again_equal": again == whole, "again_off": _off(whole, again),
            "resumed_equal": resumed == whole, "resumed_off": _off(whole, resumed)}  # fmt: skip


def _off(losses: list[float], others: list[float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(losses, others, strict=True))
