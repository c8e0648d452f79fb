"""Test of whether outpace works with the current torch and Python; `scripts/test-torch` runs it.

    python benchmarks/torch_versions.py [--only imports,verify,trainings,tests] [--quick]
    python benchmarks/torch_versions.py --only tests/optim,tests/training

This imports every module, verifies every strategy on four processes, trains each kind of model, and
runs the tests of the packages for which torch's versions differ. It needs outpace's dependencies,
and those of the tests. Each part's result is written to results/torch_versions.json as it comes,
one entry per torch and Python, with its commit. A part that is left out keeps its earlier record,
and is null if it has none. Exits with 1 if something failed.
"""

import argparse
import importlib
import json
import os
import pkgutil
import platform
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from recording import RESULTS, circumstances

from outpace.nn.torch_versions import VERSION

ROOT = Path(__file__).resolve().parent.parent
RESULT = RESULTS / "torch_versions.json"
FOLDERS = ("nn", "optim", "training", "parallel")
QUICK = ("imports", "verify", "trainings")
_RUN = (
    "--json", "--seq-len=64", "--global-batch=8", "--steps=20", "--eval-batches=2",
    "--sample-tokens=4", "--device=cpu",
)  # fmt: skip
_TINY = ("--model=outpace-tiny", *_RUN)
_OWN_MODEL = """\
from transformers import GPT2Config, GPT2LMHeadModel


def build():
    sizes = {"vocab_size": 512, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
"""


def imports() -> dict[str, Any]:
    """Import every module of the package in this process."""
    import outpace

    modules, failures = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in pkgutil.walk_packages(outpace.__path__, "outpace."):
            if found.name.endswith("__main__"):
                continue
            modules += 1
            try:
                importlib.import_module(found.name)
            except Exception as error:
                failures.append(f"{found.name}: {type(error).__name__}: {error}")
    return {"modules": modules, "failures": failures, "passed": not failures}


def verify() -> dict[str, Any]:
    """Run `outpace verify all` on four processes."""
    done = run_outpace("verify", "all", "--nproc", "4", "--json")
    try:
        certificate = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"passed": False, "failures": [last_words(done)]}
    verdicts = certificate["verdicts"]
    return {
        "plans": len(verdicts),
        "worst_relative_difference": max(one["worst_relative_difference"] for one in verdicts),
        "skipped": certificate["skipped"],
        "failures": [f"{v['strategy']}: {v['reason']}" for v in verdicts if not v["passed"]],
        "passed": done.returncode == 0,
    }


def trainings() -> dict[str, Any]:
    """Run one short training of each kind, in separate processes."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: train(command) for name, command in kinds(Path(folder)).items()}


def kinds(folder: Path) -> dict[str, list[str]]:
    """Return what to train, and with which options. Files are written into `folder`."""
    lines = [{"text": f"a day of {'sun' if n % 2 else 'rain'}, the {n}th", "label": n % 2}
             for n in range(120)]  # fmt: skip
    chats = [{"prompt": f"What comes after {n}?", "response": f"{n + 1} does."} for n in range(120)]
    for name, rows in (("labels", lines), ("chats", chats)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    (folder / "own.py").write_text(_OWN_MODEL, encoding="utf-8")
    text_run = folder / "text"
    kept = f"--cache-dir={folder / 'cache'}"
    data = ["--data", str(ROOT / "outpace" / "records"), kept]
    return {
        "text": [*_TINY, *data, f"--out={text_run}"],
        "resumed": ["--json", "--resume", f"--out={text_run}", "--steps=26"],
        "bf16": [*_TINY, *data, "--precision=bf16"],
        "compiled": [*_TINY, *data, "--compile"],
        "adamw-8bit": [*_TINY, *data, "--optimizer=adamw-8bit"],
        "conversations": [*_TINY, kept, "--task=chat", f"--data={folder / 'chats.jsonl'}"],
        "labels": [*_TINY, kept, "--task=classify", f"--data={folder / 'labels.jsonl'}"],
        "LoRA": [f"--model={text_run}", *_RUN, *data, "--lora-rank=4"],
        "custom model": [f"--model={folder / 'own.py'}:build", *_RUN, *data],
        "zero3 on 2": [*_TINY, *data, "--nproc=2", "--strategy=zero3"],
        "tp on 2": [*_TINY, *data, "--nproc=2", "--strategy=tp"],
        "1f1b on 2": [*_TINY, *data, "--nproc=2", "--strategy=1f1b"],
    }


def train(options: list[str]) -> dict[str, Any]:
    """Return validation losses before and after, and whether they fell."""
    done = run_outpace("train", *options)
    try:
        measured = json.loads(done.stdout)
        first, last = (measured[name]["loss"] for name in ("initial_eval", "final_eval"))
    except (json.JSONDecodeError, KeyError, TypeError):
        return {"passed": False, "failures": [last_words(done)]}
    passed = done.returncode == 0 and last < first
    failures = [] if passed else [f"loss {first:.4f} to {last:.4f}, exit code {done.returncode}"]
    return {"initial_loss": first, "final_loss": last, "failures": failures, "passed": passed}


def tests(folder: str) -> dict[str, Any]:
    """Run the tests of a package."""
    with tempfile.TemporaryDirectory() as place:
        told = Path(place, "junit.xml")
        command = [
            sys.executable, "-m", "pytest", f"tests/{folder}", "-q", "-m", "not slow",
            "-p", "no:cacheprovider", "--timeout=900", f"--junitxml={told}",
        ]  # fmt: skip
        # pytest's output, including tracebacks, is for the user who waits; stdout is for results.
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), stdout=sys.stderr.fileno(), check=False
        )
        ended = {"failures": [f"pytest ended with exit code {done.returncode}"]}
        found = counted(told) if told.exists() else ended
    return {**found, "passed": done.returncode == 0}


def counted(told: Path) -> dict[str, Any]:
    """Return from a JUnit file how many tests ran and were skipped, and failures with reasons."""
    cases = list(ET.parse(told).getroot().iter("testcase"))
    failures = []
    for case in cases:
        for why in (*case.findall("failure"), *case.findall("error")):
            first = (why.get("message") or "").strip().splitlines()
            failures.append(f"{case.get('name')}: {first[0][:200] if first else 'no message'}")
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"run": len(cases) - skipped, "skipped": skipped, "failures": failures}


def environment() -> dict[str, str]:
    """Return this environment, with outpace from this checkout and threads that do not spin."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}


def run_outpace(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run the command from this checkout, with this interpreter."""
    return subprocess.run(
        [sys.executable, "-m", "outpace", *words], cwd=ROOT, env=environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def last_words(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the last output of a failed command."""
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return f"exit code {done.returncode}: {' '.join(said[-3:])[-400:]}"


PARTS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "imports": imports,
    "verify": verify,
    "trainings": trainings,
    **{f"tests/{folder}": partial(tests, folder) for folder in FOLDERS},
}


def record(name: str, part: Mapping[str, Any], about: Mapping[str, Any], path: Path) -> None:
    """Write a part into the entry of this torch and Python; `about` is when and with what it ran.

    Parts of an entry with other versions of packages are dropped.
    """
    name, _, folder = name.partition("/")
    entries = json.loads(path.read_text())["entries"] if path.exists() else []
    before = next((one for one in entries if _key(one) == _key(about)), None)
    parts: dict[str, Any] = dict.fromkeys(one.partition("/")[0] for one in PARTS)
    if before is not None and before["versions"] == about["versions"]:
        parts |= {one: before[one] for one in parts}
        parts["recorded"] = before["recorded"]
    if folder:
        part = {**(parts[name] or {}), folder: part}
    recorded = {word: about[word] for word in ("date", "commit", "uncommitted_changes", "command")}
    of = {word: about[word] for word in ("torch", "python", "versions", "machine")}
    what = f"{name}/{folder}" if folder else name
    entry = {**of, **parts, name: part, "recorded": {**parts.get("recorded", {}), what: recorded}}
    ordered = sorted([*(one for one in entries if one is not before), entry], key=_key)
    document = {"benchmark": "torch_versions", "entries": ordered}
    path.write_text(json.dumps(document, indent=1) + "\n")


def _key(entry: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    release = entry["torch"].split("+")[0]
    return tuple(tuple(map(int, text.split("."))) for text in (release, entry["python"]))


def failed(part: Mapping[str, Any] | None) -> list[str]:
    """Return what failed in a part, or in its own parts."""
    if part is None:
        return []
    if "passed" in part:
        return [] if part["passed"] else list(part["failures"]) or ["failed"]
    return [f"{name}: {why}" for name, one in part.items() for why in failed(one)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="parts, comma-separated; tests/nn for those of a package")
    parser.add_argument("--quick", action="store_true", help="all but the tests")
    parser.add_argument("--recorded-as", help="the command to record", default=None)
    parser.add_argument("--out", type=Path, default=RESULT, help="the file of results")
    arguments = parser.parse_args()
    asked = arguments.only.split(",") if arguments.only else PARTS
    found = {one: [name for name in PARTS if one in (name, name.partition("/")[0])]
             for one in (QUICK if arguments.quick else asked)}  # fmt: skip
    unknown = [one for one, names in found.items() if not names]
    if unknown:
        parser.error(f"--only {', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    chosen = [name for names in found.values() for name in names]
    # Before the first part, since each part's result changes a file of the checkout.
    started = {"torch": VERSION, "python": platform.python_version(), **circumstances()}
    if arguments.recorded_as is not None:
        started["command"] = arguments.recorded_as.split()
    wrong_parts = []
    for name in chosen:
        began = time.perf_counter()
        about = {**started, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        part = PARTS[name]()
        wrong = failed(part)
        wrong_parts += wrong
        took_s = time.perf_counter() - began
        print(f"{name}: {'passed' if not wrong else 'FAILED'} in {took_s:.0f} s", file=sys.stderr)
        for one in wrong:
            print(f"    {one}", file=sys.stderr)
        record(name, part, about, arguments.out)
    return int(bool(wrong_parts))


if __name__ == "__main__":
    sys.exit(main())
