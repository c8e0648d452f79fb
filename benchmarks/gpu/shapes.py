"""Models to train with their batches of random tokens, for outpace and transformers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.check import Check

_GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_LLAMA_1B = {
    "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip
_SMALL_GPT2 = {**_GPT2, "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 64,
               "vocab_size": 512}  # fmt: skip
_SMALL_LLAMA = {**_LLAMA_1B, "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
                "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64,
                "vocab_size": 512, "max_position_embeddings": 64}  # fmt: skip
_SMALL_SPECS = {
    "gpt2": {"family": "gpt2", "layers": 1, "hidden": 32, "heads": 2, "vocab": 512,
             "max_positions": 64},
    "llama-3.2-1b": {"family": "llama", "layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1,
                     "vocab": 512, "max_positions": 64},
}  # fmt: skip
# For checks of whether something runs, not how fast: it takes a GPU no time.
_LITTLE = {"family": "llama", "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "vocab": 1024,
          "max_positions": 512}  # fmt: skip
_SMALL_LITTLE = {**_LITTLE, "layers": 1, "hidden": 64}
_TOKENS, _SMALL_TOKENS = 2_000_000, 30_000
_SOURCE = Path(__file__).resolve().parents[2] / "outpace"
_DOCUMENT, _SMALL_TEXT = 1000, 200_000  # characters: of a document (about 300 tokens), of all


@dataclass(frozen=True)
class Shape:
    """A model as outpace and as transformers define it, and a batch of sequences."""

    model: str
    config: dict[str, Any]
    seq_len: int
    batch: int
    vocab: int

    @property
    def tokens(self) -> int:
        """Return the tokens per step."""
        return self.seq_len * self.batch


_SHAPES = {
    "gpt2": Shape("gpt2", _GPT2, 1024, 16, 50257),
    "gpt2 batch 4": Shape("gpt2", _GPT2, 1024, 4, 50257),
    "gpt2 batch 48": Shape("gpt2", _GPT2, 1024, 48, 50257),
    "llama-3.2-1b": Shape("llama-3.2-1b", _LLAMA_1B, 2048, 4, 128256),
    "llama-3.2-1b batch 8": Shape("llama-3.2-1b", _LLAMA_1B, 2048, 8, 128256),
}


def shape_of(check: Check, name: str) -> Shape:
    """Return a shape by name; if `check.small`, one of the same family that takes no time."""
    shape = _SHAPES[name]
    if not check.small:
        return shape
    config = _SMALL_GPT2 if shape.model == "gpt2" else _SMALL_LLAMA
    return Shape(spec_file(check, _SMALL_SPECS[shape.model]), config, 32, 2, 512)


def little(check: Check, **changes: Any) -> str:
    """Write a file with a changed model that takes the device no time; return its path."""
    return spec_file(check, {**(_SMALL_LITTLE if check.small else _LITTLE), **changes})


def spec_file(check: Check, spec: dict[str, Any]) -> str:
    """Write a model as outpace's TOML, once; return its path."""
    name = "-".join(str(value) for value in spec.values())
    path = check.folder / f"{name}.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in spec.items()))
    return str(path)


def tokens_file(check: Check, vocab: int) -> str:
    """Write random tokens in nanoGPT's format, once; return the path."""
    import numpy as np

    path: Path = check.folder / f"tokens-{vocab}.bin"
    if not path.exists():
        count = _SMALL_TOKENS if check.small else _TOKENS
        tokens = np.random.default_rng(0).integers(0, min(vocab, 2**16), count)
        tokens.astype(np.uint16).tofile(path)
    return str(path)


def documents_file(check: Check) -> str:
    """Write short documents of real text, one per line, from this project's source."""
    path: Path = check.folder / "documents.jsonl"
    if not path.exists():
        text = "".join(file.read_text(encoding="utf-8") for file in sorted(_SOURCE.rglob("*.py")))
        text = text[: _SMALL_TEXT if check.small else None]
        pieces = (text[start : start + _DOCUMENT] for start in range(0, len(text), _DOCUMENT))
        path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return str(path)
