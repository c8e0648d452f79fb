"""What a trained model's folder keeps of the one that it came from."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
import transformers

from outpace.data.chat import DEFAULT_TEMPLATE
from outpace.data.tokenizer_training import train_tokenizer
from outpace.jobs.inference import generate
from outpace.jobs.merge_adapter import merge_adapter
from outpace.jobs.train.context import RunContext
from outpace.jobs.train.job import train
from outpace.records.errors import BadInputError
from outpace.records.settings import TrainSettings

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom|>")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A Llama as published: its stop list, bos, settings for generation and tokenizer's files."""
    folder = tmp_path_factory.mktemp("exports")
    source = folder / "source"
    learnt = train_tokenizer(["a small text to learn from"] * 9, 300)
    learnt.inner.add_special_tokens(list(NAMES))
    learnt.save(source)
    ids = {name: learnt.inner.token_to_id(name) for name in NAMES}
    (source / "chat_template.jinja").write_text(CHATML)
    (source / "README.md").write_text("a card")
    vocab = learnt.inner.get_vocab_size()
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, vocab_size=vocab, max_position_embeddings=64,
        eos_token_id=[ids["<|eom|>"], ids["<|endoftext|>"]], bos_token_id=ids["<|im_start|>"],
        pad_token_id=ids["<|eom|>"],
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    generation = {**SAMPLING, "eos_token_id": config.eos_token_id, "max_new_tokens": 77}
    (source / "generation_config.json").write_text(json.dumps(generation))
    np.arange(600, dtype=np.uint16).__mod__(200).tofile(folder / "tokens.bin")
    (folder / "text.txt").write_text("a small text to learn from, and more of it. " * 60)
    talk = {"prompt": "a small text", "completion": "from"}
    (folder / "talk.jsonl").write_text(json.dumps(talk) + "\n" + json.dumps(talk) + "\n")
    return folder, ids


def trained(home, name, **more):
    folder, _ = home
    values = {
        "model": str(folder / "source"), "steps": 1, "seq_len": 16, "global_batch": 2, "warmup": 0,
        "eval_batches": 0, "sample_tokens": 0, "precision": "fp32", "device": "cpu",
        "cache_dir": folder / "cache", "out": folder / name, **more,
    }  # fmt: skip
    train(TrainSettings.parse(values, "test"), RunContext())
    return folder / name / "model"


def read(model, name):
    return json.loads((model / name).read_text())


@pytest.mark.parametrize("data", ["tokens.bin", "text.txt"])
def test_ids_settings_and_tokenizer_survive(home, data):
    folder, ids = home
    held_out = {"eval_data": (str(folder / data),)} if data.endswith("bin") else {}
    model = trained(home, data.partition(".")[0], data=(str(folder / data),), **held_out)
    config, source = read(model, "config.json"), folder / "source"
    assert config["eos_token_id"] == [ids["<|eom|>"], ids["<|endoftext|>"]]
    assert config["bos_token_id"] == ids["<|im_start|>"]
    assert config["pad_token_id"] == ids["<|eom|>"]
    generation = read(model, "generation_config.json")
    assert generation.items() >= read(source, "generation_config.json").items()
    modes = {path.name: path.stat().st_mode & 0o777 for path in model.iterdir()}
    assert set(modes.values()) == {0o666 & ~os.umask(os.umask(0o022))}, modes
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                 "chat_template.jinja"):  # fmt: skip
        assert (model / name).read_bytes() == (source / name).read_bytes()
    assert not (model / "README.md").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert loaded.generation_config.temperature == 0.6
    assert transformers.AutoTokenizer.from_pretrained(model).chat_template == CHATML


def test_a_colleague_can_read_all_files(home, tmp_path):
    """safetensors writes for the owner alone; of a model, an adapter and what is merged of them."""
    folder, _ = home
    usual = 0o666 & ~os.umask(os.umask(0o022))
    data = (str(folder / "text.txt"),)
    written = [trained(home, "shared", data=data), trained(home, "adapted", data=data, lora_rank=2)]
    merge_adapter(folder / "adapted", tmp_path / "merged", model=None, base=None, dtype="fp32")
    for model in (*written, tmp_path / "merged"):
        modes = {path.name: path.stat().st_mode & 0o777 for path in model.iterdir()}
        assert any(name.endswith(".safetensors") for name in modes)
        assert set(modes.values()) == {usual}, modes


def test_generation_ends_where_answers_end(home):
    """The template's stop token joins those of the source, which does not have it."""
    folder, ids = home
    model = trained(home, "chat", task="chat", seq_len=48, data=(str(folder / "talk.jsonl"),))
    ends = [ids["<|eom|>"], ids["<|endoftext|>"], ids["<|im_end|>"]]
    assert read(model, "config.json")["eos_token_id"] == ends
    generation = read(model, "generation_config.json")
    assert generation["eos_token_id"] == ends and generation["top_p"] == 0.9
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():  # a model that always says the template's stop token
        loaded.lm_head.weight.zero_()
        loaded.lm_head.weight[ids["<|im_end|>"]] = 1e3 * loaded.model.norm.weight
        loaded.model.embed_tokens.weight.fill_(1.0)
    said = loaded.generate(torch.tensor([[1, 2]]), max_new_tokens=8, do_sample=False)
    assert said[0, 2:].tolist() == [ids["<|im_end|>"]]


def test_a_merged_model_ends_where_answers_end(home, tmp_path):
    """Also one whose adapter was copied out of its run."""
    folder, ids = home
    data = (str(folder / "talk.jsonl"),)
    model = trained(home, "chat-lora", task="chat", seq_len=48, lora_rank=2, data=data)
    shutil.copytree(model, tmp_path / "adapter")
    ends = [ids["<|eom|>"], ids["<|endoftext|>"], ids["<|im_end|>"]]
    for name, adapter in (("a", folder / "chat-lora"), ("b", tmp_path / "adapter")):
        merge_adapter(adapter, tmp_path / name, model=None, base=None, dtype="fp32")
        assert read(tmp_path / name, "generation_config.json")["eos_token_id"] == ends


def test_a_tokenizer_without_a_template_gets_the_one_trained_with(home):
    folder, _ = home
    bare = folder / "bare"
    if not bare.is_dir():
        bare.mkdir()
        for path in (folder / "source").iterdir():
            if path.name not in ("chat_template.jinja", "generation_config.json"):
                (bare / path.name).write_bytes(path.read_bytes())
    model = trained(home, "bare-chat", model=str(bare), task="chat", seq_len=48,
                    data=(str(folder / "talk.jsonl"),))  # fmt: skip
    assert read(model, "tokenizer_config.json")["chat_template"] == DEFAULT_TEMPLATE
    assert (
        read(model, "generation_config.json")["eos_token_id"]
        == read(bare, "config.json")["eos_token_id"]
    )


def test_a_learnt_tokenizer_cuts_at_the_models_positions(home):
    """Without a length of its own, transformers' `truncation=True` cuts nothing."""
    folder, _ = home
    (folder / "spec.json").write_text(
        '{"family": "gpt2", "layers": 1, "hidden": 16, "heads": 2, "vocab": 300, '
        '"max_positions": 32}'
    )
    model = trained(home, "learnt-run", model=str(folder / "spec.json"),
                    data=(str(folder / "text.txt"),))  # fmt: skip
    loaded = transformers.AutoTokenizer.from_pretrained(model)
    assert loaded.model_max_length == 32
    assert len(loaded("from it " * 99, truncation=True)["input_ids"]) == 32


def test_another_tokenizer_takes_nothing_of_the_source(home):
    folder, _ = home
    other = train_tokenizer(["quite another text"] * 9, 280)
    other.save(folder / "other")
    model = trained(home, "other-run", init="random", tokenizer=str(folder / "other"),
                    data=(str(folder / "text.txt"),))  # fmt: skip
    assert read(model, "config.json")["eos_token_id"] == other.eos_id
    assert "temperature" not in read(model, "generation_config.json")


def test_another_base_is_said_and_a_longer_tokenizer_refused(home, tmp_path):
    """Of an adapter that peft wrote nothing tells whether weights are those it belongs to."""
    folder, _ = home
    trained(home, "lora-other", lora_rank=2, data=(str(folder / "text.txt"),))
    adapter = tmp_path / "adapter"
    shutil.copytree(folder / "lora-other" / "model", adapter)
    (adapter / "outpace.json").unlink()
    (adapter / "checksums.json").unlink(missing_ok=True)
    config = {**read(adapter, "adapter_config.json"), "base_model_name_or_path": "org/another"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    source = folder / "source"
    found = merge_adapter(adapter, tmp_path / "a", model=source, base=None, dtype="fp32")
    (note,) = found.notes
    assert "names org/another as its base, but was merged into" in note
    same = {**config, "base_model_name_or_path": str(source)}
    (adapter / "adapter_config.json").write_text(json.dumps(same))
    found = merge_adapter(adapter, tmp_path / "b", model=None, base=None, dtype="fp32")
    assert found.notes == ()
    for merged in (adapter, source):
        with pytest.raises(BadInputError, match=f"--out {merged} is one of the folders to merge"):
            merge_adapter(adapter, merged, model=None, base=None, dtype="fp32")
    train_tokenizer(["more words than the base has tokens"] * 9, 290).save(tmp_path / "t")
    longer = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    vocab = read(source, "config.json")["vocab_size"]
    longer["added_tokens"] += [
        {"id": len(longer["model"]["vocab"]) + n, "content": f"<new{n}>", "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for n in range(vocab)
    ]  # fmt: skip
    (adapter / "tokenizer.json").write_text(json.dumps(longer))
    for model in (None, source):
        with pytest.raises(BadInputError, match="trained over a larger embedding"):
            merge_adapter(adapter, tmp_path / "c", model=model, base=None, dtype="fp32")
    with pytest.raises(BadInputError, match="the tokenizer has a vocabulary of"):
        generate(
            adapter,
            "a",
            max_new_tokens=1,
            temperature=0.0,
            top_k=None,
            seed=0,
            device="cpu",
            on_hint=print,
        )


def test_a_merged_adapter_keeps_them_too(home):
    folder, ids = home
    trained(home, "lora", lora_rank=2, data=(str(folder / "text.txt"),))
    merge_adapter(folder / "lora", folder / "merged", model=None, base=None, dtype="fp32")
    assert read(folder / "merged", "config.json")["eos_token_id"][0] == ids["<|eom|>"]
    assert read(folder / "merged", "generation_config.json")["temperature"] == 0.6
    kept = (folder / "merged" / "chat_template.jinja").read_text()
    assert kept == CHATML


def test_held_out_data_may_be_short_where_nothing_is_evaluated(home):
    folder, _ = home
    np.arange(257, dtype=np.uint16).__mod__(200).tofile(folder / "short.bin")
    short = {"data": (str(folder / "short.bin"),), "seq_len": 64}
    assert trained(home, "unevaluated", **short, eval_batches=0).is_dir()
    with pytest.raises(BadInputError, match=r"held out for validation .* has 13 tokens"):
        trained(home, "evaluated", **short, eval_batches=1)


def test_a_relabelled_model_is_not_trained(home):
    """Granite's tensors have Llama's names: only its config tells."""
    folder, _ = home
    granite = folder / "granite"
    config = transformers.GraniteConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, vocab_size=300, max_position_embeddings=64, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, embedding_multiplier=12.0, logits_scaling=8.0,
    )  # fmt: skip
    transformers.GraniteForCausalLM(config).save_pretrained(granite)
    values = json.loads((granite / "config.json").read_text())
    for name, change, said in (
        ("relabelled", {}, "architectures says GraniteForCausalLM, model_type says 'llama'"),
        ("unnamed", {"architectures": None}, "logits_scaling 8.0"),
    ):
        (granite / "config.json").write_text(
            json.dumps({**values, "model_type": "llama", **change})
        )
        with pytest.raises(BadInputError, match=said):
            trained(home, name, model=str(granite), data=(str(folder / "tokens.bin"),))
        assert not (folder / name / "model").exists()


def test_a_named_tokenizers_files_are_copied(home):
    """Beside a preset, too."""
    folder, _ = home
    source = folder / "source"
    config = read(source, "tokenizer_config.json") | {"add_bos_token": True, "extra": 1}
    named = folder / "named"
    named.mkdir()
    for name in ("tokenizer.json", "special_tokens_map.json"):
        (named / name).write_bytes((source / name).read_bytes())
    (named / "tokenizer_config.json").write_text(json.dumps(config))
    spec = {"family": "llama", "layers": 1, "hidden": 16, "heads": 2, "vocab": 320,
            "max_positions": 64}  # fmt: skip
    (folder / "spec.json").write_text(json.dumps(spec))
    model = trained(home, "preset", model=str(folder / "spec.json"), tokenizer=str(named),
                    data=(str(folder / "text.txt"),))  # fmt: skip
    assert read(model, "tokenizer_config.json") == config


def test_a_tokenizer_of_old_files_is_written_anew(home):
    """vocab.json and merges.txt alone mean nothing without the model's type."""
    folder, ids = home
    old = folder / "old"
    old.mkdir()
    parts = read(folder / "source", "tokenizer.json")["model"]
    (old / "vocab.json").write_text(
        json.dumps(parts["vocab"] | {"<|endoftext|>": ids["<|endoftext|>"]})
    )
    merges = [" ".join(pair) for pair in parts["merges"]]
    (old / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    for name in ("config.json", "model.safetensors"):
        (old / name).write_bytes((folder / "source" / name).read_bytes())
    model = trained(home, "from-old", model=str(old), data=(str(folder / "text.txt"),))
    assert (model / "tokenizer.json").is_file()
    loaded = transformers.AutoTokenizer.from_pretrained(model)
    assert loaded("a small text")["input_ids"]


def test_a_merged_adapter_ends_where_the_answers_end_that_it_has_learnt(home):
    folder, ids = home
    trained(home, "talk", task="chat", seq_len=48, lora_rank=2,
            data=(str(folder / "talk.jsonl"),))  # fmt: skip
    merge_adapter(folder / "talk", folder / "answers", model=None, base=None, dtype="fp32")
    ends = read(folder / "answers", "generation_config.json")["eos_token_id"]
    assert ends == [ids["<|eom|>"], ids["<|endoftext|>"], ids["<|im_end|>"]]
