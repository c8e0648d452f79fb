"""Adapters cross to PEFT and back: the same logits on both sides."""

import importlib
import json
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace.data.padded_batches import RaggedSamples, concatenate_samples
from outpace.data.tokenizer_training import train_tokenizer
from outpace.interop.huggingface import read_weights, spec_from_hf, write_model
from outpace.interop.models import open_model
from outpace.interop.peft import adapter_notes, merge_into, shortest_suffixes, write_adapter
from outpace.interop.untrained_tokens import find_untrained, untrained_token_hints
from outpace.nn.lora import adapters, add_adapters
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan

# PEFT asks transformers by a name that is deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
PLAN = Plan(lora_rank=2, lora_alpha=3)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def peft():
    """Import it here, not in each worker that collects: it loads torch's compiler, for 3 s."""
    return importlib.import_module("peft")


@pytest.fixture
def adapted(make_theirs, tmp_path):
    """Their model in a folder, and ours with adapters beside its weights."""

    def make(variant, **lora):
        theirs = make_theirs(variant)
        base = tmp_path / "base"
        theirs.save_pretrained(base)
        spec = spec_from_hf(base)
        ours = Transformer(spec)
        ours.load_state_dict(read_weights(base, spec))
        plan = PLAN.model_copy(update=lora)
        add_adapters(ours, plan, 1)
        with torch.no_grad():
            for _, b, _ in adapters(ours).values():
                b.normal_(0, 0.3)
        write_adapter(tmp_path / "adapter", ours, plan, base, None)
        return theirs, ours.eval(), base, tmp_path / "adapter"

    return make


def merged(adapter, base, form=None):
    spec = spec_from_hf(base)
    weights = read_weights(base, spec)
    merge_into(weights, adapter, base, form)
    model = Transformer(spec)
    model.load_state_dict(weights)
    return model.eval()


@pytest.mark.parametrize(
    ("variant", "targets"),
    [
        ("gpt2", ("all",)),
        ("gpt2", ("q", "v")),
        ("gpt2", ("k", "out")),
        ("llama-tied-biased", ("all",)),
        ("qwen3", ("q", "v")),
        ("bert", ("all",)),
        ("bert", ("v", "down")),
    ],
)
@torch.no_grad()
def test_peft_computes_what_was_trained_and_so_does_the_merged_model(
    adapted, tokens, load_theirs, tmp_path, peft, variant, targets
):
    theirs, ours, base, adapter = adapted(variant, lora_targets=targets)
    before = theirs(tokens).logits
    wanted = ours.logits(ours(tokens))
    assert (wanted - before).abs().max() > 0.1
    found = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    torch.testing.assert_close(found(tokens).logits, wanted, **CLOSE)
    model = merged(adapter, base)
    torch.testing.assert_close(model.logits(model(tokens)), wanted, **CLOSE)
    write_model(tmp_path / "merged", model.spec, model.state_dict(), None)
    torch.testing.assert_close(load_theirs(tmp_path / "merged")(tokens).logits, wanted, **CLOSE)


@pytest.mark.parametrize(
    ("variant", "modules"), [("gpt2", ["c_attn", "c_fc"]), ("llama-mha", None)]
)
@torch.no_grad()
def test_what_peft_wrote_is_merged(make_theirs, tokens, tmp_path, peft, variant, modules):
    theirs = make_theirs(variant)
    theirs.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=True, target_modules=modules or "all-linear",
        init_lora_weights=False, fan_in_fan_out=variant == "gpt2", task_type="CAUSAL_LM",
    )  # fmt: skip
    found = peft.get_peft_model(theirs, config).eval()
    found.save_pretrained(tmp_path / "adapter")
    model = merged(tmp_path / "adapter", tmp_path / "base")
    torch.testing.assert_close(model.logits(model(tokens)), found(tokens).logits, **CLOSE)


def test_what_peft_trained_beside_layers_is_refused_with_what_to_do(make_theirs, tmp_path, peft):
    theirs = make_theirs("llama-mha")
    theirs.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM")
    found = peft.get_peft_model(theirs, config)
    found.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(BadInputError, match=r"embed.* is not a LoRA matrix .*merge_and_unload"):
        merged(tmp_path / "adapter", tmp_path / "base")
    save_file({}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(BadInputError, match="holds no tensors: the adapter would change nothing"):
        merged(tmp_path / "adapter", tmp_path / "base")


@pytest.mark.parametrize("begun", ["pissa", "olora", "gaussian", "orthogonal", "mica"])
@torch.no_grad()
def test_an_adapter_that_changed_its_base_is_refused(make_theirs, tokens, tmp_path, peft, begun):
    theirs = make_theirs("llama-mha")
    theirs.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=2, target_modules="all-linear", init_lora_weights=begun, task_type="CAUSAL_LM"
    )
    found = peft.get_peft_model(theirs, config).eval()
    for name, weight in found.named_parameters():
        if "lora_" in name:
            weight += torch.randn_like(weight) * 0.1
    found.save_pretrained(tmp_path / "adapter")
    if begun in ("pissa", "olora"):  # which it has taken out of the base's weights
        with pytest.raises(BadInputError, match=f"init_lora_weights is '{begun}'"):
            merged(tmp_path / "adapter", tmp_path / "base")
        return
    model = merged(tmp_path / "adapter", tmp_path / "base")
    torch.testing.assert_close(model.logits(model(tokens)), found(tokens).logits, **CLOSE)


@torch.no_grad()
def test_beside_weights_in_4_bits_the_merged_model_is_what_was_trained(adapted, tokens):
    _, ours, base, adapter = adapted("llama-mha", base="nf4")
    wanted = ours.logits(ours(tokens))
    model = merged(adapter, base)
    torch.testing.assert_close(model.logits(model(tokens)), wanted, **CLOSE)
    stored = merged(adapter, base, "fp32")
    assert (stored.logits(stored(tokens)) - wanted).abs().max() > 0.05


def test_the_files_are_small_and_named_as_peft_does(adapted):
    _, _, base, adapter = adapted("gpt2", lora_targets=("q", "v"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["target_modules"] == ["c_attn"]
    assert config["rank_pattern"] == {"c_attn": 4} and config["alpha_pattern"] == {"c_attn": 6}
    assert config["base_model_name_or_path"] == str(base)
    opened = open_model(str(adapter))
    assert (opened.weights, opened.adapter) == (base, adapter)
    assert opened.spec == spec_from_hf(base)


def test_names_end_where_no_other_does():
    known = ["a.0.x.dense", "a.0.dense", "a.1.x.dense", "a.1.dense", "a.0.q"]
    assert shortest_suffixes(["a.0.q"], known) == ["q"]
    assert shortest_suffixes(["a.0.x.dense", "a.1.x.dense"], known) == ["x.dense"]
    assert shortest_suffixes(["a.0.dense", "a.1.dense"], known) == ["0.dense", "1.dense"]


def change_tensors(adapter, change):
    path = adapter / "adapter_model.safetensors"
    kept = {change(name): tensor for name, tensor in load_file(path).items() if change(name)}
    save_file(kept, path)
    (adapter / "checksums.json").unlink(missing_ok=True)


@torch.no_grad()
def test_an_adapter_without_pefts_prefix_is_added_and_said(adapted, tokens):
    _, ours, base, adapter = adapted("qwen3")
    wanted = ours.logits(ours(tokens))
    assert adapter_notes(adapter) == ()
    change_tensors(adapter, lambda name: name.removeprefix("base_model.model."))
    model = merged(adapter, base)
    torch.testing.assert_close(model.logits(model(tokens)), wanted, **CLOSE)
    (note,) = open_model(str(adapter)).notes
    assert "without base_model.model." in note and "peft would leave them out" in note


def test_an_adapter_that_changes_nothing_is_said(adapted):
    *_, adapter = adapted("gpt2")
    path = adapter / "adapter_model.safetensors"
    held = {n: t * ("lora_A" in n) for n, t in load_file(path).items()}
    save_file(held, path)
    (note,) = adapter_notes(adapter)
    assert "changes nothing: all of its B are zero" in note


@pytest.mark.parametrize(
    ("targets", "kept", "said"),
    [
        (["q_proj"], "", "holds matrices of .*v_proj and 1 more, which .* does not name"),
        (r".*\.q_proj", "", "holds matrices of .*v_proj and 1 more, which .* does not name"),
        (["q_proj", "v_proj"], "q_proj", "no matrices of model.layers.0.self_attn.v_proj and 1"),
        (["q_proj", "v_proj"], "layers.0", "no matrices of model.layers.1.self_attn.q_proj and 1"),
        (["q_proj", "v_proj"], "", None),
        (r".*\.(q|v)_proj", "", None),
        ("all-linear", "layers.0", None),
        (None, "q_proj", None),
    ],
)
def test_an_adapter_of_other_modules_than_its_config_names_is_refused(adapted, targets, kept, said):
    """Half of a file was merged without a word, and so was what peft leaves out."""
    _, _, base, adapter = adapted("qwen3", lora_targets=("q", "v"))
    change_tensors(adapter, lambda name: name if kept in name else "")
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": targets}))
    if said is None:
        merged(adapter, base)
        return
    with pytest.raises(BadInputError, match=said):
        merged(adapter, base)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"layers_to_transform": 0}))
    if kept == "layers.0":
        merged(adapter, base)


@pytest.mark.parametrize(
    ("more", "kept", "said"),
    [
        (
            {"exclude_modules": ["layers.1.self_attn.q_proj"]},
            "",
            r"holds matrices of model.layers.1",
        ),
        ({"exclude_modules": r".*layers\.1\..*"}, "", r"matrices of .* \(with exclude_modules\)"),
        ({"exclude_modules": r".*layers\.1\..*"}, "layers.0", None),
        ({"exclude_modules": ["k_proj"]}, "layers.0", "holds no matrices of model.layers.1"),
        ({"layers_to_transform": []}, "", None),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, "layers.0", None),
        ({"layers_to_transform": [0], "layers_pattern": ["layers"]}, "", "holds matrices of"),
        ({"layers_to_transform": [0], "layers_pattern": "blocks"}, "layers.0", "holds matrices of"),
        (
            {
                "target_modules": [
                    f"model.layers.{n}.self_attn.{part}_proj" for n in (0, 1) for part in "qv"
                ],
                "layers_to_transform": [0],
            },
            "",
            None,  # whole names, which peft takes in any layer
        ),
        ({"layers_to_transform": [0], "layers_pattern": "h("}, "", "not a valid pattern of names"),
        ({"layers_to_transform": [0], "layers_pattern": [3]}, "", r"must be a string or a list"),
        ({"layers_to_transform": 0.5}, "", r"layers_to_transform is 0\.5; it must be the number"),
        ({"exclude_modules": "*"}, "", r"exclude_modules has '\*', which is not a valid pattern"),
    ],
)
def test_modules_that_a_config_excludes_are_no_targets(adapted, more, kept, said):
    """Their matrices were added, where peft leaves them out, and nothing was said."""
    _, _, base, adapter = adapted("qwen3", lora_targets=("q", "v"))
    change_tensors(adapter, lambda name: name if kept in name else "")
    config = adapter / "adapter_config.json"
    targets = {"target_modules": ["q_proj", "v_proj"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | targets | more))
    if said is None:
        merged(adapter, base)
        return
    with pytest.raises(BadInputError, match=said):
        merged(adapter, base)


def test_names_of_a_compiled_module_are_read_and_two_for_one_matrix_refused(adapted):
    """torch.compile's prefix, as trainers save it (and weights of whole models may have it)."""
    _, _, base, adapter = adapted("qwen3", lora_targets=("q", "v"))
    whole = merged(adapter, base).state_dict()
    change_tensors(adapter, lambda name: name.replace("model.model.", "model._orig_mod.model."))
    again = merged(adapter, base).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    held = load_file(adapter / "adapter_model.safetensors")
    twice = {name.replace("_orig_mod.", ""): tensor + 1 for name, tensor in held.items()}
    save_file(held | twice, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInputError, match=r"under two names, with different values\. Keep one"):
        merged(adapter, base)


def test_an_adapter_of_another_rank_than_its_config_says_is_refused(adapted):
    """It was scaled by the rank of its matrices, whatever the config said."""
    _, _, base, adapter = adapted("qwen3", lora_targets=("q", "v"))
    config = adapter / "adapter_config.json"
    written = json.loads(config.read_text())
    (adapter / "checksums.json").unlink()
    for change, said in (
        ({"r": 3}, "_proj have rank 2, and .* says 3"),
        ({"rank_pattern": {"v_proj": 1}}, r"v_proj have rank 2, and .* says 1"),
        ({"rank_pattern": {"(": 1}}, "rank_pattern has .*, which is not a valid pattern of names"),
        ({"rank_pattern": [1]}, r"rank_pattern is \[1\]; it must be an object"),
    ):
        config.write_text(json.dumps(written | change))
        with pytest.raises(BadInputError, match=said):
            merged(adapter, base)
    config.write_text(json.dumps(written | {"r": 64, "rank_pattern": {"[qv]_proj": written["r"]}}))
    merged(adapter, base)


def test_what_is_refused(adapted, tmp_path):
    _, _, base, adapter = adapted("llama-mha")
    written = (adapter / "adapter_config.json").read_text()
    config = json.loads(written)

    def said(**values):
        (adapter / "adapter_config.json").write_text(json.dumps({**config, **values}))
        with pytest.raises(BadInputError) as caught:
            open_model(str(adapter))
        return str(caught.value)

    assert "adapter of type IA3" in said(peft_type="IA3")
    assert "use_dora is True" in said(use_dora=True)
    assert "bias is 'all'" in said(bias="all")
    assert "alora_invocation_tokens is [5]" in said(alora_invocation_tokens=[5])
    assert "use_qalora is True" in said(use_qalora=True)
    assert "kasa_config is {'beta': 1}" in said(kasa_config={"beta": 1})
    assert "init_lora_weights is 'pissa_niter_16'" in said(init_lora_weights="pissa_niter_16")
    assert "is not a directory here" in said(base_model_name_or_path="meta-llama/Llama-2-7b")
    (adapter / "adapter_config.json").write_text(written)
    other = Transformer(spec_from_hf(base), seed=3)
    write_model(base, other.spec, other.state_dict(), None)
    with pytest.raises(BadInputError, match=r"the adapter .* was not trained with the weights"):
        merged(adapter, base)
    merged(adapter, base, "fp32")
    narrow = other.spec.model_copy(update={"hidden": 16, "head_dim": 4})
    write_model(tmp_path / "narrow", narrow, Transformer(narrow).state_dict(), None)
    with pytest.raises(BadInputError, match="does not fit the model"):
        merged(adapter, tmp_path / "narrow", "fp32")


@pytest.mark.parametrize(("change", "found"), [("zero", {3, 5}), ("alike", {3}), ("none", set())])
def test_tokens_that_the_base_was_not_trained_on_are_found(make_theirs, tmp_path, change, found):
    theirs = make_theirs("llama-tied-biased")
    with torch.no_grad():
        rows = theirs.get_input_embeddings().weight
        if change == "zero":
            rows[[3, 5, 7]] = 0
        elif change == "alike":
            rows[3] = rows[6]
    theirs.save_pretrained(tmp_path)
    assert find_untrained(tmp_path, {3, 4, 5}, {3, 4, 5, 6, 7, 10**6}) == found


def test_adapters_of_tokens_that_are_not_trained_are_told(make_theirs, tmp_path):
    tokenizer = train_tokenizer(["user assistant"] * 3, 300)
    tokenizer.inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    ends = tokenizer.inner.token_to_id("<|im_end|>")
    theirs = make_theirs("llama-tied-biased")
    theirs.resize_token_embeddings(400)
    samples = concatenate_samples(
        [{"tokens": [70, 71], "targets": [-100, ends]}], {"tokens": 0, "targets": -100}
    )
    theirs.save_pretrained(tmp_path / "known")
    assert untrained_token_hints(tmp_path / "known", tokenizer, [samples]) == []
    with torch.no_grad():
        theirs.get_input_embeddings().weight[ends] = 0
    theirs.save_pretrained(tmp_path / "base")
    (said,) = untrained_token_hints(tmp_path / "base", tokenizer, [samples])
    assert "tokens of the conversations were never trained: '<|im_end|>'." in said


def test_the_tokens_of_long_data_are_not_copied(tmp_path):
    tokenizer = train_tokenizer(["user assistant"] * 3, 300)
    tokenizer.inner.add_special_tokens(["<|im_end|>"])
    tokens = np.full(6_000_000, 70, np.int32)
    values = {"tokens": tokens, "targets": tokens}
    samples = RaggedSamples(np.array([0, len(tokens)]), values, {"tokens": 0, "targets": -100})
    tracemalloc.start()
    try:
        assert untrained_token_hints(tmp_path, tokenizer, [samples]) == []
        assert tracemalloc.get_traced_memory()[1] < tokens.nbytes
    finally:
        tracemalloc.stop()
