"""Whether outpace is still as fast beside a plain loop as it was recorded to be.

    python benchmarks/guard.py            # a few minutes; exit code 1 where speed was lost
    python benchmarks/guard.py --case c   # one case

Runs a short form of `peers/race.py`: outpace and the plain loop, in turn, in the environment at
hand, and compares the ratio of their steps with the one that is recorded. A ratio changes less than
times do from machine to machine, and not at all by what slows both. Speed counts as lost where the
ratio is lower than the recorded one by more than its own noise and 3 %.
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
    """Of each round, the plain loop's median step over outpace's."""
    rounds = []
    pairs = zip(
        row["entrants"][YARDSTICK]["runs"], row["entrants"][entrants.OURS]["runs"], strict=True
    )
    for theirs, ours in pairs:
        each = [statistics.median(race.step_times_s(one["steps_s"])) for one in (theirs, ours)]
        rounds.append(each[0] / each[1])
    return rounds


def judged(now: list[float], recorded: list[float]) -> tuple[bool, str]:
    """Whether speed was kept, and how that is seen."""
    ratio, before = statistics.median(now), statistics.median(recorded)
    noise = (max(now) - min(now) + max(recorded) - min(recorded)) / 2
    kept = ratio >= before * (1 - LEAST) - noise
    words = f"{ratio:.3f} × the plain loop's speed, recorded {before:.3f} (noise {noise:.3f})"
    return kept, words


def _this_python(name: str, folder: Path) -> Path:
    """A plain loop needs what outpace needs."""
    return Path(sys.executable)


def main() -> int:
    """Compare the cases on one process that are recorded."""
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
