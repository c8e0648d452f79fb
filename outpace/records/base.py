"""Base class of all records: frozen, no unknown keys, JSON in and out, readable errors."""

import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outpace.records.errors import BadInputError, excerpt, json_error, shorten, suggest

Value = TypeVar("Value")
OnChange = Callable[[str], None]  # called with a message about a changed file
# Prefix of temporary files. A folder with only such files counts as empty.
TEMPORARY_PREFIX = ".outpace-"
# Maximum number of problems to report for a record.
_MOST_PROBLEMS = 8

_MOST_BYTES = 64 << 20  # size limit of a record's file, since devices such as /dev/zero never end
_CHECKSUM = "xxh3_128"  # key of the checksum in a record's file
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Errors from file systems that cannot sync a folder (CIFS, some FUSE ones).
_NO_FOLDER_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS, errno.EISDIR)
# Suffixes of unfinished downloads by huggingface_hub, curl, wget, aria2 and browsers.
_UNFINISHED = (".incomplete", ".part", ".aria2", ".crdownload", ".download")
_JSON_KINDS = {list: "list", str: "string", bool: "true or false", type(None): "null"}
_MOST_LEVELS = 100  # of nested values; Python's recursion limit allows a few hundred


def entry(text: str, default: Any = None) -> Any:
    """Declare a record's field with a default and a description."""
    return Field(default=default, description=text)


class Record(BaseModel):
    """An immutable value with a JSON form. Unknown keys and bad values are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        ser_json_inf_nan="constants",
        # A renamed field keeps its key in files: the alias is written, and both names are read.
        validate_by_name=True,
        serialize_by_alias=True,
    )

    # Whether `save` writes a checksum into the file, which readers verify.
    has_checksum: ClassVar[bool] = False
    # Whether `save` writes one line instead of indented ones, for records with long series.
    is_compact: ClassVar[bool] = False
    # Columns of a notebook's table, such as "estimate.step_time_s"; default: all scalar fields.
    summary_fields: ClassVar[tuple[str, ...]] = ()

    def _repr_html_(self) -> str:
        from outpace.records.html_tables import record_html

        return record_html(self)

    @classmethod
    def parse(cls, values: dict[str, Any], where: str) -> Self:
        """Build the record from plain values.

        `where` names the source of the values in errors ("plan.json"). Raises BadInputError with
        one sentence per problem.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise BadInputError(explain(error, where, cls.model_fields)) from None

    @classmethod
    def load(cls, path: Path, on_change: OnChange | None = None, option: str = "") -> Self:
        """Read the record from a JSON file.

        `option` is the flag that named the file, for errors. Raises BadInputError if the file
        cannot be read or its values are invalid. If its checksum does not match, `on_change` is
        called with a message; without `on_change`, BadInputError is raised.
        """
        return cls.parse(read_object(path, on_change, option), str(path))

    def save(self, path: Path) -> None:
        """Write the record as JSON, atomically. Raises OSError."""
        write_atomic(path, self.as_file())

    def as_file(self) -> str:
        """Return the JSON text that `save` writes."""
        indent = None if self.is_compact else 2
        text = self.model_dump_json(indent=indent)
        if self.has_checksum:
            values = json.loads(text)
            values = {**values, _CHECKSUM: _checksum(values)}
            separators = (",", ":") if self.is_compact else None
            text = json.dumps(values, indent=indent, separators=separators, ensure_ascii=False)
        return text + "\n"


def _checksum(values: dict[str, Any]) -> str:
    """Hash a record's values. The hash does not depend on how the JSON file is formatted."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode(errors="surrogatepass"))


def read_json(path: Path, on_change: OnChange | None = None, option: str = "") -> Any:
    """Parse a JSON file, and verify and remove its checksum.

    `option` is the flag that named the file, for errors. Raises BadInputError if the file is
    unreadable, too large or not JSON. If the checksum does not match, `on_change` is called with a
    message; without `on_change`, BadInputError is raised.
    """
    with _explain_read_errors(path, "JSON", option):
        refuse_pipe(path)
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise BadInputError(
                f"{path} is larger than {_MOST_BYTES >> 20} MiB, the limit for a record"
            )
        values = _check_depth(json.loads(content))
    if isinstance(values, dict) and _CHECKSUM in values:
        written = values.pop(_CHECKSUM)
        if written != _checksum(values):
            sentence = f"{path} was changed since outpace wrote it: its checksum does not match"
            if on_change is None:
                raise BadInputError(
                    f"{sentence}. Restore the original; if you edited it on purpose, remove "
                    f"its entry {_CHECKSUM!r}."
                )
            on_change(sentence)
    return values


def read_object(path: Path, on_change: OnChange | None = None, option: str = "") -> dict[str, Any]:
    """Parse a JSON file that must contain an object. Raises the same errors as `read_json`."""
    values = read_json(path, on_change, option)
    if not isinstance(values, dict):
        kind = _JSON_KINDS.get(type(values), "number")
        raise BadInputError(f"{path} holds a JSON {kind}, not an object")
    return values


def require_fetched(folder: Path) -> None:
    """Refuse a folder that contains broken links or unfinished downloads.

    Loaders would ignore these files and initialise the missing weights at random.
    """
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.exists():
            raise BadInputError(
                f"{path} is a broken link to {path.readlink()}. Download {folder} again, or copy "
                "it with the targets of its links (cp -rL)."
            )
        if path.suffix in _UNFINISHED and not path.with_suffix("").exists():
            raise BadInputError(
                f"{path} is an unfinished download. Download {folder} again, or remove the file."
            )


def require_no_pointer(path: Path) -> None:
    """Refuse a Git LFS pointer, a placeholder for a file that was not fetched.

    Raises BadInputError, including for a file that cannot be read.
    """
    try:
        refuse_pipe(path)
        with path.open("rb") as file:
            begin = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
    if begin == _LFS_POINTER:
        raise BadInputError(
            f"{path} is a Git LFS pointer, not the file itself. Download the file with git lfs pull"
        )


def read_toml(path: Path, option: str = "") -> dict[str, Any]:
    """Parse a TOML file. `option`: the flag that named the file, for errors.

    Raises BadInputError if the file is unreadable or not TOML.
    """
    import tomllib

    with _explain_read_errors(path, "TOML", option):
        refuse_pipe(path)
        with path.open("rb") as file:
            return _check_depth(tomllib.load(file))


def refuse_pipe(path: Path) -> None:
    """Raise OSError for a named pipe, since reading it would block until someone writes to it.

    A shell's `<(…)` creates pipes in /dev that have a writer, so these are accepted.
    """
    if path.parts[:2] != ("/", "dev") and path.is_fifo():
        raise OSError(errno.EINVAL, "it is a named pipe, not a file", str(path))


@contextmanager
def _explain_read_errors(path: Path, kind: str, option: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInputError(f"cannot read {option}{format_path(path)}: {error.strerror}") from None
    except RecursionError as error:
        raise BadInputError(
            f"cannot read {format_path(path)} as {kind}: {json_error(error)}"
        ) from None
    except ValueError as error:
        require_no_pointer(path)
        line = _quote_line(path, str(error)) if kind == "TOML" else ""
        raise BadInputError(
            f"{option}{format_path(path)} is not {kind}: {json_error(error)}{line}"
        ) from None


def _quote_line(path: Path, message: str) -> str:
    """Quote the line that a TOML error names, or the last line if it names none."""
    with suppress(OSError, UnicodeDecodeError, IndexError):
        lines = path.read_text(encoding="utf-8").rstrip().splitlines()
        found = re.search(r"at line (\d+)", message)
        number = int(found[1]) if found else len(lines)
        return f". Line {number} is {excerpt(lines[number - 1])}"
    return ""


def format_path(path: Path) -> str:
    """Format a path for a message, quoted if it has unprintable characters."""
    return str(path) if str(path).isprintable() else repr(str(path))


def _check_depth(value: Value) -> Value:
    """Return `value` unchanged, or raise RecursionError if it is nested too deeply."""
    level: list[Any] = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return value
    raise RecursionError


def explain(error: ValidationError, where: str, known: Any) -> str:
    """Format the first few errors from pydantic, one sentence each."""
    problems = error.errors()
    # A misspelled key also leaves the correct one missing: report only the cause.
    wrong = [problem for problem in problems if problem["type"] != "missing"]
    chosen = wrong or problems
    sentences = [f"{where}: {_format_problem(one, known)}" for one in chosen[:_MOST_PROBLEMS]]
    if len(chosen) > _MOST_PROBLEMS:
        sentences.append(f"{where}: and {len(chosen) - _MOST_PROBLEMS} more problems")
    return "\n".join(sentences)


def _format_problem(problem: Any, known: Any) -> str:
    name = shorten(".".join(str(part) for part in problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"unknown key {name!r}.{suggest(name, known)}"
    if problem["type"] == "value_error":
        return f"{name + ': ' if name else ''}{shorten(str(problem['ctx']['error']), 1000)}"
    if problem["type"] == "missing":
        return f"{name} is missing"
    said = f"{name} = {excerpt(problem['input'])}: {shorten(problem['msg'], 1000)}"
    close = suggest_choice(problem)
    return f"{said}.{close}" if close else said


def suggest_choice(problem: Any) -> str:
    """Return ' Did you mean …?' for pydantic's error about a word that is not in a closed list.

    Return '' for other errors, and if no word of the list is similar.
    """
    if problem["type"] != "literal_error" or not isinstance(problem["input"], str):
        return ""
    return suggest(problem["input"], re.findall("'([^']*)'", problem["ctx"]["expected"]))


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` so that readers see either the old file or the new one.

    An existing file keeps its mode and owner. If `path` is not a regular file (a device, a named
    pipe, /dev/stdout), the content is written into it. Raises OSError.
    """
    data = content.encode() if isinstance(content, str) else content
    if _must_write_in_place(path):
        with path.open("wb", buffering=0) as file:
            _write_all(file, data)
        return
    before = path.stat() if path.is_file() and not path.is_symlink() else None
    temporary = path.with_name(temporary_name(path))
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # never follows a link
            if before is not None:
                _copy_access(file.fileno(), before)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> str:
    """Return a name for a temporary copy of a file, short enough for any file system."""
    return f"{TEMPORARY_PREFIX}{zlib.crc32(path.name.encode()):08x}-{os.getpid()}.tmp"


def _must_write_in_place(path: Path) -> bool:
    """Return whether `path` cannot be replaced: a device, a pipe, or a link in /dev."""
    if path.is_symlink() and path.parent == Path("/dev"):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def _write_all(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _copy_access(descriptor: int, before: os.stat_result) -> None:
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
        with suppress(OSError):
            os.fchown(descriptor, before.st_uid, before.st_gid)
    with suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def put_aside(path: Path, kind: str = "damaged", folder: Path | None = None) -> Path:
    """Rename a file to the first free `NAME.kind-1`, `NAME.kind-2`, … and return the new path.

    The file stays in its folder, or moves to `folder` on the same file system. Raises OSError.
    """
    folder, number = folder or path.parent, 1
    folder.mkdir(exist_ok=True)
    while os.path.lexists(aside := folder / f"{path.name}.{kind}-{number}"):
        number += 1
    return path.rename(aside)


def keep_memo(path: Path, content: str | bytes) -> None:
    """Cache a result in a file, and create its folder if needed.

    Errors are ignored: if the file cannot be written, the next call computes the result again.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)


def sync_folder(folder: Path) -> None:
    """Sync a folder and everything in it. Some file systems report a full disk only then."""
    sync_paths(*folder.rglob("*"), folder)


def sync_paths(*paths: Path) -> None:
    """Sync the contents of files and the entries of folders to the disk.

    Folders are skipped on file systems that cannot sync them. Raises OSError.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC or not path.is_dir():
                raise
        finally:
            os.close(descriptor)
