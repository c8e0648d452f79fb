"""Whether others used the machine is told from the kernel's counters."""

import subprocess
import sys

import pytest

from outpace.probe.section import Section
from outpace.probe.steady import Steady, Used, disturbed, judged, withdrawn
from outpace.records.figure import Figure, Key
from outpace.records.probed import Advice


def test_what_others_used_is_told_apart_from_what_ranks_of_ones_own_did():
    ranks = [Used(10.0, 18.0, 0.0, own, 4) for own in (6.0, 5.0)]
    alone = [Used(10.0, 9.9, 0.0, 9.8, 4)]
    found = judged([alone, ranks])
    assert found.other_cores == pytest.approx(0.7)
    assert "0.7 cores on one of the hosts" in found.warnings[0]
    assert judged([alone]).warnings == ()


def test_what_the_hypervisor_takes_is_said():
    (warning,) = judged([[Used(10.0, 10.0, 8.0, 10.0, 4)]]).warnings
    assert "gave 20% of the time" in warning


def test_what_was_measured_beside_others_is_withdrawn_with_its_samples_kept():
    assert disturbed([[Used(10.0, 10.0, 0.0, 9.9, 2)]]) is None
    assert disturbed([[Used(10.0, None, None, 9.9, 2)]]) is None
    why = disturbed([[Used(10.0, 10.0, 0.0, 9.9, 2)], [Used(10.0, 19.0, 0.0, 10.0, 2)]])
    assert "others used 45%" in why
    figure = Figure(key=Key(kind="memory", what="copy"), unit="B/s", value=1e9, origin="measured",
                    low=0.9e9, high=1.1e9, rounds=((1e9,),))  # fmt: skip
    section = Section((figure,), (Advice(about="heads", text="fewer"),), ("a note",))
    left = withdrawn(section, why)
    assert (left.figures[0].value, left.figures[0].unstable) == (None, why)
    assert left.figures[0].rounds == figure.rounds
    assert (left.advice, left.notes) == ((), ("a note",))


def test_unknown_is_none():
    found = judged([[Used(10.0, None, None, 10.0, 4)]], ["GPU 0 is slowed down: heat"])
    assert (found.other_cores, found.stolen) == (None, None)
    assert found.throttled == ("GPU 0 is slowed down: heat",)


def test_counters_are_read_from_the_kernels_file(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 0 500 0 0 0 50 0 0\ncpu0 1\ncpu1 1\n")
    steady = Steady(stat)
    stat.write_text("cpu  400 0 100 500 0 0 0 250 0 0\ncpu0 1\ncpu1 1\n")
    used = steady.used()
    assert (used.busy_s, used.stolen_s, used.cores) == (4.0, 2.0, 2)
    assert Steady(tmp_path / "none").used().busy_s is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/stat")
def test_a_process_of_another_is_seen():
    spin = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as other:
        steady = Steady()
        while steady.used().wall_s < 1.0:
            pass
        used = steady.used()
        assert used.busy_s - used.own_s > 0.2
        other.kill()
