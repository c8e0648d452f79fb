"""Adapters under strategies: proved against one process, and carried from one to another."""

import pytest
import torch
from safetensors.torch import load_file

from outpace.catalog.models import preset
from outpace.cli.main import main
from outpace.interop.huggingface import write_model
from outpace.nn.transformer import Transformer
from outpace.planner.model.flops import parameter_count
from outpace.records.model import ModelSpec

pytestmark = pytest.mark.gloo


def proved(on_ranks, strategies, options, ranks=2):
    """The verdicts by strategy, and the bytes of the model's weights."""
    found = on_ranks(ranks, "outpace", "verify", strategies, "--json", "--levers", options)
    verdicts = found["verdicts"]
    assert all(v["passed"] and v["worst_relative_difference"] < 1e-9 for v in verdicts)
    weights_bytes = 8 * parameter_count(ModelSpec.parse(found["model"], "verify"))
    return {verdict["strategy"]: verdict for verdict in verdicts}, weights_bytes


@pytest.mark.parametrize(
    ("strategies", "ranks"),
    [
        ("ddp,zero3,1f1b,tp", 2),
        pytest.param("all", 2, marks=pytest.mark.slow),
        pytest.param("hsdp,tp,3d", 4, marks=pytest.mark.slow),
    ],
)
def test_adapters_are_trained_as_by_one_process(on_ranks, strategies, ranks):
    verdicts, weights_bytes = proved(on_ranks, strategies, "lora_rank=3", ranks)
    if "ddp" in verdicts:  # exchanges adapters, not weights
        assert verdicts["ddp"]["bytes_on_wire"] < weights_bytes / 4


@pytest.mark.slow
def test_beside_weights_in_4_bits_too_and_these_are_what_zero3_gathers(on_ranks):
    options = "lora_rank=2,base=nf4,checkpointing=full"
    verdicts, weights_bytes = proved(on_ranks, "zero3,1f1b", options)
    # Forward and backward of two passes; of 64 bits a number it would be twice the weights.
    assert verdicts["zero3"]["bytes_by_kind"]["all_gather"] < weights_bytes


@pytest.mark.parametrize("base", ["fp32", "nf4"])
@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy(on_ranks, tmp_path, base):
    spec = preset("outpace-tiny")
    write_model(tmp_path / "base", spec, Transformer(spec, 3).state_dict(), None)
    tokens = torch.randint(spec.vocab, (4000,), generator=torch.Generator().manual_seed(0))
    for name in ("train.bin", "val.bin"):
        tokens.numpy().astype("uint16").tofile(tmp_path / name)
    flags = ["--model", tmp_path / "base", "--data", tmp_path / "train.bin",
             "--eval-data", tmp_path / "val.bin", "--cache-dir", tmp_path / "cache",
             "--seq-len=16", "--global-batch=4", "--eval-batches=1", "--precision=fp32",
             "--device=cpu", "--threads=1", "--lora-rank=2", "--schedule=constant",
             # AdamW would make a whole step of what is rounding in a gradient.
             "--optimizer=sgd", "--lr=1", f"--base={base}", "--json"]  # fmt: skip
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert main(["train", *map(str, flags), f"--out={whole}", "--steps=4"]) == 0
    on_ranks(2, "outpace", "train", *flags, f"--out={part}", "--steps=2", "--strategy=zero3")
    resumed = ["train", *map(str, flags), f"--out={part}", "--steps=4", "--resume"]
    assert main([*resumed, "--strategy=single"]) == 0
    one, other = (load_file(run / "model" / "adapter_model.safetensors") for run in (whole, part))
    assert one.keys() == other.keys()
    assert any(bool(tensor.any()) for name, tensor in one.items() if "lora_B" in name)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
