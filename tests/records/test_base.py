"""Files are written whole, in the place of what was a file, and into what is none."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from outpace.records.base import (
    put_aside,
    read_json,
    require_fetched,
    require_no_pointer,
    sync_folder,
    write_atomic,
)
from outpace.records.errors import BadInputError


def test_a_named_pipe_stays_one_and_gets_what_is_written(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_atomic(pipe, "x" * 200_000)  # more than a pipe holds
    reader.join(30)
    assert read == [b"x" * 200_000] and stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.root
def test_a_device_stays_one(tmp_path: Path) -> None:
    device = tmp_path / "null"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    write_atomic(device, "words")
    assert stat.S_ISCHR(device.stat().st_mode)


def test_a_link_to_a_device_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    write_atomic(link, "words")
    assert link.is_symlink() and stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_file_keeps_its_mode_and_a_new_one_has_the_usual(tmp_path: Path) -> None:
    path = tmp_path / "file"
    usual = 0o666 & ~os.umask(os.umask(0o022))
    write_atomic(path, "one")
    assert stat.S_IMODE(path.stat().st_mode) == usual
    for mode in (0o600, 0o664):
        path.chmod(mode)
        write_atomic(path, "two")
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_text() == "two" and list(tmp_path.iterdir()) == [path]


def test_a_name_as_long_as_file_systems_take_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write_atomic(path, "words")
    assert path.read_text() == "words"


def test_what_is_put_aside_takes_no_other_name(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "file").write_text(str(number))
        aside = put_aside(tmp_path / "file")
        assert aside == tmp_path / f"file.damaged-{number}" and aside.read_text() == str(number)


def test_a_named_pipe_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(BadInputError, match="it is a named pipe, not a file"):
        read_json(tmp_path / "plan.json")
    with pytest.raises(BadInputError, match="it is a named pipe, not a file"):
        require_no_pointer(tmp_path / "plan.json")


def test_folders_are_not_awaited_where_a_file_system_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFS and some of FUSE; what files answer, such as that the disk is full, counts."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("a")
    answers = {True: errno.EINVAL, False: 0}

    def sync(descriptor: int) -> None:
        if answer := answers[stat.S_ISDIR(os.fstat(descriptor).st_mode)]:
            raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(os, "fsync", sync)
    sync_folder(tmp_path)
    for answers in ({True: errno.EIO, False: 0}, {True: 0, False: errno.EINVAL}):
        with pytest.raises(OSError, match=os.strerror(max(answers.values()))):
            sync_folder(tmp_path)


def test_a_folder_that_was_fetched_in_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("a")
    (tmp_path / "config.json").symlink_to("blob")
    (tmp_path / "done.part").write_text("a")
    (tmp_path / "done").write_text("ab")
    require_fetched(tmp_path)
    (tmp_path / "model.safetensors.incomplete").write_text("a")
    with pytest.raises(BadInputError, match=r"model.safetensors.incomplete is an unfinished"):
        require_fetched(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(BadInputError, match=r"is a broken link to ../blobs/gone"):
        require_fetched(tmp_path)
