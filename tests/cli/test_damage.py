"""Every file of a run, damaged in every way, before every command that reads it.

Whatever a command does then, nothing that was whole is gone: readers change nothing, a refusal
changes nothing, and a run that is resumed keeps every step, checkpoint and file that it had.
"""

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import cycle
from pathlib import Path
from random import Random

import pytest

from outpace.cli.main import main
from outpace.training.checkpoint import damage as checkpoint_damage

STEPS, KEPT = 4, 2


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def be_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def be_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bit": flip,
    "half": halve,
    "empty": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
    "folder": be_folder,
    "pipe": be_pipe,
    "wrong type": lambda path: path.write_bytes(b"[]\n"),
}
READERS = {
    "eval": ["eval", "--run", "{run}", "--batches=1"],
    "generate": ["generate", "--run", "{run}", "--max-new-tokens=2", "def"],
    "report": ["report", "{run}", "--format=md"],
    "runs": ["runs", "show", "{run}"],
    "list": ["runs", "{run}", "--json"],
    "compare": ["compare", "--runs", "{run}", "{run}/.", "--out={run}/../compared"],
    "further": ["train", "--model={run}", "--measure-only", "{short}", "--out={run}/../other"],
    "again": ["train", "{short}", "--out={run}"],
    "finished": ["train", "--resume", "--out={run}"],
}
RESUME = ["train", "--resume", "--out={run}", f"--steps={STEPS + 1}"]
KINDS = {
    "plain": [],
    "adapter": ["--lora-rank=2", "--init=random"],
    "classifier": ["--task=classify", "--data={rows}", "--eval-data={rows}"],
    "own": ["--model={module}"],
    "zero3": ["--nproc=2", "--strategy=zero3"],
    "tp": ["--nproc=2", "--tp=2"],
}
MODULE = """
from torch import nn


def build():
    return nn.Sequential(nn.Embedding(512, 16), nn.Tanh(), nn.Linear(16, 512))
"""


@pytest.fixture(scope="module")
def short(train_flags: list[str]) -> list[str]:
    left_out = ("--steps", "--save-every")
    return [
        *(word for word in train_flags if word.partition("=")[0] not in left_out),
        f"--steps={STEPS}", "--save-every=1", f"--keep={KEPT}", "--threads=1",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(short: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A finished run of a kind, trained once."""
    made: dict[str, Path] = {}
    given = tmp_path_factory.mktemp("given")
    (given / "rows.csv").write_text(
        "text,label\n" + "".join(f"word {number},{number % 2}\n" for number in range(32))
    )
    (given / "mine.py").write_text(MODULE)
    places = {"rows": given / "rows.csv", "module": f"{given / 'mine.py'}:build"}

    def run(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("damaged") / kind
            words = [word.format(**places) for word in KINDS[kind]]
            own = any(word.startswith("--data=") for word in words)
            common = [word for word in short if not (own and word.startswith("--data="))]
            code, text = said(["train", *common, *words, f"--out={made[kind]}"])
            assert code == 0, text
        return made[kind]

    return run


def said(words: list[str]) -> tuple[int, str]:
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        return main(words), out.getvalue()


def files_of(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def contents(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in files_of(run)}


def told(words: list[str], run: Path, short: list[str]) -> list[str]:
    flags = [one for word in words for one in (short if word == "{short}" else [word])]
    return [word.replace("{run}", str(run)) for word in flags]


def steps_in(run: Path) -> set[int]:
    return {
        json.loads(line)["step"]
        for line in (run / "metrics.jsonl").read_bytes().splitlines()
        if line.startswith(b'{"step"')
    }


def check(run: Path, before: dict[str, bytes], damaged: str, words: list[str], how: str) -> None:
    code, text = said(words)
    where = f"{damaged}, {how}: {' '.join(words[:2])} ended with {code}: {text[-2000:]}"
    assert code in (0, 1, 2) and "Traceback" not in text, where
    after = contents(run)
    if code != 0 or "--resume" not in words:
        assert after == before, where
        return
    assert steps_in(run) >= {STEPS + 1} or words[-1].startswith("--out"), where
    kept = set(after.values())
    whole = [name for name in before if name != damaged]
    if "metrics.jsonl" in whole:
        assert steps_in(run) >= set(range(1, STEPS + 1)), where
    # What is written anew is of the same run; a checkpoint goes only where newer ones are whole.
    anew = ("run.json", "result.json", "evals.jsonl", "metrics.jsonl", "utilisation", "model",
            "failure.json", "checkpoints", "base")  # fmt: skip
    for name in whole:
        assert before[name] in kept or name.split("/")[0] in anew, f"{name} is gone. {where}"
    saved = [path for path in (run / "checkpoints").iterdir() if checkpoint_damage(path) is None]
    assert len(saved) == KEPT, where
    if damaged in before and damaged.startswith(f"checkpoints/step-{STEPS}/"):
        assert before[damaged] in kept, where
    assert (run / "result.json").is_file() and (run / "model").is_dir(), where


def cases(run: Path) -> Iterator[tuple[str, str, list[str]]]:
    for name in files_of(run):
        for how in DAMAGES:
            for words in (RESUME, *READERS.values()):
                yield name, how, words


def try_case(
    run: Path, tmp_path: Path, short: list[str], name: str, how: str, words: list[str]
) -> None:
    shutil.rmtree(tmp_path / "case", ignore_errors=True)
    copy = shutil.copytree(run, tmp_path / "case" / run.name)
    DAMAGES[how](copy / name)
    check(copy, contents(copy), name, told(words, copy, short), how)
    gc.unfreeze()  # each training's groups have threads, which end when they are collected


@pytest.mark.parametrize("turn", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_each_file_damaged_in_some_way_before_a_resume(
    finished: Callable[[str], Path], short: list[str], tmp_path: Path, turn: int
) -> None:
    run = finished("plain")
    ways = cycle(list(DAMAGES)[turn:] + list(DAMAGES)[:turn])
    for name, how in zip(files_of(run), ways, strict=False):
        try_case(run, tmp_path, short, name, how, RESUME)


def test_each_file_damaged_in_some_way_before_some_reader(
    finished: Callable[[str], Path], short: list[str], tmp_path: Path
) -> None:
    run = finished("plain")
    readers = cycle([READERS[one] for one in ("eval", "report", "runs", "generate", "compare")])
    for name, how, words in zip(files_of(run), cycle(DAMAGES), readers, strict=False):
        try_case(run, tmp_path, short, name, how, words)


SAMPLE = 6


@pytest.mark.parametrize(
    "kind",
    [
        "classifier",
        "own",
        pytest.param("zero3", marks=pytest.mark.slow),
        pytest.param("tp", marks=pytest.mark.slow),
    ],
)
def test_some_files_of_other_runs_damaged_before_some_command(
    finished: Callable[[str], Path], short: list[str], tmp_path: Path, kind: str
) -> None:
    run = finished(kind)
    every = list(cases(run))
    draw = Random(kind)
    resumes = draw.sample([case for case in every if case[2] is RESUME], SAMPLE // 2)
    for name, how, words in (*resumes, *draw.sample(every, SAMPLE - SAMPLE // 2)):
        try_case(run, tmp_path, short, name, how, words)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_damaged_in_every_way_before_every_command(
    finished: Callable[[str], Path], short: list[str], tmp_path: Path, kind: str
) -> None:
    run = finished(kind)
    for name, how, words in cases(run):
        try_case(run, tmp_path, short, name, how, words)
