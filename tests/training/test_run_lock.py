"""One training at a time in a directory."""

import errno
import fcntl
import subprocess
import sys
import threading

import pytest

from outpace.records.errors import BadInputError
from outpace.training.run_lock import lock_run

HOLDER = """
import sys
from pathlib import Path
from outpace.training.run_lock import lock_run
with lock_run(Path(sys.argv[1]), 0.0):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the directory until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_directory_that_another_holds_is_refused_with_who_has_it(tmp_path, holder):
    with pytest.raises(BadInputError, match=rf"process {holder.pid} on .*another --out"):
        lock_run(tmp_path, 0.0).__enter__()


@pytest.mark.parametrize("end", ["kill", "in order"])
def test_it_is_waited_for_and_then_is_ours(tmp_path, holder, end):
    told = []

    def ended(what):
        told.append(what)
        holder.kill() if end == "kill" else holder.stdin.close()

    with lock_run(tmp_path, 20.0, ended):
        with pytest.raises(BadInputError, match="another process"):
            lock_run(tmp_path, 0.0).__enter__()
        assert len(told) == 1 and f"process {holder.pid}" in told[0]
    assert not list(tmp_path.iterdir())


def test_of_many_that_wait_one_has_it_at_a_time(tmp_path):
    inside, most = [], []

    def enter():
        for _ in range(5):
            with lock_run(tmp_path, 60.0):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 20 and max(most) == 1


def test_where_nothing_can_be_written_is_said(tmp_path):
    with pytest.raises(BadInputError, match=r"cannot write to .*gone: No such file"):
        lock_run(tmp_path / "gone", 0.0).__enter__()


def test_where_there_are_no_locks_everybody_may(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_run(tmp_path, 0.0), lock_run(tmp_path, 0.0):
        pass
