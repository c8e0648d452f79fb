"""outpace next to the fastest peers of its heat, in turn, for ratios on a noisy machine.

    python benchmarks/peers/finals.py                    # all recorded heats
    python benchmarks/peers/finals.py --case b --processes 2     # one of them again

In a heat of the peer benchmarks, runs are minutes apart, and a virtual machine's speed changes
within minutes. Here, all runs to compare are in memory together and take turns of a few steps,
suspended and continued by signals, in a different order each turn, so changes of the machine affect
all equally. The step in which a run was suspended is not counted.

steps: outpace and the best peers of the heat, two if memory allows; for two processes, also
    outpace on one. Ratios are those of each turn's median steps.
first steps: outpace and Trainer, from command to the first step's line, several times in turn.
best matmul: on one process, before each turn, for the share of it that outpace reaches.
Records results/finals-bf16.json (or -fp32, like race.py), heat by heat.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import cases  # noqa: E402
import entrants  # noqa: E402
import environments  # noqa: E402
import race  # noqa: E402
import watching  # noqa: E402
from recording import circumstances, save  # noqa: E402

from outpace.experiment.processes import ProcessTree  # noqa: E402

TURNS, TURN_STEPS, STARTS = 6, 4, 3
PEERS = 2  # maximum number of peers
ROOM = 0.85  # share of the machine's memory, for all together
ALONE = f"{entrants.OURS} on one process"
RIVAL = "Trainer"  # the peer whose first step is compared with outpace's
SPARE = 3  # uncounted steps of a turn: suspended, or seen late
LIMIT_S, LOOK_S = 900.0, 0.01
# A collective waits while others have their turns.
PATIENT = ("--comm-timeout-s", "3600")
Line = tuple[list[str], Path]  # the command, and the file of its steps' lines


@dataclass(frozen=True)
class InTurn:
    """A training run that is suspended except in its turns."""

    name: str
    running: ProcessTree
    log: Path

    def go(self, steps: int) -> list[float]:
        """Continue the run; return its next steps' seconds, without those of the suspended step.

        Raises SystemExit if the run ends or takes too long.
        """
        had, began_s = self._steps(), time.monotonic()
        ends_s: list[float] = []
        self.running.unpause()
        while len(ends_s) <= steps:
            now_s = time.monotonic()
            ends_s += [now_s] * (self._steps() - had - len(ends_s))
            if self.running.exit_code is not None or now_s - began_s > LIMIT_S:
                raise SystemExit(f"{self.name} did not go on: {self.running.end()[-2000:]}")
            time.sleep(LOOK_S)
        self.running.pause()
        return [after - before for before, after in itertools.pairwise(ends_s)][:steps]

    def _steps(self) -> int:
        return self.log.read_bytes().count(b"\n") if self.log.is_file() else 0


@contextmanager
def _warm(name: str, line: Line) -> Iterator[InTurn]:
    """Run alone until warm; on exit, nothing is left of the run."""
    words, log = line
    running = ProcessTree(words, entrants.ENVIRONMENT)
    try:
        one = InTurn(name, running, log)
        one.go(race.WARMUP - 1)
        yield one
    finally:
        running.end()


def finalists(recorded: Mapping[str, Any], memory_bytes: int, more_bytes: int = 0) -> list[str]:
    """Return the fastest peers, as many as fit in memory with outpace, at least one.

    `more_bytes`: memory of other runs at the same time.
    """
    ran = {name: one for name, one in recorded["entrants"].items() if one.get("same_losses")}
    sizes = {name: one["rank_bytes"] * recorded["processes"] for name, one in ran.items()}
    left = ROOM * memory_bytes - sizes.pop(entrants.OURS, 0) - more_bytes
    found: list[str] = []
    for name in sorted(sizes, key=lambda one: -float(ran[one]["tokens_per_s"]))[:PEERS]:
        left -= sizes[name]
        if not found or left >= 0:
            found.append(name)
    return found


def take_turns(
    lines: Mapping[str, Line], turns: int, steps: int, before: Callable[[], None]
) -> tuple[dict[str, list[list[float]]], dict[str, list[float]]]:
    """Return the seconds of each counted step, by turn, and all losses. `before` runs each turn."""
    took: dict[str, list[list[float]]] = {name: [] for name in lines}
    with ExitStack() as stack:
        started = [stack.enter_context(_warm(*line)) for line in lines.items()]
        for turn in range(turns):
            before()
            for place in range(len(started)):
                one = started[(turn + place) % len(started)]
                took[one.name].append(one.go(steps))
        losses = {one.name: watching.losses_of(one.log) for one in started}
    return took, losses


def first_steps_s(lines: Mapping[str, Line], folder: Path, times: int) -> dict[str, list[float]]:
    """Return the seconds from command to the first step's line, in turn."""
    found: dict[str, list[float]] = {name: [] for name in lines}
    for number in range(times):
        for name in sorted(lines, reverse=bool(number % 2)):
            race.clear(folder)
            words, log = lines[name]
            seen = watching.watch(words, log, entrants.ENVIRONMENT, LIMIT_S)
            if not seen.steps_s:
                raise SystemExit(f"{name} took no step: {seen.said[-2000:]}")
            found[name].append(seen.steps_s[0])
    return found


def final(
    heat: race.Heat,
    recorded: Mapping[str, Any],
    folder: Path,
    python_of: Callable[[str, Path], Path] = environments.python_of,
    single: Mapping[str, Any] | None = None,
    turns: int = TURNS,
    steps: int = TURN_STEPS,
) -> dict[str, Any]:
    """Run the final of a recorded heat; `single`: the record of the same case on one process."""
    alone = single if heat.processes > 1 and not heat.kind else None
    beside_bytes = 0 if alone is None else alone["entrants"][entrants.OURS]["rank_bytes"]
    names = finalists(recorded, psutil.virtual_memory().total, beside_bytes)
    count = race.WARMUP + turns * (steps + SPARE)
    place = folder / "cases" / f"{heat.case.name}-{recorded['precision']}-{count}"
    cases.write(heat.case, place, count, recorded["precision"])
    matmuls: list[float | None] = []

    def lines_of(heat: race.Heat, names: Sequence[str], count: int) -> dict[str, Line]:
        peers = [peer for peer in entrants.PEERS[heat.kind] if peer.name in names]
        lines = race.commands(heat, folder, place, count, peers, python_of)
        words, log = lines[entrants.OURS]
        return {**lines, entrants.OURS: ([*words, *PATIENT], log)}

    def measure_matmul() -> None:
        if heat.processes == 1 and not heat.case.labelled:
            best = race.best_products_flops_per_s(folder)
            matmuls.append(best.get(recorded["precision"]))

    first_s = first_steps_s(lines_of(heat, [RIVAL], 1), folder, STARTS)
    lines = lines_of(heat, names, count)
    if alone is not None:
        lines[ALONE] = lines_of(race.Heat(heat.case, 1), [], count)[entrants.OURS]
    race.clear(folder)
    took, losses = take_turns(lines, turns, steps, measure_matmul)
    return {
        "case": heat.case.name, "title": heat.case.title, "processes": heat.processes,
        "kind": heat.kind, "precision": recorded["precision"],
        "tokens": heat.case.batch * heat.case.seq_len, "model_flops": recorded["model_flops"],
        "turns_s": took, "losses": losses, "same_losses": _same(losses),
        "first_steps_s": first_s, "best_products_flops_per_s": matmuls,
    }  # fmt: skip


def _same(losses: Mapping[str, Sequence[float]]) -> dict[str, bool]:
    """Return whether each run trains the same as outpace, as far as both got."""
    own = losses[entrants.OURS]
    pairs = {name: min(len(its), len(own)) for name, its in losses.items()}
    return {name: race.same(losses[name][:most], own[:most]) for name, most in pairs.items()}


def main() -> None:
    """Run the requested finals, and record each as soon as it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "outpace-peers")
    parser.add_argument("--case", choices=cases.CASES, help=cases.MEANING)
    parser.add_argument("--processes", type=int, choices=(1, 2))
    parser.add_argument("--kind", choices=[kind for kind in entrants.PEERS if kind])
    parser.add_argument("--precision", choices=race.PRECISIONS, help="else what is faster here")
    arguments = parser.parse_args()
    wanted = [heat for heat in race.heats() if race.is_wanted(heat, arguments)]
    if not wanted:
        raise SystemExit("there is no such heat: --kind is of the cases on two processes that "
                         "race.py races with it")  # fmt: skip
    precision = arguments.precision or race.faster_precision(arguments.folder)
    raced, done = (race.recorded(name, precision) for name in ("peers", "finals"))
    wanted = [heat for heat in wanted if heat.name in raced]
    if not wanted:
        raise SystemExit(f"none of these was raced in {precision}: python benchmarks/peers/race.py "
                         "with the same options first")  # fmt: skip
    for heat in wanted:
        found = final(heat, raced[heat.name], arguments.folder,
                      single=raced.get(race.Heat(heat.case, 1).name))  # fmt: skip
        done[heat.name] = {**found, **circumstances()}
        save(f"finals-{precision}", {"heats": done})
        for name, turns in found["turns_s"].items():
            step_s = statistics.median(map(statistics.median, turns))
            print(f"{heat.name}: {name}: {step_s:.3f} s a step", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
