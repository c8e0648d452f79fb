"""A transformers model and ours, given the same weights, are the same model: both directions."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.data.tokenizer_training import train_tokenizer
from outpace.interop.huggingface import read_weights, spec_from_hf, write_model
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec

TOLERANCE = 1e-4
MakeTheirs = Callable[..., Any]
LoadTheirs = Callable[[Path], Any]
LoadOurs = Callable[[Path], Transformer]


@torch.no_grad()
def our_logits(model: Transformer, tokens: Tensor, **more: Tensor) -> Tensor:
    return model.logits(model(tokens, **more))


@torch.no_grad()
def their_logits(model: Any, tokens: Tensor, **more: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, **more).logits
    return logits


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of a directory's single file."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


def test_their_model_in_ours(
    variant: str, make_theirs: MakeTheirs, load_ours: LoadOurs, tokens: Tensor, tmp_path: Path
) -> None:
    theirs = make_theirs(variant)
    theirs.save_pretrained(tmp_path)
    ours = our_logits(load_ours(tmp_path), tokens)
    expected = their_logits(theirs, tokens)
    assert expected.std() > 0.3
    assert (ours - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("shard_bytes", [10**9, 12_000], ids=["single", "sharded"])
def test_our_model_in_theirs(
    variant: str,
    shard_bytes: int,
    make_theirs: MakeTheirs,
    load_theirs: LoadTheirs,
    load_ours: LoadOurs,
    tokens: Tensor,
    tmp_path: Path,
) -> None:
    make_theirs(variant).save_pretrained(tmp_path / "first")
    ours = load_ours(tmp_path / "first")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1.25)
    directory = tmp_path / "ours"
    write_model(directory, ours.spec, ours.state_dict(), None, max_shard_bytes=shard_bytes)
    assert (directory / "model.safetensors").is_file() == (shard_bytes == 10**9)
    difference = our_logits(ours, tokens) - their_logits(load_theirs(directory), tokens)
    assert difference.abs().max() <= TOLERANCE
    assert spec_from_hf(directory) == ours.spec
    back = read_weights(directory, ours.spec)
    assert back.keys() == ours.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.state_dict().items())


def test_round_trip_is_bit_exact(
    variant: str,
    make_theirs: MakeTheirs,
    load_theirs: LoadTheirs,
    load_ours: LoadOurs,
    tmp_path: Path,
) -> None:
    theirs = make_theirs(variant)
    theirs.save_pretrained(tmp_path / "first")
    ours = load_ours(tmp_path / "first")
    write_model(tmp_path / "ours", ours.spec, ours.state_dict(), None)
    again = load_theirs(tmp_path / "ours").state_dict()
    for name, tensor in theirs.state_dict().items():
        if variant == "bert-untied" and name == "cls.predictions.bias":
            continue  # transformers computes with decoder.bias alone
        assert torch.equal(again[name], tensor), name


def test_bert_with_padding_and_segments(
    make_theirs: MakeTheirs, load_ours: LoadOurs, tokens: Tensor, tmp_path: Path
) -> None:
    theirs = make_theirs("bert")
    theirs.save_pretrained(tmp_path)
    real = torch.arange(24) < torch.tensor([[24], [17], [5]])
    segments = (torch.arange(24) > 9).long().expand(3, 24)
    ours = our_logits(load_ours(tmp_path), tokens, segments_BS=segments, padding_mask_BS=real)
    expected = their_logits(theirs, tokens, token_type_ids=segments, attention_mask=real.long())
    assert (ours - expected)[real].abs().max() <= TOLERANCE
    plain = our_logits(load_ours(tmp_path), tokens)
    assert (plain - expected)[real].abs().max() > 0.1, "neither mask nor segments matter"


def test_reads_shards_that_transformers_wrote(
    make_theirs: MakeTheirs, load_ours: LoadOurs, tokens: Tensor, tmp_path: Path
) -> None:
    theirs = make_theirs("qwen2-untied")
    theirs.save_pretrained(tmp_path, max_shard_size=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    difference = our_logits(load_ours(tmp_path), tokens) - their_logits(theirs, tokens)
    assert difference.abs().max() <= TOLERANCE


def test_reads_old_bin_files(
    make_theirs: MakeTheirs, load_ours: LoadOurs, tokens: Tensor, tmp_path: Path
) -> None:
    theirs = make_theirs("llama-mha")
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    difference = our_logits(load_ours(tmp_path), tokens) - their_logits(theirs, tokens)
    assert difference.abs().max() <= TOLERANCE


def bare_gpt2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As in the first GPT-2 files: no prefix, no head, with the causal mask as a buffer."""
    found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    found["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    found["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    return found


def old_bert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As in the first BERT files: gamma and beta, with the heads of pre-training."""

    def old(name: str) -> str:
        if "LayerNorm" not in name:
            return name
        return name.replace(".weight", ".gamma").replace(".bias", ".beta")

    found = {old(name): tensor for name, tensor in tensors.items()}
    found["cls.predictions.decoder.weight"] = found[
        "bert.embeddings.word_embeddings.weight"
    ].clone()
    found["cls.seq_relationship.weight"] = torch.ones(2, 32)
    found["bert.pooler.dense.weight"] = torch.ones(32, 32)
    found["bert.embeddings.position_ids"] = torch.arange(64).unsqueeze(0)
    return found


def old_llama(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the frequencies that older versions saved, the head although it is tied."""
    found = dict(tensors)
    found["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    found["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    return found


def head_alone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the matrix of a tied head under the head's name alone, which transformers 5 reads."""
    found = dict(tensors)
    embedding = "transformer.wte.weight" if "transformer.wte.weight" in found else _LLAMAS
    found["lm_head.weight"] = found.pop(embedding)
    return found


_LLAMAS = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2", bare_gpt2),
        ("gpt2", head_alone),
        ("llama-tied-biased", head_alone),
        ("bert", old_bert),
        ("bert", lambda tensors: {n.removeprefix("bert."): t for n, t in tensors.items()}),
        ("llama-tied-biased", old_llama),
        ("qwen3", lambda tensors: {n.removeprefix("model."): t for n, t in tensors.items()}),
    ],
)
def test_reads_older_names(
    name: str,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    make_theirs: MakeTheirs,
    tmp_path: Path,
) -> None:
    make_theirs(name).save_pretrained(tmp_path)
    spec = spec_from_hf(tmp_path)
    before = read_weights(tmp_path, spec)
    rewrite(tmp_path, change)
    after = read_weights(tmp_path, spec)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("before", "within"),
    [("_orig_mod.", ""), ("module.", ""), ("module._orig_mod.", ""), ("_orig_mod.module.", ""),
     ("", "_orig_mod.")],
)  # fmt: skip
def test_reads_what_wrappers_saved(
    make_theirs: MakeTheirs, tmp_path: Path, before: str, within: str
) -> None:
    make_theirs("llama-mha").save_pretrained(tmp_path)
    spec = spec_from_hf(tmp_path)
    wanted = read_weights(tmp_path, spec)
    rewrite(tmp_path, lambda tensors: {
        before + name.replace(".self_attn", f".{within}self_attn"): one
        for name, one in tensors.items()
    })  # fmt: skip
    found = read_weights(tmp_path, spec)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_and_out(
    dtype: torch.dtype, load_theirs: LoadTheirs, tmp_path: Path, make_theirs: MakeTheirs
) -> None:
    make_theirs("gpt2").to(dtype).save_pretrained(tmp_path / "theirs")
    spec = spec_from_hf(tmp_path / "theirs")
    weights = read_weights(tmp_path / "theirs", spec)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    write_model(tmp_path / "ours", spec, weights, None, dtype=dtype)
    stored = load_file(tmp_path / "ours/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    assert load_theirs(tmp_path / "ours").dtype == dtype
    again = read_weights(tmp_path / "ours", spec)
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_weights_have_memory_of_their_own(make_theirs: MakeTheirs, tmp_path: Path) -> None:
    make_theirs("gpt2").save_pretrained(tmp_path)
    weights = read_weights(tmp_path, spec_from_hf(tmp_path))
    before = {name: tensor.clone() for name, tensor in weights.items()}
    (tmp_path / "model.safetensors").write_bytes(b"overwritten in place")
    for name, tensor in weights.items():
        assert tensor.is_contiguous()
        tensor.add_(1)
        assert torch.equal(tensor, before[name] + 1)
    assert len({tensor.untyped_storage().data_ptr() for tensor in weights.values()}) == len(weights)


def tiny(**values: Any) -> ModelSpec:
    size = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 24, "vocab": 300, "max_positions": 16}
    return ModelSpec.model_validate({"family": "llama", **size, **values})


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_tokenizer_comes_along(family: str, load_theirs: LoadTheirs, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    spec = tiny(family=family)
    tokenizer = train_tokenizer(["some text to learn from"], 290, masked=family == "bert")
    model = Transformer(spec)
    write_model(tmp_path / "model", spec, model.state_dict(), tokenizer.save)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert loaded("some text").input_ids == tokenizer.encode("some text")
    config = load_theirs(tmp_path / "model").config
    assert config.eos_token_id == tokenizer.eos_id
    assert config.pad_token_id == tokenizer.pad_id
    generation = tmp_path / "model/generation_config.json"
    if family == "bert":
        assert not generation.exists()
    else:
        assert json.loads(generation.read_text())["eos_token_id"] == tokenizer.eos_id


def test_exported_model_generates_in_transformers(load_theirs: LoadTheirs, tmp_path: Path) -> None:
    spec = tiny()
    write_model(tmp_path / "model", spec, Transformer(spec).state_dict(), None)
    ids = load_theirs(tmp_path / "model").generate(
        torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert ids.shape == (1, 7)


def test_values_beyond_the_type_that_is_written_are_refused(tmp_path: Path) -> None:
    weights = Transformer(tiny()).state_dict()
    name = next(iter(weights))
    weights[name].view(-1)[0] = 1e5
    weights[name].view(-1)[1] = torch.inf  # hides nothing beside it
    with pytest.raises(
        BadInputError, match=r"values up to 1e\+05, which fp16 cannot hold \(at most"
    ):
        write_model(tmp_path / "model", tiny(), weights, None, dtype=torch.float16)
    assert not (tmp_path / "model").exists()
    write_model(tmp_path / "model", tiny(), weights, None, dtype=torch.bfloat16)


def test_an_older_export_is_replaced(tmp_path: Path) -> None:
    first, second = tiny(), tiny(hidden=32)
    model = tmp_path / "model"
    write_model(model, first, Transformer(first).state_dict(), None, max_shard_bytes=5_000)
    write_model(model, second, Transformer(second).state_dict(), None)
    assert spec_from_hf(model) == second
    assert read_weights(model, second)["embed.tokens.weight"].shape == (300, 32)
    assert not list(model.glob("model-*")) and [p.name for p in tmp_path.iterdir()] == ["model"]


def test_other_directories_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/one.jpg").touch()
    with pytest.raises(BadInputError, match="photos already exists and contains something other"):
        write_model(tmp_path / "photos", tiny(), Transformer(tiny()).state_dict(), None)
    assert (tmp_path / "photos/one.jpg").is_file()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match=r"cannot write .*file/model: File exists"):
        write_model(tmp_path / "file/model", tiny(), Transformer(tiny()).state_dict(), None)


@pytest.mark.root
def test_a_full_disk_leaves_the_older_model(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    try:
        small, large = tiny(), tiny(hidden=128)
        write_model(disk / "model", small, Transformer(small).state_dict(), None)
        with pytest.raises(BadInputError, match=r"cannot write .*No space left on device"):
            write_model(disk / "model", large, Transformer(large).state_dict(), None)
        assert [path.name for path in disk.iterdir()] == ["model"]
        assert spec_from_hf(disk / "model") == small
        read_weights(disk / "model", small)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_model_that_transformers_lacks_stays_readable(tmp_path: Path) -> None:
    spec = tiny(family="gpt2", heads=4, kv_heads=2)
    model = Transformer(spec)
    write_model(tmp_path / "model", spec, model.state_dict(), None, max_shard_bytes=9_000)
    assert spec_from_hf(tmp_path / "model") == spec
    again = read_weights(tmp_path / "model", spec)
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


# --- what can be wrong with the files -------------------------------------------------------


@pytest.fixture
def stored(make_theirs: MakeTheirs, tmp_path: Path) -> Path:
    make_theirs("qwen2-untied").save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def refusal(directory: Path) -> str:
    with pytest.raises(BadInputError) as caught:
        read_weights(directory, spec_from_hf(directory))
    return str(caught.value)


def test_missing_and_unexpected_tensors_are_named(stored: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.extra.weight"] = tensors.pop("model.norm.weight")
        return tensors

    rewrite(stored, change)
    said = refusal(stored)
    assert "missing tensors: model.norm.weight" in said
    assert "tensors that the model does not have: model.extra.weight" in said


def test_a_wrappers_prefix_is_named(stored: Path) -> None:
    rewrite(stored, lambda given: {f"base_model.model.{name}": one for name, one in given.items()})
    said = refusal(stored)
    assert "names that begin with 'base_model.model.'" in said and "--init random" not in said


def test_wrong_shapes_are_named(stored: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["lm_head.weight"] = torch.zeros(60, 32)
        return tensors

    rewrite(stored, change)
    assert "lm_head.weight is 60 × 32, not 61 × 32" in refusal(stored)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_are_refused(stored: Path, dtype: torch.dtype) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(dtype)
        return tensors

    rewrite(stored, change)
    assert "lm_head.weight is stored as" in refusal(stored)


def test_a_config_for_fewer_layers_is_noticed(stored: Path) -> None:
    config = json.loads((stored / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": None}
    (stored / "config.json").write_text(json.dumps(config))
    assert "model.layers.1." in refusal(stored)


def test_a_truncated_file(stored: Path) -> None:
    path = stored / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors is corrupt or truncated" in refusal(stored)


def test_no_weights(stored: Path) -> None:
    (stored / "model.safetensors").unlink()
    assert "holds no weights" in refusal(stored)


def test_shards_that_are_not_there(make_theirs: MakeTheirs, tmp_path: Path) -> None:
    make_theirs("gpt2").save_pretrained(tmp_path, max_shard_size=20_000)
    first, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    first.unlink()
    assert first.name in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_corrupt_index(make_theirs: MakeTheirs, tmp_path: Path, text: str) -> None:
    make_theirs("gpt2").save_pretrained(tmp_path, max_shard_size=20_000)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "index.json is corrupt" in refusal(tmp_path)


def test_an_index_does_not_lead_outside(make_theirs: MakeTheirs, tmp_path: Path) -> None:
    make_theirs("gpt2").save_pretrained(tmp_path, max_shard_size=20_000)
    index = {"weight_map": {"wte.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside of its directory" in refusal(tmp_path)


def test_a_bin_file_executes_nothing(make_theirs: MakeTheirs, tmp_path: Path) -> None:
    import pickle

    make_theirs("gpt2").config.save_pretrained(tmp_path)
    target = tmp_path / "made"

    class Evil:
        def __reduce__(self) -> Any:
            return (target.mkdir, ())

    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"wte.weight": Evil()}, file)
    assert "pytorch_model.bin cannot be read" in refusal(tmp_path)
    assert not target.exists()


def test_a_tied_head_that_differs(make_theirs: MakeTheirs, tmp_path: Path) -> None:
    make_theirs("qwen2-untied").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert "Set tie_word_embeddings to false" in refusal(tmp_path)


def test_a_whole_model_beside_one_in_parts(make_theirs: MakeTheirs, tmp_path: Path) -> None:
    theirs = make_theirs("llama-mha")
    theirs.save_pretrained(tmp_path, max_shard_size=20_000)
    whole = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    save_file(whole, str(tmp_path / "model.safetensors"))
    assert "holds two models, model.safetensors, and model.safetensors.index" in refusal(tmp_path)
    for shard in tmp_path.glob("model-*.safetensors"):
        shard.unlink()  # an older save's index was left behind
    read_weights(tmp_path, spec_from_hf(tmp_path))


def test_the_index_says_where_a_tensor_is(make_theirs: MakeTheirs, tmp_path: Path) -> None:
    make_theirs("llama-mha").save_pretrained(tmp_path, max_shard_size=20_000)
    spec = spec_from_hf(tmp_path)
    wanted = read_weights(tmp_path, spec)
    last = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    first = load_file(sorted(tmp_path.glob("model-*.safetensors"))[0])
    stale = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
    save_file(load_file(last) | stale, str(last))
    found = read_weights(tmp_path, spec)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_tensor_by_an_old_and_a_new_name(stored: Path) -> None:
    def change(tensors: dict[str, Tensor], by: float = 1.0) -> dict[str, Tensor]:
        return tensors | {"norm.weight": tensors["model.norm.weight"] + by}

    rewrite(stored, lambda tensors: change(tensors, 0.0))
    read_weights(stored, spec_from_hf(stored))
    rewrite(stored, change)
    said = refusal(stored)
    assert "model.norm.weight" in said and "norm.weight" in said and "with different values" in said


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_model_without_its_head_is_named(tmp_path, family):
    """As AutoModel saves it."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64,
             "num_attention_heads": 2}  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **sizes)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(BadInputError, match="saved without its head") as refused:
        read_weights(tmp_path, spec_from_hf(tmp_path))
    assert "--init random" not in str(refused.value)
