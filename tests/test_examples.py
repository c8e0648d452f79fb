"""The examples run, and what is parallel says and saves what the plain script does."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(folder, *command):
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=600)
    finally:
        with suppress(ProcessLookupError):  # the launcher's processes, too
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    losses = [float(line.split()[-1]) for line in output.splitlines()]
    return losses, torch.load(folder / "model.pt")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"), EXAMPLES / "plain.py")


@pytest.mark.gloo
@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero3", "1f1b"))]
)
def test_a_parallel_script_gives_what_the_plain_one_does(tmp_path, plain, strategy):
    losses, state = run(tmp_path, *LAUNCHER, EXAMPLES / "parallel.py", f"--strategy={strategy}")
    assert losses == pytest.approx(plain[0], abs=1e-4)
    assert losses[-1] < losses[0] - 0.3
    assert state.keys() == plain[1].keys()
    for name, tensor in plain[1].items():
        assert torch.allclose(state[name], tensor, atol=1e-3), name


def test_the_changed_lines_are_marked():
    plain, parallel = ((EXAMPLES / name).read_text() for name in ("plain.py", "parallel.py"))
    loop = parallel.partition("def main() -> None:")[2]
    unmarked = {line for line in loop.splitlines() if not line.endswith("# outpace")}
    known = {line.strip() for line in plain.splitlines()}
    assert {line.strip() for line in unmarked if line.strip()} <= known
    assert sum(line.endswith("# outpace") for line in loop.splitlines()) <= 10
