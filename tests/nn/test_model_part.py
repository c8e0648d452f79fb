"""Parts of a model: together they are the model, and compute what it does."""

import pytest
import torch

from outpace.nn.model_part import Part, take_part
from outpace.nn.transformer import Transformer
from outpace.records.model import ModelSpec

FAMILIES = [
    {"family": "llama", "heads": 4, "kv_heads": 2, "ffn": 48, "tied": True},
    {"family": "llama", "heads": 4, "ffn": 48, "tied": False},
    {"family": "gpt2", "heads": 4},
    {"family": "bert", "heads": 4},
]
PARTS = [Part([0], True, False), Part([1, 2], False, False), Part([3], False, True)]


def model_of(values: dict) -> Transformer:
    size = {"layers": 4, "hidden": 32, "vocab": 96, "max_positions": 64}
    return Transformer(ModelSpec.parse({**size, **values}, "test")).eval()


@pytest.mark.parametrize("values", FAMILIES, ids=lambda values: f"{values}")
def test_one_part_after_the_other_is_the_model(values):
    model = model_of(values)
    tokens = torch.randint(0, 96, (2, 16))
    documents = (torch.arange(16) // 5).expand(2, 16)
    hidden = tokens
    for part in PARTS:
        taken = take_part(model, part)
        assert not any(parameter.is_meta for parameter in taken.parameters())
        hidden = taken(hidden, documents_BS=documents)
    assert torch.equal(hidden, model(tokens, documents_BS=documents))
    assert torch.equal(taken.logits(hidden), model.logits(model(tokens, documents_BS=documents)))


@pytest.mark.parametrize("values", FAMILIES, ids=lambda values: f"{values}")
def test_each_parameter_is_shared_by_its_name_and_only_a_tied_embedding_is_in_two_parts(values):
    model = model_of(values)
    whole = dict(model.named_parameters())
    seen: list[str] = []
    for part in PARTS:
        for name, parameter in take_part(model, part).named_parameters():
            assert parameter is whole[name]
            seen.append(name)
    assert set(seen) == set(whole)
    twice = ["embed.tokens.weight"] if model.spec.tied else []
    assert [name for name in whole if seen.count(name) > 1] == twice
