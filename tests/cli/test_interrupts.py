"""Ctrl-C while something is measured."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from outpace.cli.interrupts import interrupt_once


def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # until Python has looked for signals


def test_two_quick_presses_stop_once_and_the_handler_is_given_back(monkeypatch):
    said, before, now_s = [], signal.getsignal(signal.SIGINT), [100.0]
    monkeypatch.setattr("outpace.cli.interrupts.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with interrupt_once(lambda: said.append("stopping"), lambda: said.append("end")):
        pass
    assert signal.getsignal(signal.SIGINT) is before and said == []
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            interrupt_once(lambda: said.append("stopping"), lambda: said.append("end")),
        ):
            try:
                press()
            finally:
                press()  # while it unwinds
                now_s[0] += 0.6
                press()
        press()  # while the process ends
        assert said == ["stopping", "end"]
        now_s[0] += 0.6
        with pytest.raises(KeyboardInterrupt):  # what came before again
            press()
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)


def probe(*words, until):
    """A probe that has come so far that `until()` is true."""
    command = [sys.executable, "-m", "outpace", "probe", *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        text=True,
    )
    while not until(process):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    return process


def test_two_quick_presses_leave_no_traceback_and_no_file(tmp_path):
    process = probe("storage", "--checkpoint-dir", str(tmp_path), "--offload-dir", str(tmp_path),
                    until=lambda process: list(tmp_path.iterdir()))  # fmt: skip
    process.send_signal(signal.SIGINT)
    time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=600)
    assert said.split("\n") == ["stopping…", "outpace: interrupted", ""]
    # As a shell has it, or ended by a second one that came when Python itself had all but ended.
    assert process.returncode in (130, -signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gloo
def test_ranks_that_take_long_to_stop_are_no_silence():
    def ranks_run(process):
        kin = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, check=False)
        return len(kin.stdout.split()) >= 2

    process = probe("collectives", "--quick", "--nproc=2", until=ranks_run)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stopping…\n"
    process.communicate(timeout=600)
    assert process.returncode != 0
