"""The cases of the peer benchmarks: a model's initial weights and its batches, the same for all.

`write` prepares a case: `model/` (as `from_pretrained` reads it), the data that outpace reads, and
`batches/` with exactly the samples that outpace draws for each step, as arrays, for all others.
"""

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SEED = 0
LR, BETAS, CLIP = 3e-4, (0.9, 0.95), 1.0
# The highest rate with which BERT was fine-tuned (Devlin et al. 2019, A.3): with LR its loss rises
# to 3, and the smallest rounding difference leads to different training, which would hide whether
# two programs compute the same.
_FINE_TUNING_LR = 5e-5
_CHARACTERS = 1200  # length of a text to classify: more than its tokens are truncated to


@dataclass(frozen=True)
class Case:
    """A model, as in transformers' config, with a sequence length and a batch."""

    name: str
    title: str
    model_type: str
    config: Mapping[str, Any]
    seq_len: int
    batch: int
    architecture: str = "AutoModelForCausalLM"
    settings: Mapping[str, Any] = field(default_factory=dict)  # in addition to COMMON
    lr: float = LR

    @property
    def labelled(self) -> bool:
        """Return whether the data are texts with one label each, rather than text."""
        return self.architecture == "AutoModelForSequenceClassification"

    @property
    def vocab(self) -> int:
        """Return the number of entries of the embedding."""
        size: int = self.config["vocab_size"]
        return size


GPT2_SMALL = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024,
              "vocab_size": 50257, **NO_DROPOUT}  # fmt: skip
CASES = {
    one.name: one
    for one in (
        Case("a", "GPT-2 shape 6 × 384, vocabulary 8,192", "gpt2",
             {"n_layer": 6, "n_embd": 384, "n_head": 6, "n_positions": 256, "vocab_size": 8192,
              **NO_DROPOUT}, 256, 8),
        Case("b", "GPT-2 124M", "gpt2", GPT2_SMALL, 512, 2),
        Case("c", "Llama shape of 60M, grouped queries", "llama",
             {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8,
              "num_key_value_heads": 2, "intermediate_size": 1408, "vocab_size": 32000,
              "max_position_embeddings": 1024, "tie_word_embeddings": False}, 1024, 2),
        Case("d", "BERT-base, two classes", "bert",
             {"vocab_size": 30522, "hidden_dropout_prob": 0.0,
              "attention_probs_dropout_prob": 0.0, "num_labels": 2}, 128, 16,
             "AutoModelForSequenceClassification",
             {"task": "classify", "padding": "fixed"}, _FINE_TUNING_LR),
    )
}  # fmt: skip
MEANING = "; ".join(
    f"{one.name}: {one.title}, sequence {one.seq_len}, batch {one.batch}" for one in CASES.values()
)
# Small enough for a test: the same programs, in seconds.
TINY = {
    "tiny": Case("tiny", "GPT-2 shape 2 × 64", "gpt2",
                 {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 512,
                  **NO_DROPOUT}, 64, 4),
}  # fmt: skip
COMMON: Mapping[str, Any] = {
    "schedule": "constant", "warmup": 0, "beta1": BETAS[0], "beta2": BETAS[1],
    "weight_decay": 0.0, "clip": CLIP, "eval_batches": 0, "sample_tokens": 0,
    "measure_only": True, "seed": SEED, "device": "cpu",
}  # fmt: skip


def write_config(path: Path, settings: Mapping[str, Any]) -> None:
    """Write settings as a file for `outpace train --config`."""
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))


def write(case: Case, folder: Path, steps: int, precision: str) -> None:
    """Write a case, once, completely; replace one that was written with other settings."""
    document = _document(case, folder, precision)
    if (folder / "case.json").is_file():
        if json.loads((folder / "case.json").read_text()) == document:
            return
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_model(case, folder / "model")
    texts = list(_texts())
    if case.labelled:
        _write_rows(case, texts, folder)
    else:
        _write_tokens(case, texts, folder)
    _write_batches(document["settings"], case, folder, steps)
    (folder / "case.json").write_text(json.dumps(document, indent=1))


def _document(case: Case, folder: Path, precision: str) -> dict[str, Any]:
    """Return what all programs read, as it is after a round trip through JSON."""
    data = folder / ("rows.jsonl" if case.labelled else "tokens.bin")
    settings = {**COMMON, "lr": case.lr, **case.settings, "model": str(folder / "model"),
                "data": [str(data)], "seq_len": case.seq_len, "global_batch": case.batch,
                "precision": precision}  # fmt: skip
    return {"settings": settings, "architecture": case.architecture, "model_type": case.model_type,
            "config": dict(case.config), "batch": case.batch, "precision": precision,
            "seq_len": case.seq_len, "lr": case.lr, "betas": [*BETAS], "clip": CLIP}  # fmt: skip


def _write_model(case: Case, folder: Path) -> None:
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    torch.manual_seed(SEED)
    getattr(transformers, case.architecture).from_config(config).save_pretrained(folder)


def _texts() -> Iterator[str]:
    """Yield Python's own source, file by file."""
    from outpace.data.sources import open_source

    for path in open_source("stdlib").files:
        yield path.read_text(encoding="utf-8", errors="replace")


def _write_tokens(case: Case, texts: list[str], folder: Path) -> None:
    """Write tokens in nanoGPT's format: raw uint16."""
    import numpy as np
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=case.vocab, show_progress=False)
    ids = [own for one in tokenizer.encode_batch(texts) for own in one.ids]
    np.asarray(ids, dtype=np.uint16).tofile(folder / "tokens.bin")


def _write_rows(case: Case, texts: list[str], folder: Path) -> None:
    """Write passages, longer than needed; the label is whether they contain a class."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    chance = random.Random(SEED)
    passages = [
        text[start : start + _CHARACTERS]
        for text in texts
        for start in range(0, len(text) - _CHARACTERS, _CHARACTERS)
    ]
    chance.shuffle(passages)
    with (folder / "rows.jsonl").open("w") as file:
        for passage in passages:
            row = {"sentence": passage, "label": int("class " in passage)}
            file.write(json.dumps(row) + "\n")
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(texts, vocab_size=case.vocab, show_progress=False)
    trained.save_model(str(folder / "model"))
    BertTokenizerFast(str(folder / "model" / "vocab.txt")).save_pretrained(folder / "model")


def _write_batches(settings: dict[str, Any], case: Case, folder: Path, steps: int) -> None:
    """Write what outpace draws for each step, in the order of its samples."""
    import numpy as np

    from outpace.jobs.train.context import RunContext
    from outpace.jobs.train.job import prepare_run
    from outpace.records.settings import TrainSettings

    given = {**settings, "steps": steps, "out": str(folder / "none")}
    asked = TrainSettings.parse(given, "benchmark")
    with prepare_run(asked, RunContext(foresee=False)) as ready:
        data = ready.job.inputs.train_data
        keys = data.locate(SEED, np.arange(steps * case.batch))
        batch = data.__getitems__(keys)
    (folder / "batches").mkdir()
    for name, values in batch.items():
        np.save(folder / "batches" / f"{name}.npy", values.numpy())
