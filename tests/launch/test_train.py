"""A run on one process, by its public door: what it leaves; that it resumes bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outpace.jobs.train.context import RunContext
from outpace.jobs.train.job import train
from outpace.records.errors import BadInputError, DivergedError, InterruptedRunError
from outpace.records.measurement import StepRecord
from outpace.records.run import Failure
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback
from outpace.training.checkpoint import MARKER
from outpace.training.direct_io import DirectWriter

TINY = {
    "model": "outpace-tiny",
    "seq_len": 32,
    "global_batch": 8,
    "steps": 8,
    "eval_batches": 1,
    "sample_tokens": 4,
    "precision": "fp32",
}


@pytest.fixture
def run(tmp_path, corpus, token_cache):
    """Train tiny things below tmp_path; returns the run's directory."""

    def start(name="run", callbacks=(), **changes):
        values = {**TINY, "data": (str(corpus),), "cache_dir": token_cache, **changes}
        settings = TrainSettings(out=tmp_path / name, **values)
        train(settings, RunContext(command=["test"], callbacks=callbacks))
        return tmp_path / name

    return start


class StopAt(Callback):
    """Sends this process a signal so that `step` is the last that is done."""

    def __init__(self, step, signum=signal.SIGTERM):
        self.step = step
        self.signum = signum

    def on_step(self, record):
        if record.step == self.step - 1:
            os.kill(os.getpid(), self.signum)


def metrics(directory: Path):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def weights(directory: Path):
    return load_file(directory / "model" / "model.safetensors")


def assert_same_run(one: Path, other: Path):
    for name in ("step", "loss", "grad_norm", "lr", "samples", "tokens", "loss_scale"):
        assert [m[name] for m in metrics(one)] == [m[name] for m in metrics(other)], name
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def gloo_threads():
    """How many threads of process groups this process has."""
    found = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            found += "gloo" in path.read_text()
    return found


def test_a_run_leaves_what_it_promises(run):
    before = gloo_threads()
    directory = run()
    assert gloo_threads() <= before  # without a garbage collection
    record = json.loads((directory / "run.json").read_text())
    assert record["settings"]["global_batch"] == 8
    assert record["train_data"]
    assert record["versions"]["torch"]
    assert record["identity"].startswith("global batch 8 = micro-batch 8 × accumulation 1")
    lines = metrics(directory)
    assert [line["step"] for line in lines] == list(range(1, 9))
    wanted = set(StepRecord.model_fields)
    assert wanted | {"xxh3_64"} == lines[0].keys()
    assert lines[-1]["samples"] == 64
    assert lines[-1]["tokens"] == 64 * 32
    assert lines[0]["mfu"] is None  # a CPU is not in the catalog
    parts = ("data_s", "forward_s", "backward_s", "optimizer_s", "communication_s", "other_s")
    assert sum(lines[3][p] for p in parts) == pytest.approx(lines[3]["step_time_s"])
    result = json.loads((directory / "result.json").read_text())
    for name in ("train_runtime", "train_samples_per_second", "train_steps_per_second"):
        assert result[name] > 0
    assert result["train_loss"] == pytest.approx(sum(m["loss"] for m in lines) / 8)
    assert result["final_eval"]["loss"] < result["initial_eval"]["loss"]
    assert (directory / "checkpoints" / "step-8" / "complete.json").is_file()


def test_the_exported_model_loads_in_transformers(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = run(steps=2)
    model = AutoModelForCausalLM.from_pretrained(directory / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory / "model", local_files_only=True)
    out = model(**tokenizer("def run(self):", return_tensors="pt"))
    assert torch.isfinite(out.logits).all()


@pytest.mark.parametrize(
    ("precision", "stop", "signum"),
    [
        ("fp32", 2, signal.SIGTERM),
        ("bf16", 5, signal.SIGUSR1),
        pytest.param("fp32", 5, signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("bf16", 2, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_resumes_bit_for_bit(run, precision, stop, signum):
    extra = {"precision": precision, "dropout": 0.1, "micro_batch": 4, "schedule": "wsd"}
    whole = run("whole", **extra)
    with pytest.raises(InterruptedRunError, match=f"step {stop} of 8") as caught:
        run("cut", callbacks=[StopAt(stop, signum)], **extra)
    assert caught.value.exit_code == 75
    resumed = run("cut", resume=True, **extra)
    assert_same_run(whole, resumed)


def test_fp16_resumes_with_its_loss_scale(run):
    extra = {"precision": "fp16", "steps": 4, "model": "outpace-tiny", "global_batch": 2}
    whole = run("whole", **extra)
    with pytest.raises(InterruptedRunError):
        run("cut", callbacks=[StopAt(2, signal.SIGHUP)], **extra)
    resumed = run("cut", resume=True, **extra)
    assert metrics(whole)[0]["loss_scale"] > 0
    assert_same_run(whole, resumed)


def test_accumulation_does_not_change_the_mathematics(run):
    whole = run("whole", steps=3)
    split = run("split", steps=3, micro_batch=2)
    for one, other in zip(metrics(whole), metrics(split), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_finished_run_is_left_as_it_is_and_goes_on_with_more_steps(run, tmp_path):
    run(steps=3)
    result = (tmp_path / "run" / "result.json").read_text()
    with pytest.raises(BadInputError, match="has already completed 3 of 3 steps"):
        run(steps=3, resume=True)
    assert (tmp_path / "run" / "result.json").read_text() == result
    record = (tmp_path / "run" / "run.json").read_text()
    with pytest.raises(BadInputError, match="has already completed 3 of 2 steps"):
        run(steps=2, resume=True)
    assert (tmp_path / "run" / "run.json").read_text() == record
    further = run(steps=5, resume=True)
    assert [m["step"] for m in metrics(further)] == [1, 2, 3, 4, 5]
    assert json.loads((further / "result.json").read_text())["start_step"] == 3


def test_the_weights_of_an_own_model_are_a_function_of_the_seed(run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Embedding(512, 8), nn.Linear(8, 512))\n"
    )
    losses = [
        metrics(run(name, model=f"{file}:build", steps=1, seed=seed))[0]["loss"]
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert losses[0] == losses[1] != losses[2]


def test_a_run_that_fails_before_its_first_step_leaves_nothing(run, tmp_path, monkeypatch):
    class Fails(Callback):
        def on_start(self, info):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run(callbacks=[Fails()])
    assert not (tmp_path / "run").exists()


def test_a_directory_with_another_run_is_refused(run):
    run(steps=1)
    with pytest.raises(BadInputError, match="already holds a run"):
        run(steps=1)


def test_a_run_does_not_go_on_with_other_data(run, corpus, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    given = {"data": (str(data),), "tokenizer": str(run("first", steps=1) / "model")}
    run(steps=1, **given)
    (data / "more.txt").write_text("x = 1\n" * 500)
    said = r"the training data has changed since it started.*--model"
    with pytest.raises(BadInputError, match=said):
        run(steps=2, resume=True, **given)


def test_nothing_to_resume_is_refused(run):
    with pytest.raises(BadInputError, match="no run to resume"):
        run(resume=True)


def test_a_loss_that_is_no_number_ends_the_run_and_exports_nothing(run, tmp_path):
    with pytest.raises(
        DivergedError, match=r"step \d+.*last good checkpoint is .*step-\d"
    ) as caught:
        run(lr=1e4, clip=0, warmup=0, save_every=1, schedule="constant")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "run" / "model").exists()
    left = Failure.load(tmp_path / "run" / "failure.json")
    assert left.reason == str(caught.value)


def test_weights_that_are_no_numbers_any_more_are_not_saved(run, tmp_path):
    """A step's loss is made before its update, so a bad gradient shows in the norm first."""

    class Poison(Callback):
        def on_step(self, record):
            if record.step == 2:
                poisoned.append(True)

    poisoned = []
    before = torch.autograd.backward

    def backward(tensors, *arguments, **named):
        before(tensors * float("nan") if poisoned else tensors, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DivergedError) as caught:
        patch.setattr(torch.autograd, "backward", backward)
        run(steps=3, save_every=1, callbacks=[Poison()])
    assert "the gradient's norm became nan at step 3" in str(caught.value)
    assert str(caught.value).split("checkpoint is ")[1].startswith(str(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints" / "step-3").exists()
    assert not (tmp_path / "run" / "model").exists()


def test_a_damaged_newest_checkpoint_is_passed_over(run, tmp_path):
    whole = run("whole", save_every=2)
    with pytest.raises(InterruptedRunError):
        run("cut", callbacks=[StopAt(5)], save_every=2)
    assert "interrupted, saved after step 5" in (tmp_path / "cut" / "failure.json").read_text()
    file = next((tmp_path / "cut" / "checkpoints" / "step-5").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-10])
    heard = []

    class Hear(Callback):
        def on_hint(self, sentence):
            heard.append(sentence)

    resumed = run("cut", callbacks=[Hear()], resume=True, save_every=5, keep=1)
    # The damaged one does not count as one that is kept, nor stand in the way of another.
    left = [folder.name for folder in (tmp_path / "cut" / "checkpoints").iterdir()]
    assert left == ["step-8"]
    aside = tmp_path / "cut" / "checkpoints-damaged" / "step-5.damaged-1"
    assert (aside / file.name).is_file() and any(str(aside) in sentence for sentence in heard)
    assert not (tmp_path / "cut" / "failure.json").exists()
    assert any("step-5" in sentence and "skipping" in sentence for sentence in heard)
    assert_same_run(whole, resumed)


def test_a_checkpoint_is_of_its_step_however_slow_the_disk(run, monkeypatch):
    go, take, lent = threading.Event(), DirectWriter.write, []

    class After(Callback):
        def on_step(self, record):
            if record.step == 3:
                go.set()

    def write(self, data):
        lent.append(go.is_set())
        assert go.wait(600)
        return take(self, data)

    asked = {"steps": 4, "save_every": 2, "keep": 9}
    usual = run("usual", **asked)
    monkeypatch.setattr(DirectWriter, "write", write)
    slow = run("slow", callbacks=[After()], **asked)
    for step in (2, 4):
        ours, theirs = (
            json.loads((one / "checkpoints" / f"step-{step}" / MARKER).read_text())
            for one in (usual, slow)
        )
        assert ours["__0_0.distcp"] == theirs["__0_0.distcp"]
    assert not lent[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"global_batch": 7, "micro_batch": 2},
            "7 is not a multiple of micro-batch 2 × data-parallel 1",
        ),
        ({"seq_len": 100_000}, "longer than the model's"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"pin_memory": True}, "needs a CUDA device"),
        ({"init": "pretrained"}, "has no weights"),
        ({"strategy": "single", "model": "no-such-model"}, "no-such-model"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(run, tmp_path, changes, message):
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(BadInputError, match=message):
        run(**changes)
    assert not (tmp_path / "run").exists()


def test_token_ids_beyond_the_vocabulary_are_refused(run, tmp_path):
    import numpy as np

    np.array([1, 2, 3, 999] * 500, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    with pytest.raises(BadInputError, match=r"needs a vocabulary of 1000, but .* has 512"):
        run(data=(str(tmp_path / "ids.bin"),))


EXACT = (
    {"checkpointing": "full", "loss": "plain", "optimizer": "adamw-foreach",
     "autocast_cache": False},
    {"checkpointing": "selective", "loss": "chunked", "optimizer": "adamw-for-loop", "workers": 1,
     "document_attention": False},
)  # fmt: skip


def test_exact_options_leave_the_losses_as_they_are(run):
    plain = metrics(run("plain", steps=3))
    for number, options in enumerate(EXACT):
        pulled = metrics(run(f"pulled-{number}", steps=3, **options))
        for one, other in zip(plain, pulled, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5), options


def test_hardware_flops_count_recomputation(run):
    line = metrics(run(steps=1, checkpointing="full"))[0]
    assert line["hardware_flops_per_s"] > 1.1 * line["model_flops_per_s"]


def test_profile_writes_a_chrome_trace(run):
    directory = run(steps=6, profile=True)
    trace = json.loads((directory / "trace-rank0.json").read_text())
    assert len(trace["traceEvents"]) > 100


def test_a_run_may_do_without_evaluations(run):
    directory = run(eval_batches=0, steps=2)
    assert not (directory / "evals.jsonl").read_text()
    result = json.loads((directory / "result.json").read_text())
    assert result["steps"] == 2


SLOW_TO_LOAD = ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy",
                "torch.distributed.checkpoint", "torch.distributed.fsdp", "scipy"]  # fmt: skip


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.gloo)])
def test_a_start_loads_nothing_that_a_plain_run_does_not_need(
    tmp_path, corpus, token_cache, processes, hold_port
):
    """Half of a start was torch's compiler, its DTensors and its checkpoints."""
    settings = {**TINY, "sample_tokens": 0, "data": corpus, "cache_dir": token_cache,
                "out": tmp_path / "run"}  # fmt: skip
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    code = (
        "import sys; from outpace.cli.main import main; assert main(sys.argv[1:]) == 0; "
        f"print('loaded', [name for name in {SLOW_TO_LOAD} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, "train", "--measure-only", *flags]
    place = {"WORLD_SIZE": f"{processes}", "LOCAL_WORLD_SIZE": f"{processes}",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{hold_port()}"}  # fmt: skip
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **place, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
        )
        for rank in range(processes)
    ]  # fmt: skip
    for rank in ranks:
        said, _ = rank.communicate(timeout=600)
        assert rank.returncode == 0 and said.splitlines()[-1] == "loaded []"
