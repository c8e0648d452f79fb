"""Real processes: what a run takes is told apart from what the host does."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import psutil

from outpace.probing.utilisation.host_load import HostReader, Processes, Rate
from outpace.probing.utilisation.sampler import Sampler

SPIN = "while True: pass"
SLEEP = "import time; print('asleep', flush=True); time.sleep(600)"
# A child that spins for half a second of processor time and ends, of a parent that waits for it.
SHORT = (
    "import subprocess, sys, time\n"
    "code = 'import time\\nwhile time.process_time() < 0.5: pass'\n"
    "subprocess.run([sys.executable, '-S', '-c', code]); print('done', flush=True); time.sleep(600)"
)


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def spent_s(child: subprocess.Popen[str]) -> float:
    times = psutil.Process(child.pid).cpu_times()
    return float(times.user + times.system)


def test_a_process_that_spins_is_busy_and_one_that_sleeps_is_not():
    with running(SPIN) as spinning, running(SLEEP) as sleeping:
        assert sleeping.stdout is not None and sleeping.stdout.readline() == "asleep\n"
        most_s = spent_s(spinning)
        with mock.patch("time.monotonic", return_value=100.0):
            busy, idle = (HostReader(Processes([one.pid])) for one in (spinning, sleeping))
        least_s = spent_s(spinning)
        while spent_s(spinning) - least_s < 0.5:
            time.sleep(0.05)
        least_s = spent_s(spinning) - least_s
        host, resting = busy.read(101.0), idle.read(101.0)
        most_s = spent_s(spinning) - most_s
    # What the kernel gave it: other work on this machine may have had the core for a while.
    assert least_s - 0.01 < host.run_cores < most_s + 0.01
    assert resting.run_cores < 0.05
    assert host.utilisation is not None and 0 < host.utilisation <= 1
    assert all(0 <= core <= 1 for core in host.cores)
    assert 1 << 20 < host.run_memory_bytes < host.memory_bytes < host.memory_total_bytes


def test_what_a_process_starts_is_of_the_run_also_after_its_end():
    with running(SHORT) as parent:
        processes = Processes([parent.pid])
        first = processes.read_usage()
        assert parent.stdout is not None and parent.stdout.readline() == "done\n"
        last = processes.read_usage()
    assert first is not None and last is not None
    assert 0.45 < last[0] - first[0] < 3


def test_a_run_that_has_ended_is_unknown():
    with running(SLEEP) as child:
        sampler = Sampler([child.pid])
        assert not sampler.run_ended
        child.kill()  # not waited for: still in the process table
        deadline_s = time.monotonic() + 120
        while not sampler.run_ended and time.monotonic() < deadline_s:
            load = sampler.read()
    assert sampler.run_ended
    assert load.host.run_cores is None and load.host.run_memory_bytes is None
    assert load.host.memory_bytes is not None


def test_a_counter_that_is_set_back_is_unknown_unless_it_is_known_to_wrap():
    plain, wrapping = Rate(), Rate(wraps_at=100)
    for rate in (plain, wrapping):
        assert rate.per_s(90, 0.0) is None
        assert rate.per_s(92, 2.0) == 1.0
    assert plain.per_s(2, 4.0) is None and plain.per_s(4, 5.0) == 2.0
    assert wrapping.per_s(2, 4.0) == 5.0
    assert wrapping.per_s(None, 5.0) is None and wrapping.per_s(9, 6.0) is None


def test_reading_costs_far_less_than_a_hundredth_of_a_core():
    reader = HostReader(Processes([psutil.Process().pid]))
    began_s, count = time.thread_time(), 20
    for _ in range(count):
        reader.read(time.monotonic())
    assert (time.thread_time() - began_s) / count < 0.005  # a sample a second: 0.5 %
