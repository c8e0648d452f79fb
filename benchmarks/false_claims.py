"""How often `outpace compare` claims a difference where there is none, and finds one that there is.

    python benchmarks/false_claims.py [--count 200] [--rounds 30]

Two commands that do the same real work are compared, anew and anew, by `experiment.compare` and
`run_command`, as `outpace compare --command … --command …` does: processes of their own, in an
order that is drawn, from another seed each time. After every round it is looked whether a
difference is claimed, and one claim at any time makes a comparison a false one. Then as many
comparisons of commands of which the second does 5 % or 10 % more, half of them each.
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
# Of A/A comparisons; what is promised of 200.
MOST_FALSE = 5 / 200
MORE = (0.05, 0.10)
# Products of floats: some 15 ms, of a process that starts within as much again.
_PRODUCTS = 200_000
_METRIC = "took ([0-9.]+) s"
_WORK = (
    "import time; x = 1.0; began = time.perf_counter()\n"
    "for number in range({products}): x = x * 0.999 + number\n"
    "print(f'took {{time.perf_counter() - began:.6f}} s')"
)


def command(products: int) -> str:
    """A small process that times its own work."""
    return shlex.join([sys.executable, "-I", "-S", "-c", _WORK.format(products=products)])


def compared(more: float, rounds: int) -> dict[str, Any]:
    """One comparison; the second command does `more` of the work more."""
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
    """How many claims, and how many intervals hold the true difference, of comparisons alike."""
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
    # In turn, so that what drifts on the machine falls on all kinds alike.
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
