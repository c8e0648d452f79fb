"""What other tools call what outpace has, at every place where a name is read."""

from typing import get_args

import pytest

import outpace
from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.nodes import NODES
from outpace.cli.export_formats import FORMATS
from outpace.cli.main import main
from outpace.records import aliases
from outpace.records.errors import BadInputError, suggest
from outpace.records.optimizers import OptimizerName
from outpace.records.plan import LoraTarget, Strategy
from outpace.records.precisions import Precision
from outpace.records.settings import TrainSettings

# Of other commands than train.
_ELSEWHERE = {"run", "max-new-tokens", "batch-size", "max-tp", "devices-per-node", "nodes", "hosts",
              "machine", "comm-timeout"}  # fmt: skip


def refusal(capsys, *argv: str) -> str:
    assert main(list(argv)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("train --learning_rate=1", "--lr"),
        ("train --batch-size 8", "--micro-batch' or '--global-batch"),
        ("train --fsdp", "--strategy zero3"),
        ("train --bf16", "--precision bf16"),
        ("train --per_device_train_batch_size 4", "--micro-batch"),
        ("train --block_size 8", "--seq-len"),
        ("train --output_dir x", "--out"),
        ("train --report_to wandb", "--log"),
        ("train --max-iters 5", "--steps"),
        ("train --gradient_accumulation_steps 4", "--global-batch' or '--micro-batch"),
        ("train --microbatch 4", "--micro-batch"),
        ("plan --model=gpt2 --gpus 8", "--devices-per-node"),
        ("verify --gpus 8", "--nproc"),
        ("generate --run=. x --max_tokens 3", "--max-new-tokens"),
        ("train --strategy fsdp", "zero3"),
        ("train --strategy FSDP2", "zero3"),
        ("verify --strategy fsdp", "zero3"),
        ("compare fsdp ddp", "zero3"),
        ("train --optimizer adamw", "adamw-fused"),
        ("train --precision bfloat16", "bf16"),
        ("plan --model=gpt2 --emit fsdp2", "fsdp"),
        (
            "plan --model=gpt2 --machine=3060",
            "rtx-3060-8-gb', 'rtx-3060-12-gb', 'rtx-3060-ti' or 'rtx-3060-laptop",
        ),
        ("plan --model=gpt2 --machine=p5.48xlarge", "aws-p5"),
        ("train --lora-targets o_proj", "out"),
        ("train run.toml", "--config run.toml"),
        ("train chats.jsonl", "--data chats.jsonl"),
    ],
)
def test_a_name_of_another_tool_is_answered_with_outpace_s(line, meant, capsys):
    assert f"Did you mean '{meant}'?" in refusal(capsys, *line.split())


@pytest.mark.parametrize(
    "line",
    ["train --neftune_noise_alpha 5", "train --optimizer lion", "train --xyzzy",
     "train --use_cache", "plan --model=gpt2 --machine=macbook", "train --device tpu",
     "plan --model=gpt2 --learning-rate 1"],
)  # fmt: skip
def test_what_has_no_like_is_answered_with_none(line, capsys):
    assert "Did you mean" not in refusal(capsys, *line.split())


def test_files_and_python_are_answered_in_their_own_words(capsys, tmp_path):
    file = tmp_path / "run.toml"
    for text, meant in (("learning_rate = 1", "lr"), ("bf16 = true", 'precision = "bf16"')):
        file.write_text(text, encoding="utf-8")
        assert f"Did you mean '{meant}'?" in refusal(capsys, "train", f"--config={file}")
    with pytest.raises(BadInputError, match=r"no keyword 'learning_rate'. Did you mean 'lr'"):
        outpace.train(learning_rate=1.0)
    with pytest.raises(BadInputError, match=r"not one of .* Did you mean 'zero3'"):
        outpace.train(strategy="fsdp")


@pytest.mark.parametrize("name", ["warmup", "eval_every", "save_every"])
def test_a_share_of_the_steps_is_no_count(name, capsys):
    said = "is not a whole number. Give a count (of steps, samples, ranks), not a fraction"
    assert said in refusal(capsys, "train", f"--{name.replace('_', '-')}", "0.1")
    with pytest.raises(BadInputError, match=r"not a fraction"):
        outpace.train(**{name: 0.1})


def test_every_name_proposed_exists():
    settings = {name.replace("_", "-") for name in TrainSettings.model_fields} | _ELSEWHERE
    meanings, meanings_of_values = aliases.read_tables()
    for meaning in meanings.values():
        assert {name.partition(" ")[0] for name in meaning.names} <= settings
    chips = {name.casefold().replace(" ", "-") for name in ACCELERATORS}
    values = {*map(str, (*get_args(Strategy), *get_args(OptimizerName), *get_args(Precision))),
              *get_args(LoraTarget),
              *FORMATS, *NODES, *chips, "nf4", "cosine", "constant", "wsd", "tensorboard", "wandb",
              "cuda", "mps"}  # fmt: skip
    for meaning in meanings_of_values.values():
        assert {*meaning.names} <= values


def test_spelling_alone_proposes_only_slips():
    flags = ["--padding", "--server-updates", "--lr", "--dropout", "--beta1", "--steps"]
    assert suggest("--stepps", flags) == " Did you mean '--steps'?"
    assert suggest("--report_two", flags) == suggest("--base_rate", flags) == ""


@pytest.mark.parametrize(
    ("name", "alike"),
    [("meta-llama/Llama-3.1-8B", "llama-3.1-8b"), ("openai-community/gpt2", "gpt2"),
     ("mistralai/Voxtral-9B", None)],
)  # fmt: skip
def test_a_model_of_the_hub_is_to_be_downloaded(name, alike, capsys):
    error = refusal(capsys, "train", f"--model={name}")
    folder = name.partition("/")[2]
    assert f"hf download {name} --local-dir {folder}, then --model {folder}." in error
    assert ("has the same dimensions" in error) is (alike is not None)
    assert alike is None or f"use --model {alike}, which has" in error
