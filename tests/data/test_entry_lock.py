"""Who waits for an entry of a cache, and for how long."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from outpace.data.entry_lock import entry_lock
from outpace.records.errors import BadInputError

HOLD = """
import sys, time
from pathlib import Path
from outpace.data.entry_lock import entry_lock
with entry_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def held(tmp_path):
    """A lock that another process holds, for so long."""
    started = []

    def hold(seconds):
        path = tmp_path / "entry.lock"
        words = [sys.executable, "-c", HOLD, str(path), str(seconds)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return path, process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def test_one_that_works_is_waited_for(held, tmp_path):
    path, _ = held(2.5)
    with entry_lock(path, stopped_limit_s=1):
        assert (tmp_path / "entry.holder").is_file()
    assert not (tmp_path / "entry.holder").exists()


def test_one_that_is_stopped_is_named(held):
    path, process = held(1000)
    os.kill(process.pid, signal.SIGSTOP)
    with (
        pytest.raises(
            BadInputError,
            match=rf"process {process.pid} \(python.*\), which makes .*stopped for 2 s.*-CONT",
        ),
        entry_lock(path, stopped_limit_s=2),
    ):
        pass


def test_one_that_is_killed_is_not_waited_for(held):
    path, process = held(1000)
    process.kill()
    process.wait()
    with entry_lock(path):
        pass


@pytest.mark.parametrize("answer", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_waited_for(tmp_path, monkeypatch, answer):
    def refuse(*words):
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=os.strerror(answer)), entry_lock(tmp_path / "entry.lock"):
        pass
