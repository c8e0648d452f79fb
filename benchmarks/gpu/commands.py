"""Commands as users type them, run from outside, and the tests that need a GPU."""

import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from gpu.check import COMPILER_CACHES, Check, slug
from gpu.shapes import Shape, little, shape_of, tokens_file
from outpace.launch.launcher_env import free_port

ROOT = Path(__file__).resolve().parents[2]
MACHINE_FILE = "machine.json"
_LOOK_EVERY_S = 0.02
_SAID = 2500  # number of characters kept of each stream
_OUTPACE = (sys.executable, "-m", "outpace")


def _tail(text: str | bytes | None) -> str:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return (text or "")[-_SAID:]


def command(
    check: Check, words: Sequence[str], limit_s: float, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a command; return its exit code, seconds and output. Raises if it fails or is too slow.

    A small run may use the section's time: `limit_s` is for a GPU, and cores may be shared.
    """
    began_s = time.perf_counter()
    left_s = check.left_s() - 2
    limit_s = max(1.0, left_s if check.small else min(limit_s, left_s))
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=limit_s, check=False, cwd=check.folder,
            env={**os.environ, **(environ or {})},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"did not end in {limit_s:.0f} s: {_tail(error.stdout)} {_tail(error.stderr)}"
        ) from None
    took_s = time.perf_counter() - began_s
    if done.returncode != 0:
        raise RuntimeError(
            f"exit code {done.returncode}: {_tail(done.stdout + done.stderr)[-550:]}"
        )
    return {"took_s": took_s, "stdout": _tail(done.stdout), "stderr": _tail(done.stderr)}


def first_use(check: Check) -> None:
    """Run doctor, probe, tune, train by the plan, and report, one after the other in a folder."""
    shape = shape_of(check, "gpt2")
    data = tokens_file(check, shape.vocab)
    cache = ["--cache-dir", str(check.folder / "cache")]
    what = ["--model", shape.model, "--data", data, "--device", check.device, *cache]
    length = ["--seq-len", str(shape.seq_len), "--global-batch", str(shape.batch)]
    steps, budget = ("6", "5") if check.small else ("30", "40")
    run = [*_OUTPACE]
    sections = ["matmul", "memory", *([] if check.small else ["steps"])]
    page = "report.md" if find_spec("plotly") is None else "report.html"
    for name, limit_s, words in (
        ("doctor", 40.0, ["doctor"]),
        ("probe", 80.0, ["probe", *sections, "--quick", "--budget", budget,
                         "--device", check.device, "--out", MACHINE_FILE]),
        ("tune", 110.0, ["tune", "--trials", "1" if check.small else "3", "--budget", budget,
                         *what, *length, "--steps", steps, "--out", "tuning"]),
        ("train", 60.0, ["train", *what, "--plan", "tuning/plan.json", "--steps", steps,
                         "--out", "run"]),
        ("report", 30.0, ["report", "run", "tuning/tuning.json", "--out", page]),
    ):  # fmt: skip
        check.row(name, 10.0, partial(command, check, [*run, *words], limit_s))
    machine = check.folder / MACHINE_FILE
    if machine.is_file() and check.cuda:
        shutil.copy(machine, check.kept / f"gpu-{MACHINE_FILE}")


def first_step(check: Check) -> None:
    """Measure the seconds from the command to the first step's figures, uncompiled and again."""
    shape = shape_of(check, "gpt2")
    cache = check.folder / "first-step-cache"
    ways = {"not compiled": "--no-compile"}
    if check.inductor:
        ways |= {"compiled, empty cache": "--compile", "compiled, again": "--compile"}
    for name, flag in ways.items():
        check.row(name, 20.0, partial(_first_step, check, shape, name, flag, cache))


def _first_step(check: Check, shape: Shape, name: str, flag: str, cache: Path) -> dict[str, Any]:
    out = check.folder / "first-step" / slug(name)
    words = [*_OUTPACE, "train", "--model", shape.model, "--init", "random", "--dropout", "0",
             "--data", tokens_file(check, shape.vocab), "--seq-len", str(shape.seq_len),
             "--global-batch", str(shape.batch), "--steps", "6", "--eval-batches", "0",
             "--sample-tokens", "0", "--measure-only", "--device", check.device, flag,
             "--cache-dir", str(cache), "--out", str(out)]  # fmt: skip
    log = out.parent / f"{out.name}.log"
    log.parent.mkdir(exist_ok=True)
    # Use the command's own cache below --cache-dir, which is empty at first, not the sections'.
    environ = {key: value for key, value in os.environ.items() if key not in COMPILER_CACHES}
    began_s = time.perf_counter()
    with log.open("wb") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said, cwd=check.folder,
                                   env=environ)  # fmt: skip
    metrics, first_s = out / "metrics.jsonl", None
    while process.poll() is None and check.left_s() > 2:
        if first_s is None and metrics.is_file() and metrics.stat().st_size:
            first_s = time.perf_counter() - began_s
        time.sleep(_LOOK_EVERY_S)
    if process.poll() is None:
        process.kill()
        process.wait()
        raise RuntimeError(f"did not end in time: {_tail(log.read_bytes())}")
    took_s = time.perf_counter() - began_s
    if process.returncode != 0:
        raise RuntimeError(f"exit code {process.returncode}: {_tail(log.read_bytes())[-550:]}")
    return {"first_step_s": first_s, "took_s": took_s}


def micro_batch(check: Check) -> None:
    """Compare `--micro-batch auto` with a run that is given the same number, from outside."""
    seq_len, steps = ("32", "4") if check.small else ("256", "8")
    times = {}
    for name, size in (("number", "8"), ("auto", "auto")):
        words = [*_OUTPACE, "train", "--model", little(check), "--init", "random",
                 "--data", tokens_file(check, 1024), "--seq-len", seq_len, "--global-batch", "8",
                 "--micro-batch", size, "--steps", steps, "--measure-only", "--eval-batches", "0",
                 "--sample-tokens", "0", "--device", check.device, "--no-compile",
                 "--cache-dir", str(check.folder / "cache"),
                 "--out", str(check.folder / f"micro-batch-{name}")]  # fmt: skip
        row = check.row(name, 15.0, partial(command, check, words, 40.0))
        times[name] = None if row is None else row["took_s"]
    if None in times.values():
        return
    step_s = _median_step_s(check.folder / "micro-batch-number")
    search_s = times["auto"] - times["number"]
    check.put("search", {"search_s": search_s, "step_time_s": step_s,
                         "beyond_five_steps_s": search_s - 5 * step_s})  # fmt: skip


def _median_step_s(run: Path) -> float:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return float(median(json.loads(line)["step_time_s"] for line in lines[2:]))


def two_ranks(check: Check) -> None:
    """Run two processes on one device over gloo, since NCCL refuses two on one device."""
    check.row("ddp", 20.0, lambda: _two_ranks(check))


def _two_ranks(check: Check) -> dict[str, Any]:
    words = [*_OUTPACE, "train", "--model", little(check), "--init", "random",
             "--data", tokens_file(check, 1024), "--seq-len", "64" if check.small else "128",
             "--global-batch", "8", "--steps", "4", "--device", check.device, "--backend", "gloo",
             "--strategy", "ddp", "--no-compile", "--measure-only", "--eval-batches", "0",
             "--sample-tokens", "0", "--out", str(check.folder / "two-ranks"),
             "--cache-dir", str(check.folder / "cache")]  # fmt: skip
    shared = {**os.environ, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    began_s = time.perf_counter()
    ranks = [
        subprocess.Popen(words, env={**shared, "RANK": str(rank)}, text=True, cwd=check.folder,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [one.communicate(timeout=max(1.0, check.left_s() - 2))[0] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    codes = [one.returncode for one in ranks]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {said[0][-300:]} {said[1][-300:]}")
    return {"took_s": time.perf_counter() - began_s,
            "step_time_s": _median_step_s(check.folder / "two-ranks")}  # fmt: skip


def marked_tests(check: Check) -> None:
    """Run the tests marked gpu, and record each outcome; small: only check that they are found."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")
                   if "mark.gpu" in path.read_text(encoding="utf-8"))  # fmt: skip
    if check.small:
        check.put("files", files)
        return
    out = check.folder / "tests.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files, "-p", "no:cacheprovider",
             "--timeout", "60", "-W", "default", f"--junit-xml={out}"]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT,
                          timeout=max(1.0, check.left_s() - 2))  # fmt: skip
    tests = outcomes(out) if out.is_file() else {}
    check.put("tests", {"exit_code": done.returncode, "tests": tests, "said": _tail(done.stdout)})
    if done.returncode != 0:
        raise RuntimeError(
            f"tests failed: {', '.join(n for n, t in tests.items() if t[0] != 'passed')}"
        )


def outcomes(path: Path) -> dict[str, tuple[str, float]]:
    """Return outcome and seconds of every test in a JUnit file."""
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = (kinds[0] if kinds else "passed", float(case.get("time", 0)))
    return found
