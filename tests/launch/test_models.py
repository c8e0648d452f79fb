"""What can be trained: encoders, stored weights, a person's own model and data set."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from outpace.jobs.inference import evaluate, generate
from outpace.jobs.train import run_record
from outpace.jobs.train.context import RunContext
from outpace.jobs.train.job import train
from outpace.nn.torch_versions import VERSION
from outpace.records.errors import BadInputError
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback

BERT = """
family = "bert"
layers = 2
hidden = 32
heads = 2
vocab = 512
max_positions = 64
"""


class _Hints(Callback):
    """What is said of a run before its first step."""

    said = ""

    def on_start(self, run):
        self.said = " ".join(run.hints)


@pytest.fixture
def start(tmp_path, corpus, token_cache):
    def go(name, live=None, heard=(), given=(), **changes):
        values = {"steps": 6, "seq_len": 32, "global_batch": 8, "eval_batches": 2,
                  "sample_tokens": 0, "precision": "fp32", "model": "outpace-tiny",
                  "cache_dir": token_cache, "out": tmp_path / name, **changes}  # fmt: skip
        values.setdefault("data", (str(corpus),))
        settings = TrainSettings(**values)
        origins = dict.fromkeys(given, "command line")
        return train(settings, RunContext(callbacks=heard, model=live, origins=origins))

    return go


def test_an_encoder_learns_masked_tokens_and_loads_in_transformers(start, tmp_path):
    from transformers import AutoModelForMaskedLM

    (tmp_path / "bert.toml").write_text(BERT)
    measured = start("run", model=str(tmp_path / "bert.toml"), steps=30, lr=3e-3)
    assert measured.final_eval.loss < measured.initial_eval.loss - 0.3
    assert measured.sample is None
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model", local_files_only=True)
    assert model.config.hidden_size == 32
    with pytest.raises(BadInputError, match="causal"):
        generate(
            tmp_path / "run",
            "x",
            max_new_tokens=2,
            temperature=1,
            top_k=None,
            seed=0,
            device="cpu",
            on_hint=print,
        )


def test_stored_weights_are_where_training_goes_on_from(start, tmp_path):
    first = start("run")
    # The rate of a run is known, and a twentieth of it moves little in a step.
    known = (
        f"{tmp_path / 'run'}, which was trained at a learning rate of 0.001. This run uses 5e-05"
    )
    for number, folder in enumerate((tmp_path / "run", tmp_path / "run" / "model")):
        heard = _Hints()
        again = start(f"again-{number}", heard=[heard], model=str(folder), steps=1)
        rates = [
            json.loads((tmp_path / name / "run.json").read_text())["settings"]["lr"]
            for name in ("run", f"again-{number}")
        ]
        assert rates == [1e-3, 5e-5]
        assert again.initial_eval.loss == pytest.approx(first.final_eval.loss, rel=1e-6)
        assert known in heard.said
    anew = start("anew", model=str(tmp_path / "run"), init="random", steps=1)
    # So does Trainer, in the folder of a model that has no run beside it.
    (tmp_path / "theirs").mkdir()
    theirs = shutil.copytree(tmp_path / "run" / "model", tmp_path / "theirs" / "model")
    history = [{"learning_rate": 6e-4, "step": 10}, {"learning_rate": 1e-6, "step": 20}]
    for state, told in (({"log_history": history}, True), ({"log_history": None}, False)):
        (theirs / "trainer_state.json").write_text(json.dumps(state))
        heard = _Hints()
        start(f"further {told}", heard=[heard], model=str(theirs), steps=1)
        assert (f"{theirs}, which was trained at a learning rate of 0.0006" in heard.said) is told
    assert anew.initial_eval.loss == pytest.approx(first.initial_eval.loss, rel=1e-6)


def test_settings_that_change_nothing_are_said(start, corpus):
    heard, used = _Hints(), _Hints()
    idle = {
        "schedule": "constant", "min_lr_ratio": 0.5, "optimizer": "sgd", "beta2": 0.5,
        "eval_every": 1, "eval_batches": 0, "bucket_mib": 9.0, "compress_gradients": "bf16",
        "data": [str(corpus / "wave.txt")], "text_field": "body", "offload_dir": str(corpus),
    }  # fmt: skip
    start("idle", heard=[heard], given=idle, steps=1, **idle)
    told = ("min-lr-ratio", "beta2", "eval-every", "bucket-mib", "compress-gradients",
            "text-field", "offload-dir")  # fmt: skip
    for name in told:
        assert f"--{name} changes nothing in this run: " in heard.said
    given = {"min_lr_ratio": 0.5, "beta2": 0.9, "eval_every": 1}
    start("used", heard=[used], given=given, steps=1, **given)
    assert "changes nothing" not in used.said


def test_what_a_plan_sets_is_not_said_to_change_nothing(command, corpus, token_cache, tmp_path):
    """A plan sets all its fields, also those that do not apply to its strategy."""
    done = command(
        "outpace", "train", "--plan=auto", "--model=outpace-tiny", f"--data={corpus}",
        f"--cache-dir={token_cache}", f"--out={tmp_path / 'run'}", "--seq-len=32",
        "--global-batch=4", "--steps=1", "--sample-tokens=0", "--device=cpu", "--measure-only",
        "--eval-batches=0", check=True,
    )  # fmt: skip
    assert "plan auto" in (tmp_path / "run" / "run.json").read_text()
    assert "changes nothing" not in done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_gpus_that_torch_does_not_see_are_said(start, tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(run_record, "_DEV", tmp_path)
    chosen = _Hints()
    for number, (cuda, visible, why) in enumerate(
        [
            ("13.0", "-1", "CUDA_VISIBLE_DEVICES=-1 hides them"),
            ("13.0", "0", "`outpace doctor` shows whether the driver sees any GPU"),
            (None, "0", f"this torch ({VERSION}) is built without CUDA"),
        ]
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        heard = _Hints()
        start(f"run{number}", heard=[heard], steps=1)
        assert f"the run is on the CPU: {why}" in heard.said
    start("meant", heard=[chosen], steps=1, device="cpu")
    assert "NVIDIA" not in chosen.said
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    heard = _Hints()
    start("of AMD", heard=[heard], steps=1)
    assert "this host has an AMD GPU" in heard.said
    assert "ROCR_VISIBLE_DEVICES=1 CUDA_VISIBLE_DEVICES=1 hides them" in heard.said


def test_evaluation_of_a_run_gives_the_loss_that_training_measured(start, tmp_path, corpus):
    start("run")
    held_out = evaluate(
        tmp_path / "run", None, batches=None, batch_size=None, device="cpu", on_hint=print
    )
    named = evaluate(
        tmp_path / "run", (str(corpus),), batches=1, batch_size=4, device="cpu", on_hint=print
    )
    last = json.loads((tmp_path / "run" / "evals.jsonl").read_text().splitlines()[-1])
    assert held_out.loss == pytest.approx(last["loss"], rel=0.05)
    assert named.tokens == 4 * 32
    one_file = str(corpus / "wave.txt")
    whole = [
        evaluate(
            tmp_path / "run",
            (one_file,),
            batches=None,
            batch_size=size,
            device="cpu",
            on_hint=print,
        )
        for size in (1, 64)
    ]
    assert whole[0].tokens == whole[1].tokens
    assert whole[0].loss == pytest.approx(whole[1].loss, rel=1e-5)
    (tmp_path / "run" / "model" / "model.safetensors").rename(tmp_path / "aside")
    (tmp_path / "run" / "model" / "checksums.json").unlink()
    with pytest.raises(BadInputError, match="model has no weights, and eval needs them"):
        evaluate(
            tmp_path / "run" / "model",
            (one_file,),
            batches=1,
            batch_size=1,
            device="cpu",
            on_hint=print,
        )
    (tmp_path / "aside").rename(tmp_path / "run" / "model" / "model.safetensors")
    text = generate(
        tmp_path / "run",
        "def",
        max_new_tokens=5,
        temperature=0,
        top_k=None,
        seed=0,
        device="cpu",
        on_hint=print,
    )
    assert text.startswith("def")
    assert len(text) > 3


class Pairs(torch.utils.data.Dataset):
    """y = 3 x − 1 at 64 places."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.tensor([index / 64])
        return x, 3 * x - 1


def squared(module, batch):
    x, y = batch
    return (module(x) - y).square().mean()


def test_a_persons_own_model_loss_and_data_set(start, tmp_path):
    measured = start(
        "run", live=lambda: (nn.Linear(1, 1), squared, Pairs(), Pairs()), steps=400, lr=0.05,
        weight_decay=0, data=("stdlib",), clip=0,
    )  # fmt: skip
    assert measured.final_eval.loss < 1e-3
    assert measured.tokens is None
    assert measured.tokens_per_s is None
    assert measured.samples == 400 * 8
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_persons_own_run_is_evaluated_and_taken_further(start, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Embedding(512, 16), nn.Linear(16, 512))\n"
    )
    mine = f"{tmp_path / 'mine.py'}:build"
    first = start("run", model=mine, steps=20, lr=0.01)
    found = evaluate(
        tmp_path / "run", None, batches=2, batch_size=None, device="cpu", on_hint=print
    )
    assert found.loss == pytest.approx(first.final_eval.loss, rel=1e-5)
    again = start("again", model=str(tmp_path / "run"), steps=1)
    assert again.initial_eval.loss == pytest.approx(first.final_eval.loss, rel=1e-5)
    with pytest.raises(BadInputError, match="own"):
        start("anew", model=mine, init="random", steps=1)


class Idle(nn.Module):
    """Has a part that never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(1, 1), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def test_a_parameter_that_is_never_used_does_not_stand_in_the_way_of_a_resume(start):
    given = {"live": lambda: (Idle(), squared, Pairs(), Pairs()), "data": ("stdlib",)}
    start("run", steps=2, **given)
    further = start("run", steps=4, resume=True, **given)
    assert further.steps == 4


def test_weights_without_their_tokenizer_are_refused(start, tmp_path):
    start("run")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "run" / "model" / name).unlink()
    (tmp_path / "run" / "model" / "checksums.json").unlink()  # on purpose
    with pytest.raises(BadInputError, match="no tokenizer"):
        start("again", model=str(tmp_path / "run"))


def test_tokens_of_another_vocabulary_are_refused(start, corpus, tmp_path):
    start("run", steps=1)
    tokens = tmp_path / "x.bin"
    tokens.write_bytes((np.arange(5000, dtype="<u2") * 13).tobytes())
    own = str(tmp_path / "run" / "model")
    with pytest.raises(BadInputError, match=r"largest token id needs a vocabulary of 64988"):
        start("again", data=(str(tokens),), tokenizer=own)
    with pytest.raises(BadInputError, match=r"largest token id needs a vocabulary of 64988"):
        evaluate(
            tmp_path / "run", (str(tokens),), batches=1, batch_size=1, device="cpu", on_hint=print
        )
    with pytest.raises(BadInputError, match=r"x\.bin holds the ids of a tokenizer.*--tokenizer"):
        start("mixed", data=(str(corpus), str(tokens)))


def test_an_own_data_set_and_data_are_refused_together(start, corpus):
    with pytest.raises(BadInputError, match="own data set"):
        start("run", live=lambda: (nn.Linear(1, 1), squared, Pairs()), data=(str(corpus),))


def test_a_batch_norm_that_recomputation_would_run_twice_is_refused(start, tmp_path):
    def build():
        return nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), squared, Pairs(), Pairs()

    with pytest.raises(BadInputError, match=r"BatchNorm twice.*LayerNorm"):
        start("run", live=build, data=("stdlib",), checkpointing="full")
    assert not (tmp_path / "run").exists()


def test_a_mixture_and_documents(start, corpus, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("x = 1\n" * 5000)
    measured = start(
        "run", data=(str(corpus), str(other)), data_weights=(3.0, 1.0), document_attention=True
    )
    assert measured.final_loss < measured.first_loss


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen2", "qwen3"])
def test_every_family_trains(start, tmp_path, family):
    spec = {"family": family, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "vocab": 512,
            "max_positions": 64}  # fmt: skip
    if family == "mistral":
        spec |= {"kv_heads": 2, "sliding_window": 8}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    measured = start("run", model=str(tmp_path / "spec.json"), steps=8, lr=3e-3)
    assert measured.final_eval.loss < measured.initial_eval.loss


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Inductor warns of its own doings
def test_compiled_blocks_train_alike(start):
    plain = start("plain", steps=3)
    compiled = start("compiled", steps=3, compile=True)
    assert compiled.final_loss == pytest.approx(plain.final_loss, rel=1e-4)
