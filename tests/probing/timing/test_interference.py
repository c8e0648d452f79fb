"""Whether others used the machine is told from the kernel's counters."""

import shlex
import subprocess
import sys
import time

import pytest

from outpace.probing.timing.interference import (
    CoreSeconds,
    InterferenceWatch,
    disturbance,
    judge_use,
    record_use,
    total,
    withdraw_values,
)
from outpace.probing.timing.section import ProbeSection
from outpace.records.figure import Figure, Key
from outpace.records.probe_results import Advice


def test_what_others_used_is_told_apart_from_what_ranks_of_ones_own_did():
    ranks = [CoreSeconds(10.0, 18.0, 0.0, own, 4) for own in (6.0, 5.0)]
    alone = [CoreSeconds(10.0, 9.9, 0.0, 9.8, 4)]
    found = judge_use([alone, ranks])
    assert found.other_cores == pytest.approx(0.7)
    assert "0.7 cores on one of the hosts" in found.warnings[0]
    assert judge_use([alone]).warnings == ()


def test_what_the_hypervisor_takes_is_said():
    (warning,) = judge_use([[CoreSeconds(10.0, 10.0, 8.0, 10.0, 4)]]).warnings
    assert "gave 20% of the time" in warning


def test_what_was_measured_beside_others_is_withdrawn_with_its_samples_kept():
    assert disturbance([[CoreSeconds(10.0, 10.0, 0.0, 9.9, 2)]]) is None
    assert disturbance([[CoreSeconds(10.0, None, None, 9.9, 2)]]) is None
    why = disturbance(
        [[CoreSeconds(10.0, 10.0, 0.0, 9.9, 2)], [CoreSeconds(10.0, 19.0, 0.0, 10.0, 2)]]
    )
    assert "other programs used 45%" in why
    figure = Figure(key=Key(kind="memory", what="copy"), unit="B/s", value=1e9, origin="measured",
                    low=0.9e9, high=1.1e9, rounds=((1e9,),))  # fmt: skip
    section = ProbeSection((figure,), (Advice(about="heads", text="fewer"),), ("a note",))
    left = withdraw_values(section, why)
    assert (left.figures[0].value, left.figures[0].unstable) == (None, why)
    assert left.figures[0].rounds == figure.rounds
    assert (left.advice, left.notes) == ((), ("a note",))


def test_unknown_is_none():
    found = judge_use([[CoreSeconds(10.0, None, None, 10.0, 4)]], ["GPU 0 is slowed down: heat"])
    assert (found.other_cores, found.stolen) == (None, None)
    assert found.throttled == ("GPU 0 is slowed down: heat",)


def test_counters_are_read_from_the_kernels_file(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 0 500 0 0 0 50 0 0\ncpu0 1\ncpu1 1\n")
    steady = InterferenceWatch(stat)
    stat.write_text("cpu  400 0 100 500 0 0 0 250 0 0\ncpu0 1\ncpu1 1\n")
    used = steady.read_use()
    assert (used.busy_s, used.stolen_s, used.cores) == (4.0, 2.0, 2)
    assert InterferenceWatch(tmp_path / "none").read_use().busy_s is None


SPIN = "import time\nwhile time.process_time() < 1: pass\nprint(flush=True)"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/stat")
def test_what_another_uses_is_seen_and_what_a_child_uses_is_our_own():
    """By what the kernel says that they used: the rest of the machine may do anything."""
    watch, words = InterferenceWatch(), [sys.executable, "-S", "-c", f"{SPIN}\ninput()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        used = watch.read_use()
        child.stdin.write(b"\n")
    for one in (used, watch.read_use()):  # while it runs, and after it
        assert one.probe_s > 0.95 and one.busy_s > 0.95
    # Its parent is gone: whose child it is then, is not known.
    shell = f"{shlex.quote(sys.executable)} -S -c {shlex.quote(SPIN)} &"
    watch, before_s = InterferenceWatch(), time.process_time()
    subprocess.run(["sh", "-c", shell], check=True, capture_output=True)  # until it has printed
    used = watch.read_use()
    assert used.busy_s > 0.95 and used.probe_s < time.process_time() - before_s + 0.5


def test_spells_are_added_up_and_what_is_unknown_in_one_is_unknown():
    used = [CoreSeconds(1.0, 0.5, 0.1, 0.25, 2), CoreSeconds(2.0, 1.5, 0.2, 1.0, 2)]
    assert total(used) == CoreSeconds(3.0, 2.0, pytest.approx(0.3), 1.25, 2)
    assert total([*used, CoreSeconds(1.0, None, None, 0.5, 2)]) == CoreSeconds(
        4.0, None, None, 1.75, 2
    )


def test_only_what_is_used_within_is_noted():
    used, most_s = [], []
    for _ in range(2):
        began = time.perf_counter()
        with record_use(used):
            time.sleep(0.01)
        most_s.append(time.perf_counter() - began)
        time.sleep(0.2)
    assert len(used) == 2
    for one, most in zip(used, most_s, strict=True):
        assert 0.01 <= one.wall_s <= most
