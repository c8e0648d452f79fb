"""Runs with weights of 16 bits, states of few bits and the step in backward, by the public door."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from outpace.jobs.defaults import keeps_masters
from outpace.jobs.train.context import RunContext
from outpace.jobs.train.job import train
from outpace.records.errors import BadInputError, InterruptedRunError
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback

TINY = {
    "model": "outpace-tiny", "seq_len": 32, "global_batch": 4, "steps": 4, "eval_batches": 1,
    "sample_tokens": 4, "precision": "fp32",
}  # fmt: skip


class StopAt(Callback):
    def __init__(self, step):
        self.step = step
        self.hints = ()

    def on_start(self, info):
        self.hints = info.hints

    def on_step(self, record):
        if record.step == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def run(tmp_path, corpus, token_cache):
    def start(name="run", callbacks=(), **changes):
        values = {**TINY, "data": (str(corpus),), "cache_dir": token_cache, **changes}
        settings = TrainSettings.parse({**values, "out": tmp_path / name}, "test")
        train(settings, RunContext(command=["test"], callbacks=callbacks))
        return tmp_path / name

    return start


def weights(directory):
    return load_file(directory / "model" / "model.safetensors")


def losses(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [(json.loads(line)["loss"], json.loads(line)["grad_norm"]) for line in lines]


CASES = [
    ({"precision": "bf16-pure", "optimizer": "adamw-8bit"}, torch.bfloat16),
    ({"optimizer": "adamw-4bit"}, torch.float32),
    ({"optimizer": "muon"}, torch.float32),
    # From fp32 master weights.
    ({"precision": "O2", "global_batch": 2}, torch.float32),
    ({"precision": "bf16-master", "micro_batch": 2}, torch.float32),
]


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [CASES[0], *CASES[3:], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:3])],
)
def test_a_run_resumes_bit_for_bit_and_exports_the_dtype_of_its_weights(run, changes, dtype):
    whole = run("whole", **changes)
    with pytest.raises(InterruptedRunError):
        run("cut", callbacks=[StopAt(2)], **changes)
    resumed = run("cut", resume=True, **changes)
    assert losses(resumed) == losses(whole)
    found = weights(resumed)
    for name, tensor in weights(whole).items():
        assert tensor.dtype == dtype
        assert torch.equal(found[name], tensor)
    if dtype != torch.float32:
        with pytest.raises(
            BadInputError, match="one of these precisions keeps weights only in 16 bits"
        ):
            run("cut", resume=True, **{**changes, "precision": "fp32", "steps": 6})


@pytest.mark.parametrize(("before", "after"), [("bf16-master", "bf16"), ("fp32", "bf16-master")])
def test_a_run_with_master_weights_goes_on_as_one_without_and_the_other_way(run, before, after):
    whole = losses(run("whole", precision=after))
    with pytest.raises(InterruptedRunError):
        run("cut", callbacks=[StopAt(2)], precision=before)
    resumed = losses(run("cut", precision=after, resume=True))
    assert len(resumed) == len(whole)
    for one, other in zip(resumed, whole, strict=True):
        assert one == pytest.approx(other, rel=2e-2)
    assert weights(run("cut2", precision=after, steps=1))  # exported whole


def test_master_weights_begin_with_the_fp32_weights_and_are_what_is_exported(run):
    """With a rate of (almost) nothing the weights stay; from their bf16 rounding they would not."""
    found = weights(run(precision="bf16-master", lr=1e-15, warmup=0, weight_decay=0.0, steps=1))
    for name, tensor in weights(run("known", lr=1e-15, weight_decay=0.0, steps=1)).items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("changes", "keeps"),
    [
        ({}, True), ({"strategy": "zero3"}, True), ({"offload_optimizer": "cpu"}, False),
        ({"offload": "cpu"}, False), ({"model": "mine.py:build"}, False),
    ],
)  # fmt: skip
def test_master_weights_are_the_default_where_a_run_can_have_them(changes, keeps):
    assert keeps_masters(TrainSettings.parse(changes, "test")) is keeps


def test_apex_levels_say_what_they_stand_for(run):
    heard = StopAt(-1)
    directory = run(precision="O3", steps=1, global_batch=2, callbacks=[heard])
    (said,) = [hint for hint in heard.hints if "O3" in hint]
    assert "stands for fp16-pure with adamw-bf16: weights and gradients in fp16" in said
    assert json.loads((directory / "run.json").read_text())["plan"]["precision"] == "fp16-pure"


def test_the_optimizer_in_backward_trains_alike_and_keeps_the_norm(run):
    known = run("known", clip=0.0)
    found = run("found", clip=0.0, optimizer_in_backward=True)
    for one, other in zip(losses(found), losses(known), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert json.loads((found / "run.json").read_text())["plan"]["optimizer_in_backward"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"optimizer_in_backward": True}, "Use --clip 0, or leave out --optimizer-in-backward"),
        ({"optimizer_in_backward": True, "clip": 0, "micro_batch": 2}, "Use --micro-batch 4"),
        ({"optimizer_in_backward": True, "clip": 0, "micro_batch": "auto"}, "supports only one"),
        ({"precision": "fp8", "device": "cpu"}, "the device is cpu. Use --precision bf16"),
        ({"precision": "bf16-pure", "optimizer": "muon"}, "Use optimizer adamw-bf16"),
    ],
)
def test_what_cannot_be_is_refused(run, changes, why):
    with pytest.raises(BadInputError, match=why):
        run(**changes)


def test_what_does_nothing_or_hardly_trains_is_said(run):
    heard = StopAt(-1)
    run(strategy="zero3", lr=3.0, steps=1, global_batch=3, precision="bf16", callbacks=[heard])
    said = "\n".join(heard.hints)
    assert "--strategy zero3 on one process splits nothing. Start several with --nproc N" in said
    assert "--lr 3 is large" in said
    assert "multiple of 8" not in said  # which a CPU does not want
