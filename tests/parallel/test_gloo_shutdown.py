"""A process ends after gloo's threads have come to rest."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are told apart in /proc")
GLOO = "pt_gloo_runloop"

# A thread computes without the lock as the process comes to its end: for a moment, or for good.
# What is registered first is called last.
COMPUTING = """
import atexit, hashlib, sys, threading
from pathlib import Path
from outpace.parallel.gloo_shutdown import register_gloo_shutdown

held = ["a tensor"]
begun = threading.Event()

def exchange(name, rounds):
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
    data = bytes(1 << 26)
    begun.set()
    for _ in range(int(rounds)):
        hashlib.sha256(data).digest()
    held.clear()

atexit.register(lambda: print(len(held)))
register_gloo_shutdown()
register_gloo_shutdown()
threading.Thread(target=exchange, args=sys.argv[1:], daemon=True).start()
begun.wait()
"""

THREADS = """
import torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()  # which one of them has done, and so has named itself
print(*(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")))
dist.destroy_process_group()
"""


def _says(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("name", "rounds", "held"), [(GLOO, "1", "0"), ("another", "1000000", "1")]
)
def test_a_process_ends_after_gloo_has_let_go(name, rounds, held):
    assert _says(COMPUTING, name, rounds) == [held]


def test_gloos_threads_have_that_name():
    """Another one would leave them out without a word."""
    assert GLOO in _says(THREADS)
