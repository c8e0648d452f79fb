"""A process ends after gloo's threads have come to rest."""

import subprocess
import sys

import pytest

from outpace.parallel.leaving import _THREAD

# A thread by the name of gloo's computes without Python's lock, as the process comes to its end.
# What is registered first is called last.
PROGRAM = """
import atexit, hashlib, os, sys, threading
from pathlib import Path
from outpace.parallel.leaving import leave_after_gloo

held = ["a tensor"]
begun = threading.Event()

def exchange():
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(sys.argv[1])
    begun.set()
    hashlib.sha256(bytes(1 << 28)).digest()
    held.clear()

atexit.register(lambda: print(len(held)))
leave_after_gloo()
leave_after_gloo()
threading.Thread(target=exchange, daemon=True).start()
begun.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are told apart in /proc")
@pytest.mark.parametrize(("name", "held"), [(_THREAD, "0"), ("another", "1")])
def test_a_process_ends_after_gloo_has_let_go(name, held):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.strip(), done.stderr, done.returncode) == (held, "", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are told apart in /proc")
def test_gloo_has_threads_of_that_name():
    """Which torch gives them: another name would leave them out without a word."""
    program = f"""
import torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print({_THREAD!r} in names)
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr
