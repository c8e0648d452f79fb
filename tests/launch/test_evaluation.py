"""The held-out loss: of each sample once, whatever the batches are; and data that are few."""

import json

import pytest
import torch
import transformers

from outpace.data.samples import IGNORED
from outpace.jobs.train.context import RunContext
from outpace.jobs.train.job import prepare_run, train
from outpace.records.errors import BadInputError
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback

SPEC = {"family": "llama", "layers": 1, "hidden": 16, "heads": 2, "vocab": 300, "max_positions": 32}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "model.json").write_text(json.dumps(SPEC))
    for name, count in (("train", 40), ("held", 9)):
        rows = [{"text": f"{name} {n} orchard window " * 2} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def asked(home, name, **more):
    values = {
        "model": str(home / "model.json"), "data": [str(home / "train.jsonl")], "steps": 1,
        "eval_data": [str(home / "held.jsonl")], "seq_len": 16, "lr": 1e-9, "precision": "fp32",
        "device": "cpu", "sample_tokens": 0, "cache_dir": home / "cache", "out": home / name,
        **more,
    }  # fmt: skip
    return TrainSettings.parse(values, "test")


def run(settings):
    return train(settings, RunContext())


def losses_of_windows(home, settings):
    """The mean over all held-out targets, by transformers."""
    with prepare_run(settings, RunContext()) as ready:
        data = ready.job.inputs.eval_data
        windows = [data[n] for n in range(len(data))]
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.out.parent / "4" / "model")
    total, count = 0.0, 0
    for one in windows:
        with torch.no_grad():
            logits = model(one["tokens"][None]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, one["targets"], reduction="sum"))
        count += len(one["targets"])
    return total / count, count


def test_each_held_out_window_counts_once_whatever_the_batch_is(home):
    found = {}
    for batch, more in ((4, {}), (7, {"micro_batch": 1}), (100, {}), (100, {"micro_batch": 50})):
        name = str(batch) if not more else f"{batch}-{more['micro_batch']}"
        found[name] = run(asked(home, name, global_batch=batch, **more)).final_eval
    loss, count = losses_of_windows(home, asked(home, "again", global_batch=4))
    assert {one.tokens for one in found.values()} == {count}
    for one in found.values():
        assert one.loss == pytest.approx(loss, rel=1e-5)


def test_a_part_of_the_held_out_data_is_the_same_of_all_micro_batches(home):
    found = [
        run(asked(home, f"part-{micro}", global_batch=6, micro_batch=micro, eval_batches=1))
        for micro in (1, 6)
    ]
    first, second = (one.final_eval for one in found)
    assert first.tokens == second.tokens == 6 * 16
    assert first.loss == pytest.approx(second.loss, rel=1e-6)


def test_more_batch_than_data_is_said(home):
    settings = asked(home, "few", global_batch=256, data_weights=(1.0, 31.0), steps=2,
                     data=[str(home / "train.jsonl"), str(home / "held.jsonl")])  # fmt: skip
    said = []

    class Listener(Callback):
        def on_start(self, info):
            said.extend(info.hints)

    train(settings, RunContext(callbacks=[Listener()]))
    assert any("256 is larger than the" in hint and "up to" in hint for hint in said), said
    assert any("held.jsonl is repeated" in hint for hint in said)
    assert not any("train.jsonl is repeated" in hint for hint in said)


def test_the_part_that_is_too_little_is_named(home):
    (home / "tiny.jsonl").write_text(json.dumps({"text": "a"}))
    with pytest.raises(BadInputError, match=r"the data in --eval-data .*tiny\.jsonl has 2 tokens"):
        run(asked(home, "named", eval_data=[str(home / "tiny.jsonl")]))


def test_every_masked_sample_has_a_target(home):
    (home / "bert.json").write_text(json.dumps({**SPEC, "family": "bert"}))
    settings = asked(home, "masked", model=str(home / "bert.json"), seq_len=4, global_batch=1)
    with prepare_run(settings, RunContext()) as ready:
        data = ready.job.inputs.train_data
        batch = data.__getitems__([(0, n, n) for n in range(min(60, len(data)))])
        found = (batch["targets"] != IGNORED).sum(1)
    assert found.min() == 1 and found.max() > 1


NOT_NUMBERS = """
import torch
from torch import nn


def build():
    train, held_out = torch.ones(8, 4), torch.full((8, 4), float("nan"))
    return nn.Linear(4, 1), lambda module, x: module(x).square().mean(), list(train), list(held_out)
"""


def test_a_validation_loss_that_is_no_number_is_said_once(home):
    class Hints(Callback):
        def __init__(self):
            self.said = []

        def on_hint(self, sentence):
            self.said.append(sentence)

    (home / "nan.py").write_text(NOT_NUMBERS)
    heard = Hints()
    values = {
        "model": f"{home / 'nan.py'}:build", "steps": 2, "eval_every": 1, "global_batch": 4,
        "precision": "fp32", "device": "cpu", "out": home / "nan",
    }  # fmt: skip
    train(TrainSettings.parse(values, "test"), RunContext(callbacks=[heard]))
    found = [said for said in heard.said if said.startswith("the validation loss is nan: check")]
    assert len(found) == 1  # of four evaluations
