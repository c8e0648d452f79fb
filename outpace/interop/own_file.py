"""A person's Python file, run for the function that `file.py:function` names."""

import hashlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from outpace.records.errors import BadInputError, nearest


def load_function(reference: str) -> Callable[[], Any]:
    """The function that 'file.py:function' names. Runs the file. Raises BadInputError."""
    file, _, name = reference.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise BadInputError(f"there is no file {file} (from {reference!r})")
    module = _run_file(path.resolve())
    functions = [
        key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
    ]
    build = getattr(module, name, None)
    if not callable(build):
        raise BadInputError(
            f"{path} has no function {name!r}.{nearest(name, functions)} "
            f"Give --model {path}:FUNCTION, a function that returns the model."
        )
    found: Callable[[], Any] = build
    return found


def _run_file(path: Path) -> ModuleType:
    """Import a file, as `python file.py` would: beside it lie the modules that it may import."""
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    name = path.stem if path.stem.isidentifier() else f"own_{digest}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) != str(path):
        name = f"{name}_{digest}"
    # Loader workers that are spawned import the file again by this name.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path, loader=_AsWritten(name, str(path)))
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


class _AsWritten(importlib.machinery.SourceFileLoader):
    """Compiles the file as it is now: Python's bytecode cache takes a file of the same second and
    size for the old one.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def failure(error: BaseException, file: str | None) -> str:
    """'file.py:12: ValueError: …': the last line of the person's own file, or the last at all."""
    ours = Path(__file__).parent
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != ours
    ]
    own = [frame for frame in frames if frame.filename == file]
    place = f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {error}"
