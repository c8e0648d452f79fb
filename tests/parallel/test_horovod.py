"""horovod: refused where it is not there; what outpace hands to it where it is."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from outpace.parallel import why_not
from outpace.records.ranks import Ranks

CPU = torch.device("cpu")
STAND_IN = Path(__file__).with_name("stand_in")


def verify(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "outpace", "verify", *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, **environ},
    )  # fmt: skip


@pytest.mark.skipif(find_spec("horovod") is not None, reason="Horovod is installed")
def test_without_horovod_it_is_said_what_to_do():
    reason = why_not("horovod", Ranks(), CPU)
    assert "pip install horovod" in reason and "--strategy ring" in reason
    assert why_not("ring", Ranks(), CPU) is None


@pytest.mark.gloo
@pytest.mark.skipif(find_spec("horovod") is not None, reason="Horovod is installed")
def test_asked_for_by_name_it_is_refused(command):
    done = command("outpace", "verify", "--strategy", "single,horovod")
    assert done.returncode == 2
    assert "--strategy horovod: Horovod is not installed" in done.stderr


def with_stand_in():
    return {"PYTHONPATH": os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow
@pytest.mark.gloo
def test_with_a_stand_in_it_equals_one_process():
    done = verify("--strategy", "horovod", "--json", **with_stand_in())
    assert done.returncode == 0, done.stderr
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert verdict["passed"] and verdict["mesh"] == "dp_replicate 2"
    assert verdict["bytes_on_wire"] is None


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_that_horovod_counts_otherwise_are_refused():
    done = verify("--strategy", "horovod", STAND_IN_SIZE="1", **with_stand_in())
    assert done.returncode == 2
    assert "Start with horovodrun or mpirun" in done.stderr
