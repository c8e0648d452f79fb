"""The law of readers: a value or a sentence for a person, in time, and nothing written."""

import contextlib
import io
import os
import resource
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from hypothesis import HealthCheck, given, settings
from readers import Reader
from trees import Instead, Link, Tree, broken

from outpace.records.errors import OutpaceError

# Of the process's own time: what others do on the machine makes nothing hang.
MOST_CPU_S = 30.0
MOST_BYTES = 8 << 30
MOST_LINES, MOST_CHARACTERS = 12, 4000


class LawError(AssertionError):
    """A reader did what none may."""


def plant(tree: Tree, folder: Path) -> None:
    """Write the files."""
    for name, content in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, Link):
            path.symlink_to(content.target)
        elif content is Instead.FOLDER:
            path.mkdir()


def fuzz(reader: Reader, cases: int) -> int:
    """Break its trees in so many ways, always the same; returns how many. Raises LawError."""
    tried = 0

    @settings(max_examples=cases, derandomize=True, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(broken(reader.trees()))
    def each(tree: Tree) -> None:
        nonlocal tried
        tried += 1
        checked(reader, tree)

    each()
    return tried


def checked(reader: Reader, tree: Tree) -> str | None:
    """What the reader refuses the tree with, None where it takes it. Raises LawError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "case"
        folder.mkdir()
        plant(tree, folder)
        return _obeyed(reader, folder)


def _obeyed(reader: Reader, folder: Path) -> str | None:
    before = _seen(folder)
    out = io.StringIO()
    refusal = None
    with _limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            reader.read(folder)
        except OutpaceError as error:
            refusal = str(error)
        except LawError:
            raise
        except BaseException as error:  # a panic of Rust's is no Exception
            raise LawError(f"{reader.name} raised {type(error).__name__}: {error}") from error
    if reader.keeps and _seen(folder) != before:
        raise LawError(f"{reader.name} changed what it read")
    if refusal is not None:
        _require_sentence(reader, refusal, folder, out.getvalue())
    return refusal


def _require_sentence(reader: Reader, refusal: str, folder: Path, printed: str) -> None:
    names = {path.name for path in folder.rglob("*")} | {folder.name}
    if not any(name in refusal for name in names):
        raise LawError(f"{reader.name} names no file: {refusal}")
    if refusal.count("\n") >= MOST_LINES or len(refusal) > MOST_CHARACTERS:
        raise LawError(f"{reader.name} says too much ({len(refusal)} characters): {refusal[:999]}")
    if printed:
        raise LawError(f"{reader.name} printed a part before it refused: {printed[:999]}")


def _seen(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What there is, as it is."""
    return {
        str(path.relative_to(folder)): (
            os.lstat(path).st_mode,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in folder.rglob("*")
    }


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Neither for ever, nor all the memory there is; without warnings, which go elsewhere."""

    def hangs(*_: Any) -> NoReturn:
        raise LawError(f"not done after {MOST_CPU_S:g} s of CPU time")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    handler = signal.signal(signal.SIGPROF, hangs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, hard))
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, handler)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
