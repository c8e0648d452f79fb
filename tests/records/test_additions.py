"""A strategy, an optimizer and a model family are each added in three files of the package."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("additions.py")
ADDITIONS = runpy.run_path(str(PROGRAM))["ADDITIONS"]


def ask(folder, what):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), what],
        check=False, capture_output=True, text=True, cwd=PROGRAM.parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ADDITIONS)
def test_three_files_have_to_know_at_most(kind):
    assert len(ADDITIONS[kind]) <= 3


def test_what_is_added_is_planned_estimated_and_written_for_other_trainers(tmp_path):
    found = ask(tmp_path, "estimate")
    assert "late all-reduce" in found["late"]["title"]
    assert found["late"]["traffic"] == found["ddp"]["traffic"] != {}
    # Lion keeps a momentum, as SGD does, and moves more than it.
    lion, sgd = found["lion"], found["sgd"]
    kept = [one["memory"]["optimizer state"] for one in (lion, sgd)]
    assert kept[0] == kept[1] > 0
    assert lion["step_s"] > sgd["step_s"]
    assert any(note.startswith("optimizer lion: ") for note in lion["notes"])
    assert found["best"]
    assert found["settings"] == {"strategy": "late", "optimizer": "lion"}


@pytest.mark.slow
def test_what_is_added_trains_as_what_there_was_and_loads_in_transformers(tmp_path):
    found = ask(tmp_path, "train")
    losses = found["losses"]
    assert losses["late"] == pytest.approx(losses["ddp"], rel=1e-5)
    assert losses["late"] == pytest.approx(losses["single"], rel=1e-4)
    assert losses["late"][-1] < losses["late"][0]
    assert found["class"] == "MinistralForCausalLM"
    assert found["difference"] < 1e-5
