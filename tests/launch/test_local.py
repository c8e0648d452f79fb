"""Real processes, started by torch's elastic launcher in a process of its own."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gloo

LAUNCHER = """
import sys
from outpace.launch import local

try:
    local.start(2, [sys.executable, "-c", sys.argv[1]])
except local.WorkerError as error:
    print(error)
    sys.exit(error.exit_code)
"""

# A worker that works until a signal, then saves, then ends as `outpace train` does.
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
rank, folder = os.environ["RANK"], Path({folder!r})
signals = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: signals.append(number))
(folder / f"ready-{{rank}}").touch()
while not signals:
    time.sleep(0.01)
time.sleep({saving_s} if rank == "0" else 0)
(folder / f"saved-{{rank}}").write_text(str(signals))
from outpace.cli.main import _report_error
sys.exit(_report_error("interrupted; saved", 75, [], os.environ))
"""


@pytest.fixture
def launch(started: Callable[..., Any], tmp_path: Path) -> Callable[[str], Any]:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    return lambda worker: started(tmp_path / "launcher.py", worker)


def end(launcher: Any) -> tuple[int, str]:
    output, errors = launcher.communicate(timeout=600)
    assert "Traceback" not in errors
    return launcher.returncode, output


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 600
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not come"
        time.sleep(0.02)


def test_every_rank_has_the_environment_of_its_place(
    tmp_path: Path, launch: Callable[[str], Any]
) -> None:
    worker = f"""
import os
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(" ".join(os.environ[n] for n in names))
"""
    assert end(launch(worker)) == (0, "")
    words = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert [w[:4] for w in words] == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]
    assert words[0][4] == words[1][4]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR2])
def test_a_signal_reaches_each_rank_once_and_a_slow_rank_may_finish(
    signum: signal.Signals, tmp_path: Path, launch: Callable[[str], Any]
) -> None:
    launcher = launch(WORKER.format(folder=str(tmp_path), saving_s=1.5))
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    launcher.send_signal(signum)
    launcher.send_signal(signum)  # the same press of a key, arriving twice
    code, output = end(launcher)
    assert (code, output) == (75, "interrupted; saved\n")
    for rank in (0, 1):
        assert (tmp_path / f"saved-{rank}").read_text() == f"[{signum.value}]"


def test_a_second_signal_ends_the_ranks_at_once(
    tmp_path: Path, launch: Callable[[str], Any]
) -> None:
    launcher = launch(WORKER.format(folder=str(tmp_path), saving_s=1200))
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    launcher.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "saved-1")
    time.sleep(0.6)
    launcher.send_signal(signal.SIGTERM)
    code, output = end(launcher)
    assert code == 128 + signal.SIGTERM
    assert "second SIGTERM" in output
    assert not (tmp_path / "saved-0").exists()  # as it would be had it been waited for


def test_a_killed_rank_is_named(launch: Callable[[str], Any]) -> None:
    worker = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1200)
"""
    code, output = end(launch(worker))
    assert code == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in output


def test_an_error_on_one_rank_is_shown_with_its_rank(launch: Callable[[str], Any]) -> None:
    worker = """
import os, sys, time
from outpace.cli.main import _report_error
if os.environ["RANK"] == "1":
    sys.exit(_report_error("shard 3 is damaged", 2, [], os.environ))
time.sleep(1200)
"""
    assert end(launch(worker)) == (2, "rank 1: shard 3 is damaged\n")


def test_what_names_the_rank_to_blame_gets_no_other_rank_before_it(
    launch: Callable[[str], Any],
) -> None:
    worker = """
import os, sys, time
from outpace.cli.main import _report_error
if os.environ["RANK"] == "1":
    sys.exit(_report_error("out of memory: rank 0 needs more", 4, [], os.environ))
time.sleep(1200)
"""
    assert end(launch(worker)) == (4, "out of memory: rank 0 needs more\n")


def test_a_message_of_all_ranks_is_shown_once(launch: Callable[[str], Any]) -> None:
    worker = """
import os, sys, time
from outpace.cli.main import _report_error
sys.exit(_report_error("no such model", 2, [], os.environ))
"""
    code, output = end(launch(worker))
    assert code == 2
    assert output in ("no such model\n", "rank 1: no such model\n")
