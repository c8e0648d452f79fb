"""Proof that nothing is lost when ranks are killed, by real training and real signals.

    python benchmarks/faults.py               # records results/faults.json; an hour on 2 cores
    python benchmarks/faults.py --part kills  # repeats this part; keeps the others
    python benchmarks/faults.py --part tests --failed  # its failed tests
    python benchmarks/faults.py --quick       # a quick check, records nothing

`kills`: ranks are ended by SIGKILL at random steps, five times per run: while they start, compute,
wait in a collective, and save. `saves`: only while a checkpoint is being written. `damage`: a byte
of the newest checkpoint is flipped, or a file of it truncated, and the run resumes. Each run must
reach the losses and weights of an undisturbed run, bit for bit, with every step recorded once.
`tests`: faults of networks, hosts, disks and signals that the tests inject, and their outcomes.
"""

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from recording import RESULTS, circumstances, save

from outpace.records.ranks import RANK_NAME

ROOT = Path(__file__).resolve().parent.parent
STEPS, SAVE_EVERY = 60, 6
SPEC = {"family": "gpt2", "layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "max_positions": 64}
BASE = ("--seq-len", 32, "--global-batch", 8, "--steps", STEPS, "--save-every", SAVE_EVERY,
        "--sample-tokens", 0, "--eval-batches", 1, "--precision", "fp32", "--threads", 1,
        "--nproc", 2)  # fmt: skip
STRATEGIES: dict[str, tuple[object, ...]] = {
    "ddp": ("--strategy", "ddp"),
    "zero3": ("--strategy", "zero3"),
    "1f1b": ("--strategy", "1f1b", "--pp-microbatches", 4),
    "tp": ("--strategy", "tp"),
}
MOMENTS = ("starts", "computes", "waits", "saves")
KILLS_IN_A_RUN = 5
KILLS, SAVES, DAMAGES = 200, 50, 20
TESTS = ("tests/hosts/test_faults.py", "tests/hosts/test_hosts.py", "tests/hosts/test_slurm.py",
         "tests/launch/test_faults.py", "tests/launch/test_local.py",
         "tests/launch/test_processes.py", "tests/jobs/ranks/test_oom_guard.py",
         "tests/jobs/ranks/test_shared_filesystem.py")  # fmt: skip
_LIMIT_S = 400


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: losses by step, and a hash of its weights."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    weights: str


@dataclass(frozen=True)
class Kill:
    """A rank that was killed. `step`: the last completed step; 0 before the first."""

    moment: str
    rank: int
    step: int


def command(strategy: str, folder: Path, restarts: int) -> list[str]:
    """Return the command of a small training run on two ranks."""
    spec = folder / "model.json"
    spec.write_text(json.dumps(SPEC))
    words = ("train", "--model", spec, *BASE, *STRATEGIES[strategy], "--out", folder / "run",
             "--max-restarts", restarts)  # fmt: skip
    return [sys.executable, "-m", "outpace", *map(str, words)]


def outcome(run: Path) -> Outcome:
    """Read the outcome of a run that has ended."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()
    return Outcome(
        tuple(line["step"] for line in lines), tuple(line["loss"] for line in lines), digest
    )


def undisturbed(strategy: str, folder: Path) -> Outcome:
    """Run without disturbance, and return the outcome."""
    folder.mkdir()
    subprocess.run(command(strategy, folder, 0), check=True, capture_output=True, timeout=_LIMIT_S)
    return outcome(folder / "run")


def disturbed(
    strategy: str, folder: Path, moments: Sequence[str], seed: int
) -> tuple[Outcome, list[Kill], str]:
    """Run and kill a rank at each of these moments; return the outcome, the kills, the output."""
    folder.mkdir()
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(
            command(strategy, folder, len(moments)), stdout=subprocess.DEVNULL, stderr=said,
            start_new_session=True,
        )  # fmt: skip
        try:
            kills = list(_killed(process, folder / "run", moments, random.Random(seed)))
            process.wait(timeout=_LIMIT_S)
        except (OSError, psutil.Error) as error:
            raise RuntimeError(f"a rank ended before it was killed: {error}") from error
        finally:
            _end(process, folder)
        said.seek(0)
        words = said.read()
    if process.returncode != 0:
        raise RuntimeError(f"{strategy}, {kills}: exit code {process.returncode}:\n{words[-3000:]}")
    return outcome(folder / "run"), kills, words


def _end(launcher: "subprocess.Popen[bytes]", folder: Path) -> None:
    """End the launcher and its ranks, since elastic gives each rank a separate session."""
    with suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    for rank in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in " ".join(rank.cmdline()):
                rank.kill()
                rank.wait()


def _killed(
    launcher: "subprocess.Popen[bytes]", run: Path, moments: Sequence[str], draw: random.Random
) -> Iterator[Kill]:
    """Kill a rank at each of the moments; each kill happens after another start of the ranks."""
    before: set[int] = set()
    for number, moment in enumerate(moments):
        until = (number + draw.random()) * STEPS / (len(moments) + 1)
        ranks = _ranks(launcher, before)
        began_s, delay_s = time.monotonic(), 4 * draw.random()
        before |= {rank.pid for rank in ranks}
        chosen = draw.randrange(len(ranks))
        victim, at = ranks[chosen], _step(run)
        while not _is_at(moment, victim, run, at, until, time.monotonic() - began_s > delay_s):
            time.sleep(0.002)
            if launcher.poll() is not None or time.monotonic() - began_s > _LIMIT_S:
                raise RuntimeError(f"it ended, or hangs, before a rank was killed: {moment}")
        step = _step(run)
        victim.kill()
        yield Kill(moment, chosen, step)


def _ranks(launcher: "subprocess.Popen[bytes]", before: set[int]) -> list[psutil.Process]:
    """Return the processes of both ranks, in order, as soon as they have started again."""
    until_s = time.monotonic() + _LIMIT_S
    while launcher.poll() is None and time.monotonic() < until_s:
        found = {}
        with suppress(psutil.Error):
            for child in psutil.Process(launcher.pid).children():
                if child.pid not in before and child.name().startswith(RANK_NAME):
                    found[int(child.name().removeprefix(RANK_NAME))] = child
        if len(found) == 2:
            return [found[0], found[1]]
        time.sleep(0.01)
    raise RuntimeError("the launcher has ended, or hangs: there are no ranks to kill")


def _step(run: Path) -> int:
    """Return the last completed step."""
    with suppress(OSError):
        lines = (run / "metrics.jsonl").read_bytes().splitlines()
        with suppress(ValueError, KeyError):
            return int(json.loads(lines[-1])["step"]) if lines else 0
    return 0


def _is_at(
    moment: str, rank: psutil.Process, run: Path, since: int, until: float, late: bool
) -> bool:
    """Return whether a rank is at a moment, judged by its process and its files."""
    if moment == "starts":
        return late or _step(run) > since
    if _step(run) < max(until, since + 1):  # of this start: an interrupted save stays
        return False
    if moment == "saves":
        folders = list((run / "checkpoints").glob("step-*"))
        return any(not (folder / "complete.json").exists() for folder in folders)
    state = (Path("/proc") / str(rank.pid) / "stat").read_text().rpartition(")")[2].split()[0]
    return state == ("R" if moment == "computes" else "S")


def killed(moments: Sequence[str], count: int, folder: Path, seed: int) -> dict[str, Any]:
    """Kill ranks `count` times over all strategies, five times per run, at the moments in turn."""
    rows, number = [], 0
    draw = random.Random(seed)
    references = {name: undisturbed(name, folder / f"{name}-alone") for name in STRATEGIES}
    names = list(STRATEGIES)
    while number < count and len(rows) < count:
        strategy = names[len(rows) % len(names)]
        these = [draw.choice(moments) for _ in range(min(KILLS_IN_A_RUN, count - number))]
        try:
            found, kills, words = disturbed(
                strategy, folder / f"run-{len(rows)}", these, draw.randrange(1 << 30)
            )
            row = _judged(strategy, found, references[strategy], kills, words)
        except (RuntimeError, subprocess.TimeoutExpired) as error:  # these kills do not count
            row = {"strategy": strategy, "kills": [], "same": False, "failed": str(error)}
        number += len(row["kills"])
        rows.append(row)
        print(f"{number} of {count}: {rows[-1]}", file=sys.stderr, flush=True)
    moments_of = Counter(kill["moment"] for row in rows for kill in row["kills"])
    return {"kills": number, "runs": len(rows), "same": sum(row["same"] for row in rows),
            "lost": sum(row.get("lost", 0) for row in rows),
            "repeated": sum(row.get("repeated", 0) for row in rows),
            "moments": dict(moments_of), "rows": rows}  # fmt: skip


def _judged(
    strategy: str, found: Outcome, alone: Outcome, kills: list[Kill], words: str
) -> dict[str, Any]:
    every = Counter(found.steps)
    return {
        "strategy": strategy,
        "kills": [asdict(kill) for kill in kills],
        "restarts": len(re.findall(r"restart \d+ of", words)),
        "same": found == alone,
        "lost": sum(every[step] == 0 for step in alone.steps),
        "repeated": sum(times - 1 for times in every.values()),
    }


def damaged(count: int, folder: Path) -> dict[str, Any]:
    """Damage checkpoints between two halves of a run."""
    rows = []
    alone = undisturbed("ddp", folder / "alone")
    for number in range(count):
        rows.append(_damaged(folder / str(number), random.Random(number), alone))
        print(f"{number + 1} of {count}: {rows[-1]}", file=sys.stderr, flush=True)
    return {"damages": count, "said": sum(row["said"] for row in rows),
            "same": sum(row["same"] for row in rows), "rows": rows}  # fmt: skip


def _damaged(folder: Path, draw: random.Random, alone: Outcome) -> dict[str, Any]:
    folder.mkdir()
    words = command("ddp", folder, 0)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)  # fmt: skip
    until_s = time.monotonic() + _LIMIT_S
    while _step(folder / "run") < STEPS // 2 and process.poll() is None:
        if time.monotonic() > until_s:
            _end(process, folder)
            raise RuntimeError("it hangs")
        time.sleep(0.01)
    _end(process, folder)
    whole = [path.parent for path in (folder / "run" / "checkpoints").glob("*/complete.json")]
    newest = max(whole, key=lambda path: int(path.name.removeprefix("step-")))
    path = draw.choice(sorted(p for p in newest.iterdir() if p.stat().st_size > 0))
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    how = draw.choice(("flipped", "cut"))
    if how == "flipped":
        content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content if how == "flipped" else content[:at])
    done = subprocess.run([*words, "--auto-resume"], capture_output=True, text=True,
                          timeout=_LIMIT_S, check=False)  # fmt: skip
    said = f"skipping checkpoint {newest}, which is damaged" in done.stderr
    return {"file": path.name, "how": how, "said": said,
            "same": done.returncode == 0 and outcome(folder / "run") == alone}  # fmt: skip


def tested(folder: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    """Run the tests of faults; with `known` results, run only those that did not pass."""
    path = folder / "tests.xml"
    rows = {} if known is None else {row["fault"]: row for row in known["rows"]}
    failed = {name.partition("[")[0] for name, row in rows.items() if row["came"] != "passed"}
    chosen = ["-k", " or ".join(sorted(failed))] if failed else []
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", f"--junitxml={path}",
         *chosen, *TESTS], cwd=ROOT, check=False,
    )  # fmt: skip
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        bad = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = str(case.get("name"))
        rows[name] = {"fault": name, "came": next(iter(bad), "passed"),
                      "seconds": float(case.get("time", 0)), "again": name in rows}  # fmt: skip
    return {"tests": len(rows), "passed": sum(row["came"] == "passed" for row in rows.values()),
            "rows": list(rows.values())}  # fmt: skip


def part(name: str, folder: Path, quick: bool, known: dict[str, Any] | None) -> dict[str, Any]:
    """Return one part's row; with `known` tests, run only those that did not pass."""
    if name == "kills":
        return killed(MOMENTS, 2 * KILLS_IN_A_RUN if quick else KILLS, folder, 1)
    if name == "saves":
        return killed(("saves",), KILLS_IN_A_RUN if quick else SAVES, folder, 2)
    if name == "damage":
        return damaged(2 if quick else DAMAGES, folder)
    return tested(folder, known)


PARTS = ("kills", "saves", "damage", "tests")


def main() -> int:
    """Run the requested parts, and save their results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--failed", action="store_true", help="of --part tests what did not pass")
    arguments = parser.parse_args()
    recorded = RESULTS / "faults.json"
    known = json.loads(recorded.read_text())["parts"] if recorded.is_file() else {}
    if arguments.failed and (arguments.part != "tests" or "tests" not in known):
        parser.error("--failed is for --part tests, where it is recorded")
    for name in PARTS if arguments.part is None else (arguments.part,):
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            before = known["tests"] if arguments.failed else None
            row = {"part": name, **part(name, Path(folder), arguments.quick, before)}
        row["took_s"] = round(time.monotonic() - began_s)
        print(json.dumps({k: v for k, v in row.items() if k != "rows"}, indent=2), flush=True)
        if not arguments.quick:
            known[name] = {**row, **circumstances()}
            save("faults", {"parts": {each: known[each] for each in PARTS if each in known}})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
