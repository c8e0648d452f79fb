"""Test of whether a repeated probe confirms the intervals of the first one.

    python benchmarks/probe_repeat.py            # full probes, about 20 minutes
    python benchmarks/probe_repeat.py --quick    # quick ones, about 2

This runs two complete probes, one after the other, each in a separate process. A figure is
confirmed if the second probe's value is in the first one's interval. At least 95 % must be
confirmed, and the median half-width must be at most 3 % of the value. Figures that either probe did
not give, because the machine was not steady, are counted and named.
"""

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from recording import save

from outpace.records.figure import Figure
from outpace.records.machine import Machine
from outpace.records.probe_results import ProbeRecord
from outpace.reporting.terminal.probe import show_machine

HELD, HALF_WIDTH = 0.95, 0.03
WITHIN_S = {True: 60.0, False: 600.0}


def probe(folder: Path, number: int, quick: bool) -> Machine:
    """Probe everything in a new process."""
    out = folder / f"machine-{number}.json"
    command = [sys.executable, "-m", "outpace", "probe", "--out", str(out)]
    subprocess.run(command + ["--quick"] * quick, check=True, stdout=subprocess.DEVNULL)
    return Machine.load(out)


def pairs(first: ProbeRecord, second: ProbeRecord) -> list[dict[str, Any]]:
    """Return each figure of both probes."""
    again = {figure.key: figure for figure in second.all_figures()}
    return [_pair(figure, again[figure.key]) for figure in first.all_figures()
            if figure.origin == "measured" and figure.key in again]  # fmt: skip


def _pair(one: Figure, other: Figure) -> dict[str, Any]:
    return {
        "figure": str(one.key), "unit": one.unit, "first": one.value, "low": one.low,
        "high": one.high, "second": other.value, "held": one.contains(other),
        "half_width": one.half_width, "unstable": one.unstable or other.unstable,
        # The median of each round: all samples would make the record ten times as long.
        "rounds": [
            [float(f"{median(samples):.4g}") for samples in figure.rounds]
            for figure in (one, other)
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        machines = [probe(Path(folder), number, quick) for number in (1, 2)]
    first, second = (machine.probed for machine in machines)
    assert first is not None
    assert second is not None
    compared = pairs(first, second)
    told = [pair["held"] for pair in compared if pair["held"] is not None]
    widths = [pair["half_width"] for pair in compared if pair["half_width"] is not None]
    held, width = sum(told) / len(told), median(widths)
    took_s = [probed.took_s for probed in (first, second)]
    result = {
        "quick": quick,
        "figures": len(compared),
        "compared": len(told),
        "held": held,
        "median_half_width": width,
        "unstable": len(compared) - len(told),
        "unstable_by_kind": Counter(
            pair["figure"].split()[0] for pair in compared if pair["held"] is None
        ),
        "took_s": took_s,
        "within_s": WITHIN_S[quick],
        "steadiness": [probed.steadiness.model_dump(mode="json") for probed in (first, second)],
        "targets": {"held": HELD, "median_half_width": HALF_WIDTH},
        "reached": held >= HELD and width <= HALF_WIDTH and max(took_s) <= WITHIN_S[quick],
        "shown": shown(machines[0]),
        "pairs": compared,
    }
    print(f"held {held:.1%}, half-width {width:.1%}, {took_s}")
    print(save("probe_repeat_quick" if quick else "probe_repeat", result))


def shown(machine: Machine) -> list[str]:
    """Return the output for a terminal of 100 columns."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        show_machine(machine, None, width=100)
    return [line.rstrip() for line in text.getvalue().splitlines()]


if __name__ == "__main__":
    main()
