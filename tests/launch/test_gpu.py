"""The same runs on a GPU. Skipped where there is none."""

import json

import pytest
import torch

from outpace.launch.job import train
from outpace.records.errors import InterruptedRunError
from outpace.records.ranks import Ranks
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
        measured = train(settings, ranks=Ranks(), origins={}, command=["test"], callbacks=callbacks)
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


def test_the_chunked_loss_gives_the_plain_one(run):
    _, plain = run("plain", loss="plain", precision="bf16", dropout=0)
    _, chunked = run("chunked", loss="chunked", precision="bf16", dropout=0)
    for one, other in zip(plain, chunked, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-2)


def test_an_interrupted_run_resumes_with_the_same_losses(run):
    import os
    import signal

    from outpace.train.callbacks import Callback

    class Stop(Callback):
        def on_step(self, record):
            if record.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    _, whole = run("whole", precision="bf16")
    with pytest.raises(InterruptedRunError):
        run("cut", callbacks=[Stop()], precision="bf16")
    _, resumed = run("cut", precision="bf16", resume=True)
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]
