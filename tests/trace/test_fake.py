"""Fake tensors: what a program can still do after them."""

import subprocess
import sys

PROGRAM = """
import os, torch
from outpace.trace.fake import fake_tensors

with fake_tensors():
    torch.ones(3)
torch.zeros((), requires_grad=True).backward()
fork = os.fork()
torch.zeros((), requires_grad=True).backward()
if fork:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))
"""


def test_forks_compute_gradients_after_fake_tensors_and_a_backward():
    # Without the backward pass in `fake_tensor_mode` this fails only where torch is built for
    # accelerators that the host lacks: scripts/test-torch tries that.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
