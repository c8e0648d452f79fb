"""The same runs on a GPU. Skipped where there is none."""

import json
from typing import ClassVar

import pytest
import torch

from outpace.jobs.train.context import RunContext
from outpace.jobs.train.job import train
from outpace.records.errors import InterruptedRunError
from outpace.records.settings import TrainSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture
def run(tmp_path, corpus, token_cache):
    def start(name, callbacks=(), **changes):
        values = {"model": "outpace-tiny", "seq_len": 64, "global_batch": 8, "steps": 8,
                  "eval_batches": 1, "sample_tokens": 4, "device": "cuda", "dropout": 0.1,
                  "data": (str(corpus),), "cache_dir": token_cache, **changes}  # fmt: skip
        settings = TrainSettings(out=tmp_path / name, **values)
        measured = train(settings, RunContext(command=["test"], callbacks=callbacks))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return measured, [json.loads(line) for line in lines]

    return start


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_trains_and_accounts(run, precision):
    measured, lines = run("run", precision=precision, workers=1, memory_snapshot=True)
    assert measured.final_loss < measured.first_loss
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["peak_memory_bytes"] == torch.cuda.max_memory_allocated()
    assert all(line["step_time_s"] > 0 for line in lines)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_steps_do_not_wait_for_the_device(run, precision):
    """Torch raises where ten steps would copy a number to the host and wait for it."""
    from outpace.training.callbacks import Callback

    class Strict(Callback):
        def on_step(self, record):
            torch.cuda.set_sync_debug_mode("error" if 4 <= record.step < 14 else "default")

    try:
        _, lines = run("strict", [Strict()], precision=precision, steps=18)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [line["step"] for line in lines] == list(range(1, 19))


def test_the_times_of_steps_are_those_of_the_wall(run):
    import time

    from outpace.training.callbacks import Callback

    class Wall(Callback):
        times: ClassVar = []

        def on_step(self, record):
            if record.step in (10, 60):
                self.times.append(time.perf_counter())

    _, lines = run("wall", [Wall()], steps=64)
    told_s = sum(line["step_time_s"] for line in lines if 10 < line["step"] <= 60)
    assert told_s == pytest.approx(Wall.times[1] - Wall.times[0], rel=0.1)


def test_the_chunked_loss_gives_the_plain_one(run):
    _, plain = run("plain", loss="plain", precision="bf16", dropout=0)
    _, chunked = run("chunked", loss="chunked", precision="bf16", dropout=0)
    for one, other in zip(plain, chunked, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-2)


def test_an_interrupted_run_resumes_with_the_same_losses(run):
    """Of several blocks of keys, whose gradients are otherwise added up in any order."""
    import os
    import signal

    from outpace.training.callbacks import Callback

    class Stop(Callback):
        def on_step(self, record):
            if record.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    long = {"model": "outpace-small", "seq_len": 512, "precision": "bf16", "deterministic": True}
    _, whole = run("whole", **long)
    with pytest.raises(InterruptedRunError):
        run("cut", callbacks=[Stop()], **long)
    _, resumed = run("cut", resume=True, **long)
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]


def test_a_compiled_run_trains_alike_and_compiles_nothing_in_evaluations(run):
    from torch._dynamo.utils import counters

    values = {"precision": "bf16", "dropout": 0, "micro_batch": 4}
    _, eager = run("eager", compile=False, **values)
    torch._dynamo.reset()
    counters.clear()
    measured, compiled = run("compiled", compile=True, eval_every=2, **values)
    for one, other in zip(eager, compiled, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-2)
    assert 0 < measured.compile_s < measured.first_step_s
    assert not counters["graph_break"]
    again, _ = run("again", compile=True, **values)
    assert again.compile_s <= measured.compile_s


def test_a_run_too_short_to_pay_back_is_not_compiled(run):
    measured, _ = run("short", steps=2)
    assert measured.compile_s == 0


def test_runs_are_equal_bit_for_bit_where_that_is_asked_for(run):
    """At a length with several blocks of attention, whose backward adds up in any order else."""
    wanted = {"precision": "bf16", "seq_len": 512, "deterministic": True}
    _, one = run("one", **wanted)
    _, other = run("other", **wanted)
    assert [line["loss"] for line in one] == [line["loss"] for line in other]
