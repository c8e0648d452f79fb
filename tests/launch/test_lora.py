"""Runs that train adapters: their files, resuming, and what is done with them afterwards."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from outpace.cli.main import main
from outpace.interop.models import open_model
from outpace.jobs.inference import evaluate, generate
from outpace.jobs.inputs.model import load_model
from outpace.jobs.train.context import RunContext
from outpace.jobs.train.job import train
from outpace.records.errors import BadInputError
from outpace.records.settings import TrainSettings

LORA = {"lora_rank": 4, "lora_targets": ("q", "v", "up"), "lr": 0.02}


@pytest.fixture(scope="module")
def start(tmp_path_factory, corpus, token_cache):
    """Trains a few steps; without `model`, adapters for the weights of the run "base"."""
    folder = tmp_path_factory.mktemp("runs")

    def go(name, **changes):
        values = {"steps": 6, "seq_len": 32, "global_batch": 8, "eval_batches": 2,
                  "sample_tokens": 0, "precision": "fp32", "model": str(folder / "base"),
                  "cache_dir": token_cache, "data": (str(corpus),), "out": folder / name,
                  "device": "cpu", "threads": 1, **changes}  # fmt: skip
        measured = train(TrainSettings(**values), RunContext())
        return folder / name, measured

    go("base", model="outpace-tiny", steps=30, lr=1e-2)
    return go


def adapter_of(run):
    return load_file(run / "model" / "adapter_model.safetensors")


@pytest.mark.parametrize("base", ["fp32", "nf4"])
def test_a_run_of_adapters_learns_is_evaluated_and_merged(start, corpus, tmp_path, base, capsys):
    text = (str(corpus / "heapq.txt"),)
    run, measured = start(f"run-{base}", base=base, steps=20, data=text, eval_data=text, **LORA)
    assert measured.final_eval.loss < measured.initial_eval.loss - 0.02
    found = evaluate(run, None, batches=2, batch_size=8, device="cpu", on_hint=print)
    assert found.loss == pytest.approx(measured.final_eval.loss, rel=1e-4)
    assert generate(
        run, "def", max_new_tokens=2, temperature=0, top_k=None, seed=0, device="cpu", on_hint=print
    ).startswith("def")
    capsys.readouterr()
    assert main(["merge", str(run), "--out", str(tmp_path / "whole"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(tmp_path / "whole")
    assert main(["merge", str(run), "--out", str(tmp_path / "whole")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    opened = open_model(str(tmp_path / "whole"))
    assert opened.adapter is None and opened.tokenizer is not None
    tokens = torch.arange(8).view(1, 8)
    one, other = (load_model(o, o.spec).eval() for o in (opened, open_model(str(run))))
    torch.testing.assert_close(one(tokens), other(tokens), rtol=1e-4, atol=1e-5)


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(start):
    kept = {"save_every": 3, "base": "nf4", "lora_dropout": 0.1, **LORA}
    whole, _ = start("whole", steps=6, schedule="constant", **kept)
    part, _ = start("part", steps=3, schedule="constant", **kept)
    start("part", steps=6, resume=True, schedule="constant", **kept)
    for name, tensor in adapter_of(whole).items():
        assert torch.equal(tensor, adapter_of(part)[name]), name
    files = FileSystemReader(part / "checkpoints" / "step-6").read_metadata().state_dict_metadata
    saved = {name for name in files if name.startswith("model.")}
    assert saved and all(name.endswith(("lora_a", "lora_b")) for name in saved)


def test_the_learning_rate_is_one_for_adapters(start):
    run, _ = start("rate", steps=1, lora_rank=2)
    assert json.loads((run / "run.json").read_text())["settings"]["lr"] == 2e-4


def test_random_weights_are_taken_where_that_is_said(start, tmp_path):
    """To measure with: the adapter's base is written to the run, so that it can be used."""
    said = {"model": "outpace-tiny", "init": "random", "lora_rank": 2, "schedule": "constant"}
    run, measured = start("drawn", steps=4, save_every=2, **said)
    assert (run / "base" / "model.safetensors").is_file()
    found = evaluate(run, None, batches=2, batch_size=8, device="cpu", on_hint=print)
    assert found.loss == pytest.approx(measured.final_eval.loss, rel=1e-4)
    _, further = start("drawn", steps=6, resume=True, **said)
    assert further.final_eval.loss < measured.final_eval.loss


def test_what_is_refused(start, tmp_path):
    with pytest.raises(BadInputError, match=r"would start with random ones.* --init random"):
        start("none", model="outpace-tiny", lora_rank=4)
    assert not (tmp_path / "none").exists()
    run, _ = start("stacked", steps=1, lora_rank=2)
    with pytest.raises(BadInputError, match=r"is already an adapter.* outpace merge"):
        start("none", model=str(run), lora_rank=2)
    assert main(["merge", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert main(["merge", str(run), "--out", str(run / "model")]) == 2


def test_other_weights_under_the_same_name_are_noticed(start, tmp_path):
    base, _ = start("moving", model="outpace-tiny", steps=1)
    run, _ = start("beside", model=str(base), steps=2, lora_rank=2)
    path = base / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = b"\0\0\0\0"
    path.write_bytes(bytes(data))
    (path.parent / "checksums.json").unlink()  # on purpose
    with pytest.raises(BadInputError, match="the adapters' base model has changed"):
        start("beside", model=str(base), steps=4, lora_rank=2, resume=True)
    with pytest.raises(BadInputError, match="was not trained with the weights"):
        evaluate(run, None, batches=1, batch_size=2, device="cpu", on_hint=print)


@pytest.mark.slow
def test_beside_weights_in_4_bits_training_ends_near_where_it_does_beside_whole_ones(start):
    """docs/guides/lora.md states the difference; the same data, adapters and steps."""
    base, before = start("longer", model="outpace-tiny", steps=200, lr=1e-2, global_batch=16)
    values = {"model": str(base), "steps": 100, "global_batch": 16, "lora_rank": 8, "lr": 1e-2}
    _, whole = start("slow-fp32", **values)
    _, rounded = start("slow-nf4", base="nf4", **values)
    learned = before.final_eval.loss - whole.final_eval.loss
    print(before.final_eval.loss, whole.final_eval.loss, rounded.final_eval.loss)
    assert learned > 0.02
    assert abs(rounded.final_eval.loss - whole.final_eval.loss) < 0.02
