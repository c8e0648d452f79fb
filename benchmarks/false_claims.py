"""How often `outpace compare` claims a nonexistent difference, and finds an existing one.

    python benchmarks/false_claims.py [--count 200] [--rounds 30]

Two commands that do the same real work are compared repeatedly by `experiment.compare` and
`run_command`, as `outpace compare --command … --command …` does: in separate processes, in a random
order, with a new seed each time. After every round, the benchmark checks whether a difference is
claimed; one claim at any time makes the comparison a false one. Then as many comparisons follow in
which the second command does 5 % or 10 % more work, half of them each.
"""

import argparse
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recording import save

from outpace.experiment.arms import run_command
from outpace.experiment.compare import ALPHA, compare, verdicts
from outpace.records.comparison import Arm, Experiment, Outcome, Verdict

COUNT, ROUNDS = 200, 30
# Largest share of false A/A comparisons that is allowed.
MOST_FALSE = 5 / 200
MORE = (0.05, 0.10)
# Matrix products: about 15 ms of work, in a process that takes about as long to start.
_PRODUCTS = 200_000
_METRIC = "took ([0-9.]+) s"
_WORK = (
    "import time; x = 1.0; began = time.perf_counter()\n"
    "for number in range({products}): x = x * 0.999 + number\n"
    "print(f'took {{time.perf_counter() - began:.6f}} s')"
)


def command(products: int) -> str:
    """Return a command that runs a small process, which times its own work."""
    return shlex.join([sys.executable, "-I", "-S", "-c", _WORK.format(products=products)])


def compared(more: float, rounds: int) -> dict[str, Any]:
    """Run one comparison; the second command does more work by the fraction `more`."""
    arms = tuple(
        Arm(name=name, command=command(round(_PRODUCTS * factor)))
        for name, factor in (("a", 1.0), ("b", 1.0 + more))
    )
    seed = secrets.randbits(31)
    experiment = Experiment(arms=arms, metric=_METRIC, rounds=rounds, budget_s=1e6, seed=seed)
    claimed_at: list[int] = []

    def told(outcome: Outcome, found: Mapping[str, Verdict]) -> None:
        if found["b"].claimed:
            claimed_at.append(outcome.round + 1)

    with tempfile.TemporaryDirectory() as folder:
        ended = compare(experiment, Path(folder), run_command, told=told)
    failures = [one.failure for one in ended.outcomes if one.value is None]
    assert not failures, failures[0]
    verdict = verdicts(experiment, ended.outcomes)["b"]
    return {
        "more": more,
        "seed": seed,
        "rounds": verdict.rounds,
        "claimed_at": claimed_at[0] if claimed_at else None,
        "claimed_slower": verdict.slower is True,
        "slowdown": verdict.slowdown,
        "low": verdict.low,
        "high": verdict.high,
        "stopped": ended.stopped,
        "seconds": {
            arm.name: [one.value for one in ended.outcomes if one.arm == arm.name] for arm in arms
        },
    }


def summed(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the claims, and the intervals that contain the true difference."""
    more = found[0]["more"]
    claims = [one["claimed_at"] for one in found if one["claimed_at"] is not None]
    bounded = [one for one in found if None not in (one["low"], one["high"])]
    return {
        "more": more,
        "comparisons": len(found),
        "claims": len(claims),
        "right_way": sum(one["claimed_slower"] for one in found),
        "rounds_to_claim": sorted(claims),
        "covered": sum(one["low"] <= more <= one["high"] for one in bounded),
        "bounded": len(bounded),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=COUNT, help="A/A comparisons, and others")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at most, of a comparison")
    arguments = parser.parse_args()
    count, began_s = arguments.count, time.monotonic()
    # These run in turn, so that drift of the machine affects all kinds equally.
    kinds = [0.0, MORE[0], 0.0, MORE[1]]
    found = []
    for number in range(2 * count):
        found.append(compared(kinds[number % len(kinds)], arguments.rounds))
        told = found[-1]["claimed_at"]
        words = "no claim" if told is None else f"claimed after {told} rounds"
        print(
            f"{number + 1}/{2 * count}: {100 * found[-1]['more']:.0f} % more: {words}", flush=True
        )
    alike = [[one for one in found if one["more"] == more] for more in (0.0, *MORE)]
    summaries = [summed(some) for some in alike if some]
    false = summaries[0]["claims"]
    result = {
        "alpha": ALPHA,
        "rounds": arguments.rounds,
        "most_false": MOST_FALSE * count,
        "reached": false <= MOST_FALSE * count,
        "kinds": summaries,
        "took_s": time.monotonic() - began_s,
        "comparisons": found,
    }
    print(f"{false} false claims in {count}: {result['reached']}", save("false_claims", result))


if __name__ == "__main__":
    main()
