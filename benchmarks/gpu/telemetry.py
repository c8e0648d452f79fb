"""Clocks, power and temperature of the GPU during a section, as nvidia-smi reports them."""

import shutil
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

_EVERY_MS = 500
# nvidia-smi --help-query-gpu
_COLUMNS = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "utilisation_percent": "utilization.gpu",
}


class Telemetry:
    """An nvidia-smi process that writes a line twice per second, if it is installed."""

    def __init__(self, path: Path) -> None:
        self._path, self._process = path, None
        self._read_bytes = 0
        if shutil.which("nvidia-smi"):
            path.touch()
            words = ["nvidia-smi", f"--query-gpu={','.join(_COLUMNS.values())}", "--id=0",
                     "--format=csv,noheader,nounits", f"--loop-ms={_EVERY_MS}",
                     f"--filename={path}"]  # fmt: skip
            self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL)

    def since(self) -> dict[str, Any] | None:
        """Return each quantity's lowest, median and highest value since the last call."""
        if self._process is None:
            return None
        text = self._path.read_text()
        lines, self._read_bytes = text[self._read_bytes :].splitlines(), len(text)
        rows = [cells for line in lines if len(cells := line.split(",")) == len(_COLUMNS)]
        told = {}
        for name, column in zip(_COLUMNS, zip(*rows, strict=True), strict=False):
            values = [float(cell) for cell in column if _is_number(cell)]
            if values:
                told[name] = [min(values), median(values), max(values)]
        return told

    def close(self) -> None:
        """End nvidia-smi."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _is_number(cell: str) -> bool:
    return cell.strip().replace(".", "", 1).isdigit()
