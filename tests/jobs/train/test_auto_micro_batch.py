"""--micro-batch auto: predicted, then tried."""

import json
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

import outpace
from outpace.catalog.models import preset
from outpace.cli.main import main
from outpace.jobs.train import auto_micro_batch_on_gpu
from outpace.jobs.train.auto_micro_batch import (
    TRIAL_STEPS,
    find_micro_batch,
    predict_largest,
    sizes,
)
from outpace.jobs.train.auto_micro_batch_on_gpu import can_try, device_steps, find_on_device
from outpace.planner.fit.cost import Cost
from outpace.records.errors import BadInputError, OutOfMemoryError
from outpace.records.plan import POWERSGD_LEAST_START, Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.training.synthetic import SyntheticSteps

PLAN = Plan(strategy="ddp", dp_replicate=2, micro_batch=12)
SETTINGS = TrainSettings(global_batch=24, micro_batch="auto", memory_limit=1000)


def predict(plan):
    return Cost(100 * plan.micro_batch, 1.0)


def test_sizes_keep_the_global_batch():
    assert sizes(PLAN) == [12, 6, 4, 3, 2, 1]
    for size in sizes(PLAN):
        assert PLAN.model_copy(update={"micro_batch": size}).accumulation(24) == 12 // size


@pytest.mark.parametrize(("limit", "size"), [(5000, 12), (1200, 12), (1199, 6), (250, 2), (1, 1)])
def test_the_largest_that_is_predicted_to_fit(limit, size):
    assert predict_largest(PLAN, predict, limit) == size
    assert predict_largest(PLAN, None, limit) == 12


class Alone:
    """The groups of a job of one process."""

    ranks = Ranks()
    patient = None

    def run_on_rank_0(self, action):
        return action()


class Fits:
    """Predicts, within a limit."""

    def __init__(self, limit):
        self.limit = type("Limit", (), {"bytes": limit})
        self.predict = predict


def search(monkeypatch, limit, codes):
    """The size found where trials end with these codes on two ranks, and the sizes tried."""
    tried = []

    def attempt(settings, port):
        tried.append(settings.micro_batch)
        assert settings.memory_limit == 950
        assert settings.global_batch % (2 * settings.micro_batch) == 0
        return codes[len(tried) - 1][0], "broken"

    def gather(own, group):
        return [(code, "broken" if code else "") for code in codes[len(tried) - 1]]

    monkeypatch.setattr("outpace.jobs.train.auto_micro_batch.gather_objects", gather)
    found = find_micro_batch(PLAN, SETTINGS, Fits(limit), Alone(), attempt, [])
    return found.micro_batch, tried


def test_what_runs_out_on_any_rank_is_too_large_for_all(monkeypatch):
    assert search(monkeypatch, 700, [(0, 0)]) == (6, [6])
    # The other rank's exchange breaks, or its process was killed.
    assert search(monkeypatch, 700, [(1, 4), (-9, 1), (0, 0)]) == (3, [6, 4, 3])
    with pytest.raises(OutOfMemoryError, match="not even a micro-batch of 1 sample fits"):
        search(monkeypatch, 100, [(4, 4)])
    with pytest.raises(BadInputError, match="the trial with 6 failed: broken"):
        search(monkeypatch, 700, [(2, 2)])


def test_a_trial_compresses_as_the_run_will():
    """PowerSGD begins in the trial: else its buffers would be left out, or the trial refused."""
    plan = Plan.parse({**PLAN.model_dump(), "compress_gradients": "powersgd"}, "test")
    seen = []

    def attempt(settings, port):
        seen.append(settings)
        return 0, ""

    def gather(own, group):
        return [own]

    with patch("outpace.jobs.train.auto_micro_batch.gather_objects", gather):
        find_micro_batch(plan, SETTINGS, Fits(700), Alone(), attempt, [])
    assert POWERSGD_LEAST_START <= seen[0].powersgd_start < seen[0].steps


def test_a_live_model_cannot_be_tried_elsewhere(capsys):
    with pytest.raises(BadInputError, match="which is not possible with a live model"):
        outpace.train(torch.nn.Linear(2, 2), micro_batch="auto", progress=False)
    assert main(["train", "--print-config", "--memory-budget", "1GB", "--micro-batch", "auto"]) == 2
    assert "Give the micro-batch as a number" in capsys.readouterr().err


@pytest.mark.gloo
@pytest.mark.slow
def test_the_largest_that_fits_trains(corpus, token_cache, tmp_path, capsys):
    words = [
        "train", "--data", str(corpus), "--cache-dir", str(token_cache), "--model", "outpace-tiny",
        "--global-batch", "8", "--steps", "2", "--micro-batch", "auto", "--json", "--nproc", "2",
        "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "outpace", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trying micro-batch 4" in done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["plan"]["micro_batch"], record["settings"]["micro_batch"]) == (4, 4)


def on_device(monkeypatch, fits, **plan):
    """The size found where so many samples at once fit, and what was tried: plan and samples."""
    tried = []

    def take(self):
        tried.append((self.plan.micro_batch, self.samples))
        if self.plan.micro_batch > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def made(self, plan, course, ranks, device, control):
        assert not plan.compile  # each size would be compiled anew
        self.plan, self.samples = plan, course.global_batch

    monkeypatch.setattr(SyntheticSteps, "__init__", made)
    monkeypatch.setattr(SyntheticSteps, "step", take)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    limits = []
    monkeypatch.setattr(
        auto_micro_batch_on_gpu, "limit_device", lambda size, _: limits.append(size)
    )
    spec = preset("outpace-tiny")
    steps = device_steps(spec, 32, torch.device("cuda"), None, 1000, 900)
    found = find_on_device(Plan(micro_batch=12, compile=True, **plan), SETTINGS, steps, ())
    assert found.compile
    assert set(limits[::2]) == {950} and set(limits[1::2]) == {900}
    return found.micro_batch, tried


@pytest.mark.slow
def test_on_a_gpu_sizes_are_tried_in_the_process_itself(monkeypatch):
    assert on_device(monkeypatch, 12) == (12, [(12, 24)] * TRIAL_STEPS)
    found, tried = on_device(monkeypatch, 5)
    assert found == 4 and tried == [(12, 24), (6, 12), (4, 8), (4, 8)]
    with pytest.raises(OutOfMemoryError, match="not even a micro-batch of 1 sample"):
        on_device(monkeypatch, 0)


@pytest.mark.parametrize(
    ("plan", "settings", "device", "here"),
    [
        ({}, {}, "cuda", True),
        ({"checkpointing": "full", "optimizer": "adamw-8bit"}, {}, "cuda", True),
        ({}, {}, "cpu", False),
        ({"strategy": "ddp", "dp_replicate": 2}, {}, "cuda", False),
        ({"lora_rank": 4}, {}, "cuda", False),
        ({}, {"document_attention": True}, "cuda", False),
    ],
)
def test_what_a_try_in_this_process_would_hold_differently_is_tried_apart(
    plan, settings, device, here
):
    asked = TrainSettings(**settings)
    assert can_try(Plan(**plan), asked, torch.device(device), True) is here


@pytest.mark.gpu
def test_the_size_is_found_within_some_steps_on_a_gpu(tmp_path):
    words = ["train", "--model=outpace-tiny", "--steps=1", "--micro-batch=auto", "--json"]
    assert main([*words, "--device=cuda", "--measure-only", f"--out={tmp_path / 'run'}"]) == 0
