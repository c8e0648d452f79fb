"""What a training needs for sure is touched while modules load, and only that."""

import os
import subprocess
import sys

import pytest

from outpace.catalog.models import preset
from outpace.jobs.train.prefault import needed_bytes, prefault_memory
from outpace.planner.model.flops import parameter_count
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings

MODEL = "gpt2"


def asked(**settings):
    return TrainSettings.parse({"model": MODEL, "device": "cpu"} | settings, "test")


@pytest.mark.parametrize("precision", [None, "fp32", "bf16", "O1"])
def test_weights_gradients_and_moments_are_needed_for_sure(precision):
    given = {} if precision is None else {"precision": precision}
    each = 18 if precision == "bf16" else 16
    assert needed_bytes(asked(**given)) == each * parameter_count(preset(MODEL))


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd"},
        {"optimizer": "adamw-8bit"},
        {"precision": "bf16-pure"},
        {"precision": "O2"},
        {"optimizer_in_backward": True, "clip": 0},
        {"lora_rank": 8},
        {"offload_optimizer": "disk"},
        {"offload": "disk"},
        {"memory_limit": "8GiB"},
        {"memory": True},
        {"empty_cache": True},
        {"micro_batch": "auto"},
        {"workers": 2},
        {"model": "no such thing"},
    ],
)
def test_nothing_is_where_less_will_be_held_or_memory_is_watched(settings):
    assert needed_bytes(asked(**settings)) == 0


def test_files_of_weights_say_how_much(tmp_path):
    pieces = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    for name, size in ((pieces[0], 1000), (pieces[1], 500), ("consolidated.safetensors", 1500)):
        (tmp_path / name).write_bytes(bytes(size))
    assert needed_bytes(asked(model=str(tmp_path))) == 6000
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    assert needed_bytes(asked(model=str(tmp_path))) == 400


def test_nothing_is_touched_for_what_will_not_fit(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 42)
    huge = asked(model=str(tmp_path))
    assert needed_bytes(huge) == 4 << 42 and prefault_memory(huge, Ranks(), {}) is None


def test_only_alone_and_only_on_a_cpu():
    assert prefault_memory(asked(device="cuda"), Ranks(), {}) is None
    two = Ranks(rank=0, local_rank=0, world_size=2, local_world_size=2)
    assert prefault_memory(asked(), two, {}) is None


SEEN = """
import os, sys
from outpace.jobs.train.prefault import prefault_memory
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings

settings = TrainSettings.parse({"model": "gpt2", "device": "cpu"}, "test")
prefault_memory(settings, Ranks(), os.environ).end()
print("torch" in sys.modules)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="no core is idle")
def test_torch_is_not_waited_for():
    said = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False"]
