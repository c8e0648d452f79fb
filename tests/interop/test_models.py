"""What --model may name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.catalog.models import preset
from outpace.data.tokenizer_training import train_tokenizer
from outpace.interop.atomic_folder import whole_folder
from outpace.interop.custom_model import build_custom_model, write_custom_model
from outpace.interop.huggingface import write_model
from outpace.interop.models import open_model, read_spec
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec

SPEC = {
    "family": "llama",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 300,
    "max_positions": 64,
}
OWN = """
import torch

def build():
    torch.manual_seed({seed})
    return torch.nn.Linear(4, {width})
"""


def refusal(reference: Path | str) -> str:
    with pytest.raises(BadInputError) as caught:
        open_model(str(reference))
    return str(caught.value)


def write_toml(path: Path, **values: Any) -> Path:
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in {**SPEC, **values}.items()]
    path.write_text("".join(lines))
    return path


def test_a_preset() -> None:
    opened = open_model("gpt2")
    assert (opened.kind, opened.name, opened.spec) == ("preset", "gpt2", preset("gpt2"))
    assert opened.weights is None and opened.tokenizer is None and opened.build is None


def test_a_preset_comes_before_a_directory_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_theirs: Callable[..., Any]
) -> None:
    make_theirs("gpt2").save_pretrained(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert open_model("gpt2").kind == "preset"
    assert open_model("./gpt2").kind == "huggingface"


def test_a_huggingface_directory(make_theirs: Callable[..., Any], tmp_path: Path) -> None:
    make_theirs("qwen3").save_pretrained(tmp_path / "m")
    opened = open_model(str(tmp_path / "m"))
    assert opened.kind == "huggingface" and opened.name == "m"
    assert opened.spec is not None and opened.spec.family == "qwen3"
    assert opened.weights == tmp_path / "m" and opened.tokenizer is None
    train_tokenizer(["text"], 257).save(tmp_path / "m")
    assert open_model(str(tmp_path / "m")).tokenizer == tmp_path / "m"
    (tmp_path / "m/model.safetensors").unlink()
    assert open_model(str(tmp_path / "m")).weights is None
    (tmp_path / "m/model.safetensors").symlink_to("../blobs/0a1b")  # of a cache of the hub
    with pytest.raises(BadInputError, match=r"model.safetensors is a broken link to ../blobs/0a1b"):
        open_model(str(tmp_path / "m"))


def test_an_adapter_beside_a_config_is_one_and_beside_a_model_is_refused(
    make_theirs: Callable[..., Any], tmp_path: Path
) -> None:
    """Some trainers write a config.json beside adapters: it was a model without weights, drawn."""
    make_theirs("qwen3").save_pretrained(tmp_path / "base")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
    named = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "base")}
    (adapter / "adapter_config.json").write_text(json.dumps(named))
    opened = open_model(str(adapter))
    assert (opened.weights, opened.adapter) == (tmp_path / "base", adapter)
    (adapter / "model.safetensors").write_bytes(
        (tmp_path / "base" / "model.safetensors").read_bytes()
    )
    with pytest.raises(BadInputError, match="holds a whole model and an adapter"):
        open_model(str(adapter))


def test_specs_in_toml_and_json(tmp_path: Path) -> None:
    toml = write_toml(tmp_path / "small.toml", sliding_window=8)
    opened = open_model(str(toml))
    assert (opened.kind, opened.name, opened.weights) == ("spec", "small", None)
    assert opened.spec == ModelSpec.model_validate({**SPEC, "sliding_window": 8})
    assert opened.spec.head_dim == 8
    (tmp_path / "same.json").write_text(json.dumps(opened.spec.model_dump()))
    assert read_spec(tmp_path / "same.json") == opened.spec


def test_a_run_is_a_warm_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    said = refusal(run)
    assert "holds no finished model" in said and "--steps" not in said
    for step in (90, 100):
        (run / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    assert "Add --steps 100" in refusal(run)
    spec = ModelSpec.model_validate(SPEC)
    tokenizer = train_tokenizer(["text"], 257)
    write_model(run / "model", spec, Transformer(spec).state_dict(), tokenizer.save)
    opened = open_model(str(run))
    assert (opened.kind, opened.name, opened.spec) == ("run", "run", spec)
    assert opened.weights == opened.tokenizer == run / "model"


def test_a_persons_function(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(OWN.format(seed=1, width=3))
    opened = open_model(f"{tmp_path}/my_model.py:build")
    assert opened.kind == "own" and opened.spec is None and opened.build is not None
    assert build_custom_model(opened.build).module.out_features == 3


def test_a_run_of_a_persons_model_is_a_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_model.py").write_text(OWN.format(seed=1, width=3))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    trained = torch.nn.Linear(4, 3)
    write_custom_model(run / "model", trained, "my_model.py:build")
    open_model("my_model.py:build")  # as whoever trained it has
    monkeypatch.chdir("/")
    opened = open_model(str(run))
    assert opened.kind == "run" and opened.build is not None
    assert torch.equal(build_custom_model(opened.build).module.weight, trained.weight)
    (tmp_path / "my_model.py").write_text(OWN.format(seed=1, width=5))
    again = open_model(str(run))
    assert again.build is not None
    with pytest.raises(
        BadInputError, match=r"do not fit the module that .*my_model.py:build builds"
    ):
        build_custom_model(again.build)


def test_unknown_names(tmp_path: Path) -> None:
    assert "named 'gtp2'. Did you mean 'gpt2'" in refusal("gtp2")
    assert "no preset, directory or file named 'nowhere/at-all'" in refusal("nowhere/at-all")
    assert "neither a Hugging Face model (no config.json) nor a run" in refusal(tmp_path)
    (tmp_path / "notes.md").touch()
    assert "neither a spec (.toml, .json) nor a Python file" in refusal(tmp_path / "notes.md")
    (tmp_path / "adapter_config.json").touch()
    assert "adapter_config.json is not JSON" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1"])
def test_what_is_planned_only_is_told_by_the_planner(name: str) -> None:
    said = refusal(name)
    assert "outpace has no Mixtral, so it cannot train mixtral-8x7b" in said
    assert "outpace plan --model mixtral-8x7b" in said and "outpace estimate" in said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hiden": 3}, "unknown key 'hiden'. Did you mean 'hidden'"),
        ({"heads": 5}, "hidden 32 is not a multiple of heads 5"),
        ({"layers": 0}, "layers = 0"),
        ({"activation": "relu"}, "activation = 'relu'"),
        ({"activation": "gelu_tan"}, "Did you mean 'gelu_tanh'"),
        ({"family": "gtp2"}, "unknown family 'gtp2'"),
        ({"family": "llamma"}, "Did you mean 'llama'?"),
    ],
)
def test_bad_specs(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write_toml(tmp_path / "bad.toml", **values)
    assert said in refusal(path)
    assert str(path) in refusal(path)


def test_files_that_are_no_specs(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("layers = \n")
    assert "a.toml is not TOML" in refusal(tmp_path / "a.toml")
    (tmp_path / "a.json").write_text("{")
    assert "a.json is not JSON" in refusal(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("[1]")
    assert "holds a JSON list, not an object" in refusal(tmp_path / "b.json")
    (tmp_path / "c.json").write_text('{"layers": 3}')
    assert "family is missing; families: gpt2, llama" in refusal(tmp_path / "c.json")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert f"name its directory: --model {tmp_path}" in refusal(tmp_path / "config.json")
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    assert "a.toml is not TOML" in refusal(tmp_path / "a.toml")


def test_python_files_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def build(:\n")
    assert f"needs the name of a function that returns the model: --model {path}:" in refusal(path)
    assert f"{path}:1: " in refusal(f"{path}:build")
    path.write_text("\n\nimport no_such_module_anywhere\n")
    assert f"{path}:3: ModuleNotFoundError" in refusal(f"{path}:build")
    path.write_text("def build_model(): ...\n")
    assert "has no function 'build'. Did you mean 'build_model'" in refusal(f"{path}:build")
    assert "there is no file" in refusal(f"{tmp_path}/none.py:build")


def test_a_folder_is_written_where_permissions_cannot_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFS refuses chmod: a model was not written after the last step."""

    def refuse(*words: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with whole_folder(tmp_path / "model", "config.json") as folder:
        (folder / "config.json").write_text("{}")
    assert (tmp_path / "model" / "config.json").read_text() == "{}"


def test_a_folder_with_a_presets_name_is_told_from_the_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_model("gpt2").notes == ()
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text("{}")
    (said,) = open_model("gpt2").notes
    assert "is the preset, which has no weights" in said and said.endswith("--model ./gpt2")
