"""Ranks forked from their launcher: as if they had been started anew, and known as ranks."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from unittest import mock

import psutil
import pytest
import torch

from outpace.launch.forked_ranks import can_fork
from outpace.records.interpreter import PYTHON
from outpace.records.ranks import RANK_NAME

LIMIT_S = 600
PROGRAM = """
import atexit, json, os, signal, stat, sys
from outpace.launch import local

def is_socket(descriptor):
    try:
        return stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    except OSError:
        return False

def begin():
    rank = int(os.environ["RANK"])
    {does}
    said = dict(rank=rank, leads=os.getsid(0) == os.getpid(), ours=os.getppid() == launcher,
                term=signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
                blocked=len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
                sockets=sum(map(is_socket, set(os.listdir("/proc/self/fd")) - {{"0", "1", "2"}})))
    os.write(1, (json.dumps(said) + "\\n").encode())  # at once: ranks share the pipe
    atexit._run_exitfuncs()
    os._exit(0)

launcher = os.getpid()
atexit.register(print, "the launcher has ended")
try:
    local.start(2, ["not-a-command"], begin=begin)
except local.WorkerError as error:
    print(json.dumps([str(error), error.exit_code]))
"""

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux"),
]


def lines_of(does: str) -> list[str]:
    done = subprocess.run(
        [*PYTHON, "-c", PROGRAM.format(does=does)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_forked_rank_is_like_one_that_was_started_anew():
    *said, last = lines_of("pass")
    ranks = sorted((json.loads(line) for line in said), key=lambda own: own["rank"])
    assert [own.pop("rank") for own in ranks] == [0, 1]
    # The launcher's handlers, blocked signals, sockets and what it does at its end are its own.
    alike = {"leads": True, "ours": True, "term": True, "blocked": 0, "sockets": 0}
    assert ranks == [alike, alike]
    assert last == "the launcher has ended"


@pytest.mark.parametrize(
    ("does", "words", "code"),
    [
        pytest.param("os._exit(7) if rank else signal.pause()", "rank 1", 7, id="ends"),
        pytest.param("os.kill(os.getpid(), 9 if rank else 0)", "SIGKILL", 137, id="is killed"),
        pytest.param("1 / (1 - rank)", "rank 1", 1, id="raises"),
    ],
)  # fmt: skip
def test_a_forked_rank_that_fails_is_named(does, words, code):
    message, exit_code = json.loads(lines_of(does)[-2])
    assert words in message and exit_code == code


def test_ranks_are_known_by_name_and_share_what_the_launcher_has_imported(tmp_path):
    command = [*PYTHON, "-m", "outpace", "train", "--model", "outpace-tiny", "--nproc", "2",
               "--device", "cpu", "--steps", "1000000", "--out", str(tmp_path / "run")]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until_s, names = time.monotonic() + LIMIT_S, {}
        while len(names) < 2 and time.monotonic() < until_s and process.poll() is None:
            with suppress(psutil.Error):
                for child in psutil.Process(process.pid).children():
                    if child.name().startswith(RANK_NAME):
                        names[child.name()] = child.cmdline() == command
            time.sleep(0.02)
        process.terminate()
        process.wait(LIMIT_S)
    assert names == {f"{RANK_NAME}0": True, f"{RANK_NAME}1": True}


def test_only_what_computes_on_the_processor_is_forked():
    with mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cuda")):
        assert can_fork("cpu") and not can_fork("auto") and not can_fork("cuda")
