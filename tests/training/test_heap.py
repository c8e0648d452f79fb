"""Memory of the C library: kept for the next step, and touched before the first."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own functions")

MIB = 1 << 20
FAULTS = """
import os, resource, sys, torch
from outpace.training.heap import keep_freed

kept = keep_freed(os.environ) if sys.argv[1] == "keep" else None
faults = []
for _ in range(20):  # the first of them take new memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = torch.ones(1 << 23, requires_grad=True)
    (x.detach() * 2 + x).exp().sum().backward()
    del x
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults), kept)
"""


@pytest.mark.slow
def test_what_was_freed_is_there_for_the_next_step():
    """Each tensor of 32 MiB is 8,192 pages, each of which is a fault where it is new."""

    def faults(*, keep, **environment):
        words = [sys.executable, "-c", FAULTS, "keep" if keep else "not"]
        kept = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
        said = subprocess.run(
            words, env=kept | environment, capture_output=True, text=True, check=True
        ).stdout.split()
        return int(said[0]), said[1]

    (with_it, kept), (without, _) = faults(keep=True), faults(keep=False)
    assert kept == "True" and with_it < 1000 and without > 30_000
    assert faults(keep=True, MALLOC_ARENA_MAX="2")[1] == "False"  # it is the user's


TOUCHED = """
import ctypes, os, resource, sys
from outpace.training.heap import PagePrefaulter

MIB = 1 << 20
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touching = PagePrefaulter(256 * MIB, os.environ)
if sys.argv[1] == "ended":
    touching.end()
touching.start().wait()
ctypes.CDLL(None).malloc_trim(0)  # as a job does before it looks at its memory
with touching.pause() as held:
    pass
if sys.argv[1] == "handed over":
    touching.hand_over()
before = faults()
blocks = [bytearray(MIB) for _ in range(200)]  # zeros that calloc need not write
for block in blocks:
    block[:: 4096] = b"1" * 256
print(faults() - before, held)
"""


def test_memory_is_touched_before_it_is_needed():
    """200 MiB are 51,200 pages, each a fault where it is new and no huge page holds it."""

    def faults(how, **environment):
        kept = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
        words = [sys.executable, "-c", TOUCHED, how]
        said = subprocess.run(words, env=kept | environment, capture_output=True, text=True,
                              check=True).stdout.split()  # fmt: skip
        return int(said[0]), int(said[1])

    touched, held = faults("handed over")
    assert touched < 100 and held == 256 * MIB
    for how in ("held", "ended"):  # at most huge pages of 2 MiB each
        assert faults(how)[0] >= touched + 95
    assert faults("ended")[1] == 0
    found, held = faults("handed over", MALLOC_ARENA_MAX="2")  # it is the user's
    assert found > 40_000 and held == 0


PAUSED = """
import os, time
from outpace.probing.hardware.process_memory import anonymous_bytes
from outpace.training.heap import PagePrefaulter

MIB = 1 << 20
beside = anonymous_bytes()
touching = PagePrefaulter(4096 * MIB, os.environ).start()
while True:
    with touching.pause() as held:
        before = anonymous_bytes()
        time.sleep(0.2)
        after = anonymous_bytes()
    if held >= 256 * MIB:
        break
touching.end()
print(held, before - beside, after - before)
"""


def test_while_touching_is_paused_what_is_there_is_known():
    kept = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    said = subprocess.run([sys.executable, "-c", PAUSED], env=kept, capture_output=True, text=True,
                          check=True).stdout.split()  # fmt: skip
    held, grown, meanwhile = (int(one) for one in said)
    assert held < 4096 * MIB  # it was still at it
    assert abs(grown - held) < 8 * MIB and abs(meanwhile) < MIB
