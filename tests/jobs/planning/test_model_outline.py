"""What planning may be asked about, by every way of naming a model."""

import json
import re
from pathlib import Path

import pytest

from outpace.catalog.models import PRESETS, preset
from outpace.catalog.outlines import OUTLINES
from outpace.interop.models import open_model
from outpace.jobs.planning.model_outline import find_outline
from outpace.planner.model.outline import outline, parameters
from outpace.records.errors import BadInputError

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 300,
    "max_position_embeddings": 64,
}  # fmt: skip
OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def build():
    return Model()

def images():
    data = [(torch.randn(3, 8, 8), index % 2) for index in range(5)]
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    def loss(module, batch):
        return nn.functional.cross_entropy(module(batch[0]), batch[1])
    return net, loss, data

def nothing():
    return nn.Linear(4, 3)

def empty():
    return nn.Linear(4, 3), None, []

def theirs():
    import transformers
    config = transformers.AutoConfig.for_model(
        "mixtral", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
        num_key_value_heads=2, intermediate_size=48, num_local_experts=4,
    )
    return transformers.AutoModelForCausalLM.from_config(config)

def ours():
    from outpace.catalog.models import preset
    from outpace.nn.transformer import Transformer
    return Transformer(preset("outpace-tiny"))
"""


def refusal(reference: object) -> str:
    with pytest.raises(BadInputError) as caught:
        find_outline(str(reference))
    return str(caught.value)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "my_models.py"
    path.write_text(OWN)
    return path


def test_presets_and_the_catalogs_outlines() -> None:
    name, found, spec = find_outline("gpt2")
    assert (name, spec) == ("gpt2", preset("gpt2"))
    assert parameters(found) == 124_439_808 and found.source == PRESETS["gpt2"].source
    assert find_outline("deepseek-v3") == ("deepseek-v3", OUTLINES["deepseek-v3"], None)


@pytest.mark.parametrize("name", OUTLINES)
def test_outlines_by_their_names_on_the_hub(name: str) -> None:
    repository = re.match(r"config\.json of (\S+) on Hugging Face", OUTLINES[name].source)
    asked = name.upper() if repository is None else repository[1]
    assert find_outline(asked)[:2] == (name, OUTLINES[name])


def test_a_smaller_models_repository_is_not_the_larger_one(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert "facebook/opt-66b" in OUTLINES["opt-175b"].source
    assert "hf download facebook/opt-66b" in refusal("facebook/opt-66b")


def test_a_folder_comes_before_a_preset_in_capitals(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_outline("GPT2")[0] == open_model("GPT2").name == "gpt2"
    (tmp_path / "GPT2").mkdir()
    (tmp_path / "GPT2" / "config.json").write_text(json.dumps(LLAMA))
    spec = find_outline("GPT2")[2]
    assert spec is not None and spec.family == "llama" and open_model("GPT2").spec == spec


def test_directories(tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    name, found, spec = find_outline(str(directory))
    assert name == found.name == "mine" and spec is not None and found.layers == 2
    (directory / "config.json").write_text(json.dumps({**LLAMA, "model_type": "mixtral"}))
    name, found, spec = find_outline(str(directory))
    assert (name, found.experts, spec) == ("mine", 8, None)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    said = json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(directory)})
    (adapter / "adapter_config.json").write_text(said)
    assert find_outline(str(adapter))[:2] == ("adapter", found.model_copy(
        update={"name": "adapter"}
    ))  # fmt: skip


def test_specs(tmp_path: Path) -> None:
    spec = preset("outpace-tiny")
    (tmp_path / "small.json").write_text(spec.model_dump_json())
    found = find_outline(str(tmp_path / "small.json"))
    assert found == ("small", outline(spec, "small"), spec)


def test_a_persons_own(own: Path) -> None:
    name, found, spec = find_outline(f"{own}:build")
    assert name == found.name == f"{own}:build" and spec is None and found.untrained is None
    assert [(stack.layers, stack.seq_len) for stack in found.stacks] == [(3, None)]
    assert (found.vocab, found.outputs, found.hidden) == (50, 50, 16)
    assert parameters(found) == 50 * 16 + 3 * (256 + 16) + 50 * 17


def test_a_persons_own_on_its_data(own: Path) -> None:
    _, found, _ = find_outline(f"{own}:images")
    assert parameters(found) == 27 * 4 + 4 + 144 * 2 + 2
    assert "returned no data set" in refusal(f"{own}:nothing")
    assert "data set is empty" in refusal(f"{own}:empty")


def test_a_persons_function_that_builds_a_known_model(own: Path) -> None:
    _, found, spec = find_outline(f"{own}:theirs")
    assert (found.experts, found.untrained, spec) == (4, None, None)
    _, found, spec = find_outline(f"{own}:ours")
    assert spec == preset("outpace-tiny") and found.layers == 2


def test_unknown_names(tmp_path: Path) -> None:
    assert "named 'bloom-175b'. Did you mean 'bloom-176b'" in refusal("bloom-175b")
    assert "named 'gtp2'. Did you mean 'gpt2'" in refusal("gtp2")
    assert "neither a Hugging Face model (no config.json) nor a run" in refusal(tmp_path)
    assert "there is no file" in refusal(f"{tmp_path}/none.py:build")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "of_tomorrow"}))
    assert "the architecture 'of_tomorrow'" in refusal(tmp_path)
