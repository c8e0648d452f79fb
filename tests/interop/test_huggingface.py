"""A transformers model and ours, given the same weights, are the same model: both directions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.conftest import VARIANTS, load_ours, load_theirs
from torch import Tensor

from outpace.interop.huggingface import read_weights, spec_from_hf, write_model
from outpace.nn.transformer import Transformer

TOLERANCE = 1e-4


@torch.no_grad()
def our_logits(model: Transformer, tokens: Tensor, **more: Tensor) -> Tensor:
    return model.logits(model(tokens, **more))


@torch.no_grad()
def their_logits(model: Any, tokens: Tensor, **more: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, **more).logits
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_their_model_in_ours(
    variant: str, make_theirs: Callable[..., Any], tokens: Tensor, tmp_path: Path
) -> None:
    theirs = make_theirs(variant)
    theirs.save_pretrained(tmp_path)
    ours = our_logits(load_ours(tmp_path), tokens)
    expected = their_logits(theirs, tokens)
    assert expected.std() > 0.3
    assert (ours - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("shard_bytes", [10**9, 12_000], ids=["single", "sharded"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_our_model_in_theirs(
    variant: str,
    shard_bytes: int,
    make_theirs: Callable[..., Any],
    tokens: Tensor,
    tmp_path: Path,
) -> None:
    make_theirs(variant).save_pretrained(tmp_path / "first")
    ours = load_ours(tmp_path / "first")
    write_model(tmp_path / "ours", ours.spec, ours.state_dict(), None, max_shard_bytes=shard_bytes)
    single = (tmp_path / "ours/model.safetensors").is_file()
    assert single == (shard_bytes == 10**9)
    loaded = load_theirs(tmp_path / "ours")
    difference = our_logits(ours, tokens) - their_logits(loaded, tokens)
    assert difference.abs().max() <= TOLERANCE
    assert spec_from_hf(tmp_path / "ours") == ours.spec
    back = read_weights(tmp_path / "ours", ours.spec)
    assert back.keys() == ours.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_is_bit_exact(
    variant: str, make_theirs: Callable[..., Any], tmp_path: Path
) -> None:
    theirs = make_theirs(variant)
    theirs.save_pretrained(tmp_path / "first")
    ours = load_ours(tmp_path / "first")
    write_model(tmp_path / "ours", ours.spec, ours.state_dict(), None)
    again = load_theirs(tmp_path / "ours").state_dict()
    for name, tensor in theirs.state_dict().items():
        if variant == "bert-untied" and name == "cls.predictions.bias":
            continue  # transformers computes with decoder.bias only
        assert torch.equal(again[name], tensor), name
