"""Classifiers in and out of transformers' directories."""

import json

import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from outpace.data.classify import with_pairs
from outpace.data.tokenizer import Tokenizer
from outpace.interop.classifier import (
    known_labels,
    read_classifier,
    unsupported_task,
    write_classifier,
)
from outpace.interop.config import spec_from_config
from outpace.interop.huggingface import spec_from_hf
from outpace.nn.classifier import Classifier
from outpace.nn.transformer import Transformer
from outpace.records.errors import BadInputError

TOKENS = torch.randint(1, 40, (3, 6), generator=torch.Generator().manual_seed(1))
SMALL = {"vocab_size": 40, "pad_token_id": 0}
CONFIGS = {
    "bert": transformers.BertConfig(
        **SMALL, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    ),
    "gpt2": transformers.GPT2Config(**SMALL, n_embd=16, n_layer=1, n_head=2, n_positions=16),
    "qwen2": transformers.Qwen2Config(
        **SMALL, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        num_key_value_heads=1, max_position_embeddings=16,
    ),
}  # fmt: skip


def theirs(directory):
    auto = transformers.AutoModelForSequenceClassification
    return auto.from_pretrained(directory).eval()


def scores(model):
    with torch.no_grad():
        if isinstance(model, Classifier):
            return model.eval()(TOKENS)
        return model(TOKENS).logits


@pytest.mark.parametrize("family", CONFIGS)
def test_their_classifier_is_read_and_written_with_equal_scores(tmp_path, family):
    config = CONFIGS[family]
    config.id2label, config.label2id = {0: "no", 1: "so", 2: "yes"}, {"no": 0, "so": 1, "yes": 2}
    source = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    source.save_pretrained(tmp_path / "in")
    labels = known_labels(tmp_path / "in")
    assert labels == ("no", "so", "yes")
    spec = spec_from_hf(tmp_path / "in")
    ours = read_classifier(tmp_path / "in", spec, labels, seed=0)
    torch.testing.assert_close(scores(ours), scores(source), rtol=0, atol=1e-5)

    def save(folder):
        tokenizer.save_pretrained(folder)

    inner = transformers.PreTrainedTokenizerFast(tokenizer_object=_words(), pad_token="0")
    tokenizer = inner
    write_classifier(tmp_path / "out", ours, ours.state_dict(), labels, save)
    back = theirs(tmp_path / "out")
    assert torch.equal(scores(back), scores(theirs(tmp_path / "in")))
    assert back.config.id2label == config.id2label
    # Other labels: the layer over them is new, all else is kept.
    other = read_classifier(tmp_path / "out", spec, ("a", "b"), seed=0)
    assert torch.equal(other.backbone.embed.tokens.weight, ours.backbone.embed.tokens.weight)
    assert other.classifier.weight.shape == (2, 16)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_scores_do_not_depend_on_the_texts_beside_one(tmp_path, family):
    """The tokenizer of a chat model pads on the left, which moves the learned positions."""
    inner, encoder = _words(), family == "bert"
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["[PAD]", "[CLS]", "[SEP]"])
    plain = Tokenizer(inner, "[SEP]", {"pad_token": "[PAD]", "padding_side": "left"})
    tokenizer = with_pairs(plain, encoder)
    spec = spec_from_config(CONFIGS[family], "").model_copy(update={"vocab": 43})
    model = Classifier(Transformer(spec), 2)
    write_classifier(tmp_path, model, model.state_dict(), ("a", "b"), tokenizer.save)
    model, tokenizer = theirs(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["1 2 3 4 5 6 7", "8 9"]
    alone = torch.cat([model(**tokenizer(one, return_tensors="pt")).logits for one in texts])
    together = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(
    ("labels", "problem", "told"),
    [
        (2, None, None),
        (2, "single_label_classification", None),
        (2, "multi_label_classification", "several labels of a text"),
        (2, "regression", "numbers (problem_type regression)"),
        (1, None, "numbers (problem_type not given, and a single label)"),
    ],
)
def test_what_a_stored_classifier_was_trained_for(tmp_path, labels, problem, told):
    config = transformers.GPT2Config(
        **CONFIGS["gpt2"].to_diff_dict() | {"num_labels": labels, "problem_type": problem}
    )
    transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    found = unsupported_task(tmp_path)
    assert found == told or (told and found and found.startswith(told))
    if labels == 2:
        spec = spec_from_hf(tmp_path)
        stored = theirs(tmp_path).score.weight
        ours = read_classifier(tmp_path, spec, known_labels(tmp_path), seed=0)
        assert torch.equal(ours.classifier.weight, stored) == (told is None)


@pytest.mark.parametrize(
    "names", [{"1": "no", "2": "yes"}, {"0": "no", "1": "no"}, {"0": "no", "b": "yes"}, ["no"]]
)
def test_classes_that_are_no_rows_are_refused(tmp_path, names):
    values = {"architectures": ["GPT2ForSequenceClassification"], "id2label": names}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(BadInputError, match="it has to name the classes 0, 1 and so on"):
        known_labels(tmp_path)


def test_classes_without_names_are_as_many_as_the_file_says(tmp_path):
    values = {"architectures": ["GPT2ForSequenceClassification"], "num_labels": 3}
    values["label2id"] = {"no": 0, "yes": 1, "maybe": 2}  # which transformers replaces, too
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert known_labels(tmp_path) == ("LABEL_0", "LABEL_1", "LABEL_2")


def _words():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({str(n): n for n in range(40)}, unk_token="0"))


@pytest.mark.parametrize("pooled", [True, False])
def test_the_pooler_is_taken_where_there_is_one(tmp_path, pooled):
    kind = transformers.BertForPreTraining if pooled else transformers.BertForMaskedLM
    source = kind(CONFIGS["bert"])
    source.save_pretrained(tmp_path)
    assert known_labels(tmp_path) is None
    spec = spec_from_hf(tmp_path)
    ours = read_classifier(tmp_path, spec, ("0", "1"), seed=3)
    drawn = Classifier(Transformer(spec, 3), 2, 3)
    expected = source.bert.pooler.dense.weight if pooled else drawn.pooler.weight
    assert torch.equal(ours.pooler.weight, expected)
    assert torch.equal(ours.classifier.weight, drawn.classifier.weight)


def test_files_that_lack_a_layer_are_refused(tmp_path):
    source = transformers.BertForMaskedLM(CONFIGS["bert"])
    source.save_pretrained(tmp_path)
    spec = spec_from_hf(tmp_path).model_copy(update={"layers": 2})
    with pytest.raises(BadInputError, match=r"missing tensors: bert\.encoder\.layer\.1"):
        read_classifier(tmp_path, spec, ("0", "1"), seed=0)
