"""Folders and records carry checksums, which are compared where they are read."""

import json
from pathlib import Path
from typing import ClassVar

import pytest

from outpace.records.base import Record
from outpace.records.checksums import (
    CHECKSUMS_FILE,
    folder_damage,
    require_readable,
    require_small_files,
    write_checksums,
)
from outpace.records.errors import BadInputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    write_checksums(tmp_path)
    return tmp_path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_is_whole_is_taken(folder: Path) -> None:
    require_small_files(folder)
    require_readable(folder / "model.safetensors")
    assert folder_damage(folder) is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_every_damage_is_found_and_said_with_a_way_out(folder: Path, name: str) -> None:
    path = folder / name
    flip(path)
    with pytest.raises(BadInputError, match="checksum that was saved with it") as caught:
        require_readable(path)
    assert str(path) in str(caught.value) and CHECKSUMS_FILE in str(caught.value)
    assert "checksum" in (folder_damage(folder) or "")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadInputError, match=r"bytes instead of"):
        require_small_files(folder)
    path.unlink()
    with pytest.raises(BadInputError, match="is missing"):
        require_small_files(folder)
    path.mkdir()
    with pytest.raises(BadInputError, match="is a folder"):
        require_small_files(folder)


def test_what_was_changed_on_purpose_is_taken_without_checksums(folder: Path) -> None:
    flip(folder / "config.json")
    (folder / CHECKSUMS_FILE).unlink()
    require_small_files(folder)


@pytest.mark.parametrize(
    "content", ['{"config.json": 3}', '{"../x": {"bytes": 1, "xxh3_128": ""}}']
)
def test_checksums_that_are_none_are_refused(folder: Path, content: str) -> None:
    (folder / CHECKSUMS_FILE).write_text(content)
    with pytest.raises(BadInputError, match="is damaged"):
        require_small_files(folder)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(BadInputError, match="git lfs pull"):
        require_readable(path)


class Sealed(Record):
    """A record with a checksum."""

    has_checksum: ClassVar[bool] = True
    name: str
    value: float


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = tmp_path / "sealed.json"
    Sealed(name="é", value=1e-5).save(path)
    return path


def test_a_record_is_read_as_it_was_written_however_it_is_laid_out(sealed: Path) -> None:
    assert Sealed.load(sealed) == Sealed(name="é", value=1e-5)
    values = json.loads(sealed.read_text())
    sealed.write_text(json.dumps(dict(reversed(values.items()))))
    assert Sealed.load(sealed).value == 1e-5


def test_a_record_that_was_changed_is_refused_or_that_is_said(sealed: Path) -> None:
    values = {**json.loads(sealed.read_text()), "value": 2e-5}
    sealed.write_text(json.dumps(values))
    with pytest.raises(BadInputError, match="checksum does not match") as caught:
        Sealed.load(sealed)
    assert "'xxh3_128'" in str(caught.value)
    said: list[str] = []
    assert Sealed.load(sealed, said.append).value == 2e-5
    assert len(said) == 1 and str(sealed) in said[0]
    del values["xxh3_128"]
    sealed.write_text(json.dumps(values))
    assert Sealed.load(sealed).value == 2e-5
