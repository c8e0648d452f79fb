"""outpace compared with its alternatives: the same weights, batches and precision.

    python benchmarks/peers/race.py                    # all cases, records results/peers-bf16.json
    python benchmarks/peers/race.py --case a --processes 2 --kind zero3   # repeats one of them
    python benchmarks/peers/race.py --quick            # a tiny case of a few steps, records nothing

This sets up each peer in a separate environment (below --folder, kept for the next time), writes
each case, and runs all in turn, in a different order each round. The times at which each step's
line appears are observed from outside, in the same way for all, and so is the memory of a run's
processes (of the largest one; workers of a compiler and launchers are smaller). Tokens/s are those
of the median step after warm-up; peers that do not compute the plain loop's losses are not counted.
Earlier records are kept; --anew starts from nothing. Before each case, the best matmul is measured.
The precision is the one in which the machine multiplies faster, bf16 or fp32; each has a separate
record, since a machine without bf16 is a different one.
"""

import argparse
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import cases  # noqa: E402
import entrants  # noqa: E402
import environments  # noqa: E402
import watching  # noqa: E402
from recording import RESULTS, circumstances, save  # noqa: E402

from outpace.records.machine import Machine  # noqa: E402

WARMUP, COUNTED, ROUNDS = 2, 13, 2  # steps of each run: 30 of each entrant in two rounds
LIMIT_S = 900.0
# Relative to the plain loop's losses: bf16's rounding differs between orders of matmuls.
FIRST_LOSS, LATER_LOSS = 0.005, 0.03
PRECISIONS = ("bf16", "fp32")
RUNS = "runs"  # below the folder


@dataclass(frozen=True)
class Heat:
    """A case with a number of processes and a kind of training."""

    case: cases.Case
    processes: int
    kind: str = ""

    @property
    def name(self) -> str:
        """Return the name under which it is recorded."""
        return "-".join(filter(None, (self.case.name, str(self.processes), self.kind)))


def heats() -> list[Heat]:
    """Return all heats."""
    both = [Heat(case, processes) for case in cases.CASES.values() for processes in (1, 2)]
    return [*both, Heat(cases.CASES["a"], 2, "zero3"), Heat(cases.CASES["b"], 2, "offload")]


def run(
    heat: Heat,
    folder: Path,
    precision: str,
    counted: int,
    rounds: int,
    peers: Sequence[entrants.Peer] | None = None,
    python_of: Callable[[str, Path], Path] = environments.python_of,
) -> dict[str, Any]:
    """Run outpace and `peers` (None: all) in turn; return what each took."""
    steps = WARMUP + counted
    place = folder / "cases" / f"{heat.case.name}-{precision}-{steps}"
    cases.write(heat.case, place, steps, precision)
    asked = entrants.PEERS[heat.kind] if peers is None else peers
    lines, flops = commands(heat, folder, place, steps, asked, python_of), 0.0
    chance = random.Random(heat.name)
    found: dict[str, list[watching.Seen]] = {name: [] for name in lines}
    for number in range(rounds):
        for name in chance.sample(sorted(lines), len(lines)):
            words, log = lines[name]
            clear(folder)
            seen = watching.watch(words, log, entrants.ENVIRONMENT, LIMIT_S)
            found[name].append(seen)
            flops = flops or (_flops(log) if name == entrants.OURS else 0.0)
            print(f"{heat.name}, round {number + 1}: {name}: {_told(seen)}", file=sys.stderr,
                  flush=True)  # fmt: skip
    return {**judged(heat, found), "precision": precision, "model_flops": flops}


def _flops(metrics: Path) -> float:
    """Return the FLOPs of a step as outpace counts them; 0 if it did not run."""
    if not metrics.is_file():
        return 0.0
    step = json.loads(metrics.read_text().splitlines()[-1])
    return float(step["model_flops_per_s"] * step["step_time_s"])


def best_products_flops_per_s(folder: Path) -> dict[str, float]:
    """Return the machine's best matmul by precision (MAMF), as `outpace probe` finds it.

    Precisions that were not steady are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "machine.json"
    subprocess.run([sys.executable, "-m", "outpace", "probe", "matmul", "--quick", "--out",
                    str(out)], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    probed = Machine.load(out).probed
    best = {} if probed is None else {one: probed.best_rate(one) for one in PRECISIONS}
    values = {one: None if rate is None else rate.value for one, rate in best.items()}
    return {precision: value for precision, value in values.items() if value is not None}


def faster_precision(folder: Path) -> str:
    """Return the precision in which the machine multiplies faster. Raises SystemExit if unknown."""
    best = best_products_flops_per_s(folder)
    if not best:
        raise SystemExit("the machine does not hold still: try again, or say --precision")
    return max(PRECISIONS, key=lambda one: best.get(one, 0.0))


def commands(
    heat: Heat,
    folder: Path,
    place: Path,
    steps: int,
    peers: Sequence[entrants.Peer],
    python_of: Callable[[str, Path], Path] = environments.python_of,
) -> dict[str, tuple[list[str], Path]]:
    """Return each entrant's command, and the file of its steps' lines; see `clear`."""
    config, runs = place / "outpace.toml", folder / RUNS / str(heat.processes)
    settings = json.loads((place / "case.json").read_text())["settings"]
    cases.write_config(config, settings)
    out = runs / entrants.OURS
    found = {entrants.OURS: (
        entrants.own_command(config, heat.processes, heat.kind, steps, out),
        out / "metrics.jsonl",
    )}  # fmt: skip
    for peer in peers:
        python = python_of(peer.environment, folder / "environments")
        log = runs / f"{peer.name}.jsonl"
        found[peer.name] = (peer.command(python, heat.processes, place, steps, log), log)
    return found


def clear(folder: Path) -> None:
    """Remove the remains of earlier runs, and create a folder for the next."""
    shutil.rmtree(folder / RUNS, ignore_errors=True)
    for processes in (1, 2):
        (folder / RUNS / str(processes)).mkdir(parents=True)


def _told(seen: watching.Seen) -> str:
    if len(seen.steps_s) <= WARMUP:
        return f"failed ({seen.exit_code}): {seen.said.strip().splitlines()[-1:]}"
    step_s = statistics.median(step_times_s(seen.steps_s))
    return f"{step_s:.3f} s a step, the first after {seen.steps_s[0]:.1f} s"


def step_times_s(ends_s: Sequence[float], warmup: int = WARMUP) -> list[float]:
    """Return times after warm-up, from the times at which each step's line appeared."""
    return [after - before for before, after in itertools.pairwise(ends_s)][warmup - 1 :]


def judged(heat: Heat, found: dict[str, list[watching.Seen]]) -> dict[str, Any]:
    """Summarise each entrant's runs."""
    tokens = heat.case.batch * heat.case.seq_len
    plain = next(name for name in found if name.startswith("plain"))
    yardstick = found[plain][0].losses
    runs_losses = [one.losses for runs in found.values() for one in runs]
    target = _target([losses for losses in runs_losses if same(losses, yardstick)])
    rows = {}
    for name, runs in found.items():
        whole = [one for one in runs if one.exit_code == 0 and len(one.steps_s) > WARMUP]
        row: dict[str, Any] = {"runs": [asdict(one) | {"said": ""} for one in runs]}
        if whole:
            step_s = statistics.median([s for one in whole for s in step_times_s(one.steps_s)])
            row |= {
                "step_time_s": step_s, "tokens_per_s": tokens / step_s,
                "peak_bytes": max(one.peak_bytes for one in whole),
                "rank_bytes": max(one.rank_bytes for one in whole),
                "first_step_s": statistics.median(one.steps_s[0] for one in whole),
                "loss_reached_s": _reached_s(whole, target),
                "same_losses": all(same(one.losses, yardstick) for one in whole),
            }  # fmt: skip
        else:
            row["failure"] = runs[-1].said.strip()[-500:]
        rows[name] = row
    return {"case": heat.case.name, "title": heat.case.title, "processes": heat.processes,
            "kind": heat.kind, "tokens": tokens, "target_loss": target, "entrants": rows,
            "cannot": dict(entrants.CANNOT.get(heat.kind, {}))}  # fmt: skip


def same(losses: Sequence[float], yardstick: Sequence[float]) -> bool:
    """Return whether these are the losses of the same training."""
    return len(losses) == len(yardstick) and all(
        abs(own - its) <= (LATER_LOSS if step else FIRST_LOSS) * its
        for step, (own, its) in enumerate(zip(losses, yardstick, strict=True))
    )


def _target(losses: Sequence[Sequence[float]]) -> float | None:
    """Return a loss that all of these reach: the highest of their last steps' losses."""
    return max((one[-1] for one in losses if one), default=None)


def _reached_s(runs: Sequence[watching.Seen], target: float | None) -> float | None:
    """Return the median over runs of the time to reach the target; None if one did not."""
    found = []
    for one in runs:
        at = next((at_s for at_s, loss in zip(one.steps_s, one.losses, strict=False)
                   if target is not None and loss <= target), None)  # fmt: skip
        if at is None:
            return None
        found.append(at)
    return statistics.median(found)


def recorded(race: str, precision: str) -> dict[str, Any]:
    """Return the latest records of heats by name; `race`: "peers" or "finals"."""
    path = RESULTS / f"{race}-{precision}.json"
    heats: dict[str, Any] = json.loads(path.read_text())["heats"] if path.is_file() else {}
    return heats


def is_wanted(heat: Heat, arguments: argparse.Namespace) -> bool:
    """Return whether options select a heat; a case without a kind selects the heat without one."""
    named = any((arguments.case, arguments.processes, arguments.kind))
    kinds = (heat.kind,) if not named else (arguments.kind or "",)
    return (
        arguments.case in (None, heat.case.name)
        and arguments.processes in (None, heat.processes)
        and heat.kind in kinds
    )


def main() -> None:
    """Run the requested heats, and record each."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__.splitlines()[0]} It makes an environment of a GB for each peer "
        "first, and takes 75 minutes on 2 cores with bf16, hours without; it goes on where it was "
        "stopped.")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "outpace-peers",
                        help="environments and cases (%(default)s)")  # fmt: skip
    parser.add_argument("--case", choices=cases.CASES, help=cases.MEANING)
    parser.add_argument("--processes", type=int, choices=(1, 2))
    parser.add_argument("--kind", choices=[kind for kind in entrants.PEERS if kind],
                        help="(a) by ZeRO-3, or (b) by it offloaded, on 2 processes")  # fmt: skip
    parser.add_argument("--precision", choices=PRECISIONS,
                        help="else what is faster here; with --quick fp32")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=ROUNDS,
                        help="runs of each entrant (%(default)s); more tell more")  # fmt: skip
    parser.add_argument("--anew", action="store_true", help="race again what is recorded, too")
    parser.add_argument("--quick", action="store_true",
                        help="a tiny case of a few steps instead; records nothing")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.quick:
        heat = Heat(cases.TINY["tiny"], arguments.processes or 1, arguments.kind or "")
        print(
            json.dumps(run(heat, arguments.folder, arguments.precision or "fp32", 2, 1), indent=1)
        )
        return
    named = any((arguments.case, arguments.processes, arguments.kind))
    precision = arguments.precision or faster_precision(arguments.folder)
    done = {} if arguments.anew else recorded("peers", precision)
    for heat in heats():
        if not is_wanted(heat, arguments) or (heat.name in done and not named):
            continue
        best = best_products_flops_per_s(arguments.folder)
        row = run(heat, arguments.folder, precision, COUNTED, arguments.rounds)
        interpreters = arguments.folder / "environments"
        row["environments"] = {
            name: environments.versions(environments.python_of(name, interpreters))
            for name in {peer.environment for peer in entrants.PEERS[heat.kind]}
        }
        row["best_product_flops_per_s"] = best.get(precision)
        done[heat.name] = {**row, "rounds": arguments.rounds, **circumstances()}
        save(f"peers-{precision}", {"heats": done, "warmup": WARMUP, "counted": COUNTED})


if __name__ == "__main__":
    main()
