"""Test of whether outpace is still as fast relative to a plain loop as recorded.

    python benchmarks/guard.py            # a few minutes; exit code 1 if speed was lost
    python benchmarks/guard.py --case c   # one case

This runs a short form of `peers/race.py`: outpace and the plain loop, in turn, in the current
environment, and compares the ratio of their steps with the recorded one. A ratio changes less than
times do between machines, and not at all by what slows both. Speed counts as lost if the ratio is
lower than the recorded one by more than its own noise and 3 %.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import cases  # noqa: E402
import entrants  # noqa: E402
import race  # noqa: E402

YARDSTICK = "plain loop"
ROUNDS, COUNTED, LEAST = 3, 8, 0.03


def ratios(row: dict[str, Any]) -> list[float]:
    """Return the plain loop's median step relative to outpace's, for each round."""
    rounds = []
    pairs = zip(
        row["entrants"][YARDSTICK]["runs"], row["entrants"][entrants.OURS]["runs"], strict=True
    )
    for theirs, ours in pairs:
        each = [statistics.median(race.step_times_s(one["steps_s"])) for one in (theirs, ours)]
        rounds.append(each[0] / each[1])
    return rounds


def judged(now: list[float], recorded: list[float]) -> tuple[bool, str]:
    """Return whether speed was kept, and the evidence."""
    ratio, before = statistics.median(now), statistics.median(recorded)
    noise = (max(now) - min(now) + max(recorded) - min(recorded)) / 2
    kept = ratio >= before * (1 - LEAST) - noise
    words = f"{ratio:.3f} × the plain loop's speed, recorded {before:.3f} (noise {noise:.3f})"
    return kept, words


def _this_python(name: str, folder: Path) -> Path:
    """Return this interpreter, since a plain loop needs only what outpace needs."""
    return Path(sys.executable)


def main() -> int:
    """Compare the recorded cases on one process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=cases.CASES, help=cases.MEANING)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "outpace-peers")
    parser.add_argument("--precision", choices=race.PRECISIONS, help="else what is faster here")
    arguments = parser.parse_args()
    precision = arguments.precision or race.faster_precision(arguments.folder)
    known = race.recorded("peers", precision)
    plain = [peer for peer in entrants.PEERS[""] if peer.name == YARDSTICK]
    lost = 0
    for name, case in cases.CASES.items():
        heat = race.Heat(case, 1)
        if arguments.case not in (None, name) or heat.name not in known:
            continue
        row = race.run(heat, arguments.folder, precision, COUNTED, ROUNDS, plain, _this_python)
        now = ratios(row)
        kept, words = judged(now, ratios(known[heat.name]))
        lost += not kept
        print(f"{heat.name}: {words}: {'kept' if kept else 'LOST'}", flush=True)
    if not known:
        print(f"no race in {precision} is recorded: python benchmarks/peers/race.py first")
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
