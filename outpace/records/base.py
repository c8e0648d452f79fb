"""The base of every record: frozen, no unknown keys, JSON in and out, errors for people."""

import json
import os
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from outpace.records.errors import BadInputError, nearest


class Record(BaseModel):
    """An immutable value with a JSON form. Unknown keys and bad values are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), ser_json_inf_nan="constants"
    )

    @classmethod
    def parse(cls, values: dict[str, Any], where: str) -> Self:
        """Build the record from plain values.

        `where` names their origin in the error ("plan.json"). Raises BadInputError with one
        sentence per problem.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise BadInputError(explain(error, where, cls.model_fields)) from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record from a JSON file. Raises BadInputError."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInputError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise BadInputError(f"{path} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise BadInputError(f"{path} holds a JSON {type(values).__name__}, not an object")
        return cls.parse(values, str(path))

    def save(self, path: Path) -> None:
        """Write the record as JSON, whole or not at all."""
        write_atomic(path, self.model_dump_json(indent=2) + "\n")


def explain(error: ValidationError, where: str, known: Any) -> str:
    """Turn pydantic's list of problems into sentences for a person."""
    problems = error.errors()
    # A misspelt or bad key leaves others underived: what is wrong is said, not what follows of it.
    wrong = [problem for problem in problems if problem["type"] != "missing"]
    sentences = []
    for problem in wrong or problems:
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            sentences.append(f"{where}: unknown key {name!r}.{nearest(name, known)}")
        elif problem["type"] == "value_error":
            sentences.append(f"{where}: {name + ': ' if name else ''}{problem['ctx']['error']}")
        elif problem["type"] == "missing":
            sentences.append(f"{where}: {name} is missing")
        else:
            sentences.append(f"{where}: {name} = {problem['input']!r}: {problem['msg']}")
    return "\n".join(sentences)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` so that a reader sees the old file or the new, never a part."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until every file is on the disk: some file systems say only then that it is full."""
    sync_paths(*folder.rglob("*"), folder)


def sync_paths(*paths: Path) -> None:
    """Wait until each file's contents, or the names in each folder, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
