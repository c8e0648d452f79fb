"""Pipelines on real processes: proved, trained, resumed; and what they refuse."""

import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from outpace.records.errors import BadInputError
from outpace.records.pipelines import SCHEDULES, default_microbatches, refusal
from outpace.records.plan import Plan

SPEC = {"family": "llama", "layers": 5, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48,
        "vocab": 512, "max_positions": 64, "tied": True}  # fmt: skip


def do(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "outpace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(24):
        words = " ".join(f"word{(number * 7 + i * i) % 50}" for i in range(400))
        (folder / f"{number}.txt").write_text(words)
    (folder / "spec.json").write_text(json.dumps(SPEC))
    return folder


def train(text, out, *flags: object) -> list[float]:
    """Train a little, and give the losses by step."""
    common = ["--data", text / "*.txt", "--cache-dir", text / "cache", "--seq-len=32"]
    common += ["--global-batch=8", "--eval-batches=1", "--sample-tokens=0", "--dropout=0"]
    model = ["--model", text / "spec.json", "--schedule=constant", "--precision=fp32"]
    done = do("train", *common, *model, "--out", out, *flags)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """What one process makes of four steps: its losses, and its folder."""
    out = tmp_path_factory.mktemp("alone") / "run"
    return train(text, out, "--steps=4"), out


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("single", "1f1b"), ("zbv", "single")], ids=["into", "out of"]
)
def test_a_run_goes_on_in_a_pipeline_and_out_of_one(text, tmp_path, alone, before, after, runnable):
    """The tied embedding is on two ranks under 1f1b, and twice on one under zbv."""
    runnable([f"{before}→{after}"])
    losses, one = alone
    two = tmp_path / "two"
    for steps, strategy, more in ((2, before, []), (4, after, ["--resume"])):
        ranks = 1 if strategy == "single" else 2
        flags = [f"--steps={steps}", f"--strategy={strategy}", f"--nproc={ranks}", *more]
        found = train(text, two, *flags)
    assert found == pytest.approx(losses, rel=1e-5)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (two, one))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.sub(theirs[name]).abs().max() < 1e-4, name


@pytest.mark.gloo
@pytest.mark.slow
def test_fp16_recomputation_and_dropout_work_in_a_pipeline(text, tmp_path):
    flags = ["--precision=fp16", "--checkpointing=full", "--dropout=0.1", "--loss=chunked"]
    out = tmp_path / "low"
    losses = train(text, out, "--steps=3", "--nproc=2", "--strategy=gpipe", *flags)
    assert losses[-1] < losses[0]
    evals = [json.loads(line)["loss"] for line in (out / "evals.jsonl").read_text().splitlines()]
    assert evals[-1] < evals[0]


@pytest.mark.gloo
def test_a_model_that_cannot_be_cut_is_refused_with_what_to_use(text, command):
    tiny = ["outpace", "train", "--model=outpace-tiny", "--data", text / "*.txt", "--nproc=2"]
    done = command(*tiny, "--strategy=interleaved", "--out", text / "refused")
    assert done.returncode == 2
    assert "4 stages, but the model has 2 layers. Use gpipe or 1f1b" in done.stderr
    assert not (text / "refused").exists()


def test_stages_lie_in_loops_or_in_a_v():
    assert [SCHEDULES["interleaved"].rank_of(s, 3) for s in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [SCHEDULES["zbv"].rank_of(s, 3) for s in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("strategy", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("samples", [8, 16, 24])
def test_the_default_number_of_micro_batches_divides_and_is_accepted(strategy, pp, samples):
    count = default_microbatches(strategy, pp, samples)
    assert samples % count == 0
    stages = pp * SCHEDULES[strategy].stages_per_rank
    assert strategy == "mp" or count >= min(stages, samples)
    assert refusal(strategy, pp=pp, microbatches=count) is None


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"strategy": "mp", "pp_microbatches": 2}, "strategy gpipe"),
        ({"strategy": "1f1b", "pp_microbatches": 1}, "for each of 2 stages"),
        ({"strategy": "dualpipev", "pp_microbatches": 3}, "for each of 4 stages"),
        ({"strategy": "interleaved", "pp_microbatches": 5}, "Use 4"),
        ({"strategy": "zb", "pp_microbatches": 4, "dp_replicate": 2}, "pytorch#144530"),
        ({"strategy": "zbv", "pp_microbatches": 4, "checkpointing": "full"}, "interleaved"),
        ({"strategy": "zbv", "pp_microbatches": 4, "compile": True}, "interleaved"),
        ({"strategy": "zbv", "pp_microbatches": 4, "loss": "chunked"}, "interleaved"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(values, sentence):
    with pytest.raises(BadInputError, match=sentence):
        Plan.parse({"pp": 2, **values}, "plan")


def test_micro_batches_are_for_pipelines():
    with pytest.raises(BadInputError, match="ddp is not a pipeline"):
        Plan.parse({"strategy": "ddp", "dp_replicate": 2, "pp_microbatches": 2}, "plan")
