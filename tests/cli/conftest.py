"""A small corpus, and one run that the commands are tried on."""

import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outpace.cli.main import main
from outpace.planner import plan as planner

TINY = (
    "--model=outpace-tiny",
    "--seq-len=32",
    "--global-batch=8",
    "--steps=6",
    "--eval-batches=2",
    "--sample-tokens=8",
    "--precision=fp32",
    "--device=cpu",
)


@pytest.fixture(scope="module")
def planned_once() -> Iterator[None]:
    """Search for plans once where a question is asked again, as for a person and as JSON."""

    def remember(search: Callable[..., Any]) -> Callable[..., Any]:
        found: list[tuple[object, Any]] = []

        def answer(*question: object) -> Any:
            if not any(known == question for known, _ in found):
                found.append((question, search(*question)))
            return next(kept for known, kept in found if known == question)

        return answer

    with pytest.MonkeyPatch.context() as patch:
        for name in ("plans", "throughput"):
            patch.setattr(planner, name, remember(getattr(planner, name)))
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text files, real source code, about 100 kB."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_path("stdlib"))
    for name in (
        "argparse",
        "ast",
        "calendar",
        "csv",
        "glob",
        "heapq",
        "shlex",
        "textwrap",
        "uuid",
    ):
        text = (library / f"{name}.py").read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(text[:12_000], encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def train_flags(corpus: Path, token_cache: Path) -> list[str]:
    """What makes `outpace train` take a second."""
    return [*TINY, f"--data={corpus}", f"--cache-dir={token_cache}"]


@pytest.fixture(scope="session")
def run(train_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["train", *train_flags, f"--out={directory}"]) == 0
    assert json.loads((directory / "result.json").read_text())["steps"] == 6
    return directory
