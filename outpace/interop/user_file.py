"""Execution of a user's Python file, to get the function named by `file.py:function`."""

import ast
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from outpace.records.cache_folders import user_cache
from outpace.records.errors import BadInputError, suggest


def load_function(reference: str) -> Callable[[], Any]:
    """Run the file in 'file.py:function' and return the function.

    Call this only for a reference that the user has given, since `require_named` accepts the file
    from then on. Raises BadInputError if the file or the function is missing, or if the file fails.
    """
    file, _, name = reference.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise BadInputError(f"there is no file {file} (from {reference!r})")
    _remember_file(path.resolve())
    module = _import_file(path.resolve())
    functions = [
        key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
    ]
    build = getattr(module, name, None)
    if not callable(build):
        raise BadInputError(
            f"{path} has no function {name!r}.{suggest(name, functions)} "
            f"Give --model {path}:FUNCTION, a function that returns the model."
        )
    found: Callable[[], Any] = build
    return found


def code_fingerprint(reference: str) -> str | None:
    """Return a hash of the code in "file.py:function"; None for other references.

    The hash ignores comments, formatting, and modules that the file imports. It differs between
    Python 3.11 and later versions.
    """
    file = Path(reference.rpartition(":")[0]).expanduser()
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    if sys.version_info >= (3, 13):
        text = ast.dump(tree, show_empty=True)  # the default before 3.13
    else:
        text = ast.dump(tree)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def require_named(reference: str, where: Path) -> None:
    """Refuse code that a file refers to, unless the user named it on this machine before.

    Runs are shared, so anyone may have written the file `where`.
    """
    file = Path(reference.rpartition(":")[0]).expanduser()
    if file.suffix != ".py" or not file.is_file() or str(file.resolve()) in _read_known_files():
        return
    raise BadInputError(
        f"{where} would run code from {file.resolve()}, which you have not used on this machine "
        f"yet. If you trust it, name it yourself: with --model {reference}, or once with another "
        f"command, such as outpace plan --model {reference}"
    )


def _named_code_file() -> Path:
    return user_cache(os.environ) / "named-code.txt"


def _read_known_files() -> set[str]:
    try:
        return set(_named_code_file().read_text(encoding="utf-8").splitlines())
    except (OSError, BadInputError):  # missing, or no home directory
        return set()


def _remember_file(path: Path) -> None:
    if str(path) in _read_known_files() or not str(path).isprintable():
        return
    with suppress(OSError, BadInputError):  # no home directory, or a read-only one
        _named_code_file().parent.mkdir(parents=True, exist_ok=True)
        with _named_code_file().open("a", encoding="utf-8") as file:
            file.write(f"{path}\n")


def _import_file(path: Path) -> ModuleType:
    """Import a file with its folder on the import path, as `python file.py` would."""
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    name = path.stem if path.stem.isidentifier() else f"own_{digest}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) != str(path):
        name = f"{name}_{digest}"
    # Spawned loader workers import the file again under this name.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(
        name, path, loader=_UncachedLoader(name, str(path))
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        sys.modules.pop(name, None)
        raise BadInputError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise BadInputError(failure(error, str(path))) from None
    return module


class _UncachedLoader(importlib.machinery.SourceFileLoader):
    """Loader that always compiles the source.

    A bytecode cache misses changes within a second that keep the file's length.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def failure(error: BaseException, file: str | None) -> str:
    """Return 'file.py:12: ValueError: …' for the last line executed in the user's file."""
    ours = Path(__file__).parent
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if ours not in Path(f.filename).parents
    ]
    own = [frame for frame in frames if frame.filename == file]
    place = f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {error}"
