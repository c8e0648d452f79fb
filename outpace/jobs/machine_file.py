"""The probe file in the current directory, if it describes this machine."""

from pathlib import Path

import torch

from outpace.records.machine import Machine
from outpace.records.training_log import is_corrected

PROBE_FILE = Path("machine.json")  # written by outpace probe


def has_probe_file() -> bool:
    """Return whether the current directory has a file from outpace probe (not calibrate)."""
    return PROBE_FILE.is_file() and not is_corrected(PROBE_FILE)


def find_probe(machine: Machine) -> Machine | None:
    """Return outpace probe's measurements of this machine, or None if its file is not here.

    A file without matmuls (`outpace probe memory`) is ignored, since plans need their rates.
    """
    if not has_probe_file():
        return None
    found = Machine.load(PROBE_FILE)
    if found.probed is None or machine.differences(found):
        return None
    has_matmuls = any(figure.key.kind == "matmul" for figure in found.probed.figures)
    return found if has_matmuls else None


def used_machine(machine: Machine, device: torch.device) -> Machine:
    """Return the machine, without accelerators if training runs on the CPU."""
    return machine.model_copy(update={"devices": ()}) if device.type == "cpu" else machine
