"""A folder's model writes in outpace what it writes in transformers."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from outpace.data.tokenizer import Tokenizer
from outpace.jobs.inference import Sampling, Writer


def test_a_prompt_begins_as_the_tokenizer_begins_texts(tmp_path: Path) -> None:
    words = {"<s>": 0, "</s>": 1, "[UNK]": 2, **{chr(97 + n): 3 + n for n in range(19)}}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    Tokenizer(inner, "</s>", {"bos_token": "<s>"}).save(tmp_path)
    torch.manual_seed(3)
    theirs: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
            vocab_size=22, max_position_embeddings=32, bos_token_id=0, eos_token_id=1,
            initializer_range=0.5,
        )
    )  # fmt: skip
    theirs.eval()
    theirs.save_pretrained(tmp_path)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path)("a b c", return_tensors="pt")
    assert read["input_ids"][0, 0] == 0
    told = theirs.generate(**read, max_new_tokens=8, do_sample=False, pad_token_id=1)[0].tolist()
    writer = Writer(tmp_path, Sampling(8, 0.0, None, 0), "cpu")
    new = told[read["input_ids"].shape[1] :]
    # Ends at any of the tokens that the folder names, as transformers does, not at eos alone.
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(
        json.dumps({**settings, "eos_token_id": [1, new[2]]})
    )
    stopped = Writer(tmp_path, Sampling(8, 0.0, None, 0), "cpu").continue_text("a b c")
    assert stopped == inner.decode(told[: told.index(new[2], read["input_ids"].shape[1])])
    ids = told[: told.index(1)] if 1 in told else told
    assert writer.continue_text("a b c") == inner.decode(ids)
    hints: list[str] = []
    Writer(tmp_path, Sampling(1, 0.0, None, 0), "cpu", hints.append).continue_text("a b c")
    assert not any("positions" in hint for hint in hints)
    Writer(tmp_path, Sampling(1, 0.0, None, 0), "cpu", hints.append).continue_text("a b c " * 20)
    said = "the prompt has 61 tokens, and the model has 32 positions: only its last 16 tokens were "
    said += "read"
    assert hints[-1].startswith(said)
