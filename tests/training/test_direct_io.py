"""Files written and read past the cache are the same files."""

import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.training import direct_io
from outpace.training.direct_io import DirectWriter, blocks

SIZES = st.lists(st.one_of(st.integers(0, 5000), st.integers(0, 9 << 20)), max_size=5)


def written(path, pieces):
    with DirectWriter(path) as file:
        for at, piece in enumerate(pieces):
            assert file.tell() == sum(map(len, pieces[:at]))
            assert file.write(piece) == len(piece)


def works_past_cache(folder):
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0)))
    except OSError:
        return False
    return hasattr(os, "O_DIRECT")


@settings(max_examples=25, deadline=None)
@given(SIZES)
def test_what_is_written_is_what_is_read(tmp_path_factory, sizes):
    path = tmp_path_factory.mktemp("past") / "file"
    pieces = [os.urandom(size) for size in sizes]
    written(path, pieces)
    whole = b"".join(pieces)
    assert path.read_bytes() == whole
    assert b"".join(map(bytes, blocks(path, past_cache=True))) == whole
    assert b"".join(map(bytes, blocks(path, past_cache=False))) == whole


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_that_cannot_is_written_through_its_cache(tmp_path, monkeypatch, refused):
    if not works_past_cache(tmp_path):
        pytest.skip("this file system has no O_DIRECT to be refused")
    real = {"open": os.open, "write": os.write}
    asked = []

    def refusing_open(path, flags, *mode):
        if flags & direct_io._DIRECT:
            asked.append("open")
            raise OSError(22, "Invalid argument")
        return real["open"](path, flags, *mode)

    def refusing_write(file, data):
        if fcntl.fcntl(file, fcntl.F_GETFL) & direct_io._DIRECT:
            asked.append("write")
            raise OSError(22, "Invalid argument")
        return real["write"](file, data)

    monkeypatch.setattr(os, refused, {"open": refusing_open, "write": refusing_write}[refused])
    pieces = [os.urandom(9 << 20), b"end"]
    written(tmp_path / "file", pieces)
    assert asked
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


def test_a_full_disk_is_told():
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="No space left"), DirectWriter(Path("/dev/full")) as file:
        file.write(bytes(9 << 20))
    with pytest.raises(OSError, match="No space left"), DirectWriter(Path("/dev/full")) as file:
        file.write(b"a little")
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        DirectWriter(tmp_path / "nowhere" / "file")
