"""Every command where standard streams, the home, descriptors or the directory are odd.

Each ends with a code of its own and, at most, a sentence: never with a traceback.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.cli.main import COMMANDS

# What each command does in a moment; {run} is a finished run, {flags} makes a training short.
WORDS = {
    "plan": "plan --model gpt2 --machine hgx-h100",
    "estimate": "estimate --model gpt2 --machine hgx-h100 --plan {run}/../plan.json "
    "--seq-len 64 --global-batch 16",
    "train": "train {flags} --out trained",
    "generate": "generate --run {run} --max-new-tokens 4 def",
    "eval": "eval --run {run} --batches 1",
    "probe": "probe matmul --quick --budget 1 --device cpu",
    "accuracy": "accuracy --like {run}/../plan.json",
    "calibrate": "calibrate {run} --model gpt2 --machine l4",
    "topology": "topology --timeout 5",
    "doctor": "doctor --timeout 5",
    "memory": "memory --model gpt2 --seq-len 64",
    "network": "network --model gpt2 --machine hgx-h100",
    "watch": "watch --for 0.2",
    "runs": "runs {run}",
    "models": "models",
    "merge": "merge {run} --out merged",
    "launch": "launch slurm --nodes 1 -- train --model gpt2",
    "compare": "compare --command 'echo 1' --command 'echo 1 ' --metric '(1)' --rounds 1",
    "tune": "tune --help",
    "report": "report {run} --format md",
    "verify": "verify single --nproc 1",
    "version": "version",
}
# A shell's words around a command, or variables.
SURROUNDINGS = {
    "closed output": "{} >&-",
    "full output": "{} >/dev/full",
    "closed error": "{} 2>&-",
    "full error": "{} 2>/dev/full",
    "reader gone": "{}",  # its standard output is a pipe that nobody reads
    "nothing open": "{} <&- >&- 2>&-",
    "ascii": "PYTHONIOENCODING=ascii {}",
    "latin-1": "LC_ALL=C PYTHONIOENCODING=latin-1 PYTHONUTF8=0 {}",
    "no home": "env -u HOME {}",
    "home that is none": "HOME=/nonexistent {}",
    "few descriptors": "ulimit -n 20; {}",
    "no directory": "mkdir gone; cd gone; rmdir ../gone; {}",
    "narrow": "COLUMNS=1 {}",
    "no terminal": "TERM=dumb NO_COLOR=1 {}",
    "no folder for temporary files": "TMPDIR=/nonexistent {}",
    "logs that torch does not know": "TORCH_LOGS=nonsense {}",
    "no folder for compiled code": "TORCHINDUCTOR_CACHE_DIR=/proc/nowhere {}",
}
REFUSED = ("calibrate", "merge")  # of these words, before anything is written
OFTEN = [  # of all pairs, which each code path is among
    ("version", "closed output"), ("version", "full output"), ("plan", "full output"),
    ("plan", "ascii"), ("report", "nothing open"), ("runs", "no directory"), ("doctor", "latin-1"),
    ("models", "reader gone"), ("memory", "logs that torch does not know"),
]  # fmt: skip
EVERY = [(command, around) for command in WORDS for around in SURROUNDINGS]


def test_no_command_is_left_out() -> None:
    assert set(WORDS) == set(COMMANDS)


@pytest.fixture(scope="module")
def short(train_flags: list[str]) -> str:
    return shlex.join([*train_flags, "--threads=1"])


def tried(
    command: str, around: str, run: Path, short: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    plan = run.parent / "plan.json"
    if not plan.exists():
        plan.write_text('{"strategy": "ddp", "dp_replicate": 8}')
    words = WORDS[command].format(run=shlex.quote(str(run)), flags=short)
    outpace = f"{shlex.quote(sys.executable)} -m outpace {words}"
    script = SURROUNDINGS[around].format(outpace)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # An empty one means the working directory, without which Python itself does not start.
    paths = [str(Path(__file__).parents[2]), *filter(None, known)]
    output, written = subprocess.PIPE, None
    if around == "reader gone":
        read, output = written = os.pipe()
        os.close(read)
    try:
        return subprocess.run(
            ["bash", "-c", script], cwd=folder, stdout=output, stderr=subprocess.PIPE, text=True,
            check=False, errors="replace",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
    finally:
        if written is not None:
            os.close(output)


def check(command: str, around: str, done: subprocess.CompletedProcess[str]) -> None:
    said = (done.stdout or "") + done.stderr
    assert "Traceback" not in said and "Exception ignored" not in said, said
    if around == "reader gone":
        assert "cannot be written" not in said and "Broken pipe" not in said, said
        code = 2 if command in REFUSED else 128 + signal.SIGPIPE
        assert done.returncode == code, (done.returncode, said)
        return
    assert done.returncode in (0, 1, 2), (done.returncode, said)
    if around == "full output" and command not in ("merge", "watch"):
        assert done.returncode != 0
        assert "disk" not in done.stderr
    if done.returncode and around not in ("closed error", "full error", "nothing open"):
        assert "outpace: " in said, said


@pytest.mark.parametrize(("command", "around"), OFTEN)
def test_a_command_in_odd_surroundings(
    command: str, around: str, run: Path, short: str, tmp_path: Path
) -> None:
    check(command, around, tried(command, around, run, short, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("command", "around"), [one for one in EVERY if one not in OFTEN])
def test_every_command_in_all_odd_surroundings(
    command: str, around: str, run: Path, short: str, tmp_path: Path
) -> None:
    check(command, around, tried(command, around, run, short, tmp_path))


@pytest.mark.parametrize("around", ["full error"])
def test_what_cannot_be_shown_ends_no_training(
    around: str, run: Path, short: str, tmp_path: Path
) -> None:
    done = tried("train", around, run, short, tmp_path)
    assert done.returncode == 0
    assert json.loads((tmp_path / "trained" / "result.json").read_text())["steps"] == 6


def test_the_variable_of_a_folder_that_cannot_be_made_is_named(
    run: Path, short: str, tmp_path: Path
) -> None:
    done = tried("memory", "no folder for compiled code", run, short, tmp_path)
    assert done.returncode == 2
    assert "TORCHINDUCTOR_CACHE_DIR = '/proc/nowhere' points there: set it to" in done.stderr
    assert "--out" not in done.stderr


def test_json_in_ascii_means_the_same(run: Path, short: str, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "Läufe×∑")
    done = tried("runs", "ascii", other, short, tmp_path)
    assert done.returncode == 0 and "Laufe" not in done.stdout and "?" in done.stdout
    words = f"runs {shlex.quote(str(other))} --json"
    paths = {
        **os.environ,
        "PYTHONIOENCODING": "ascii",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    shown = subprocess.run(
        ["bash", "-c", f"{shlex.quote(sys.executable)} -m outpace {words}"], env=paths,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "Läufe×∑" in json.dumps(json.loads(shown.stdout), ensure_ascii=False)
    assert shown.stdout.isascii()
