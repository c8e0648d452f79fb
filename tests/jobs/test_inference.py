"""A folder's model writes in outpace what it writes in transformers."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

import outpace
from outpace.cli.main import main
from outpace.data.tokenizer import Tokenizer
from outpace.jobs import inference
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
    writer = Writer(tmp_path, Sampling(8, 0.0, None, 0), "cpu", print)
    new = told[read["input_ids"].shape[1] :]
    # Ends at any of the tokens that the folder names, as transformers does, not at eos alone.
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(
        json.dumps({**settings, "eos_token_id": [1, new[2]]})
    )
    stopped = Writer(tmp_path, Sampling(8, 0.0, None, 0), "cpu", print).continue_text("a b c")
    assert stopped == inner.decode(told[: told.index(new[2], read["input_ids"].shape[1])])
    ids = told[: told.index(1)] if 1 in told else told
    assert writer.continue_text("a b c") == inner.decode(ids)
    assert writer.continue_text("<s>a b c") == inner.decode(ids), "it is not put there twice"
    hints: list[str] = []
    Writer(tmp_path, Sampling(1, 0.0, None, 0), "cpu", hints.append).continue_text("a b c")
    assert not any("positions" in hint for hint in hints)
    Writer(tmp_path, Sampling(1, 0.0, None, 0), "cpu", hints.append).continue_text("a b c " * 20)
    said = "the prompt has 61 tokens, and the model has 32 positions: only the last 16 tokens were "
    said += "read"
    assert hints[-1].startswith(said)


def test_generation_settings_that_are_not_applied_are_told(tmp_path: Path, capsys: Any) -> None:
    _chat_model(tmp_path, WITHOUT_TOOLS)
    file = tmp_path / "generation_config.json"
    capsys.readouterr()
    applied = {**json.loads(file.read_text()), "temperature": 0.7, "top_k": 20, "top_p": 1.0}
    file.write_text(json.dumps({**applied, "suppress_tokens": [], "num_beams": 1}))
    outpace.generate(tmp_path, "a", max_new_tokens=1, device="cpu")
    assert capsys.readouterr().err == ""
    file.write_text(json.dumps({**applied, "repetition_penalty": 1.05, "bad_words_ids": [[8]]}))
    outpace.generate(tmp_path, "a", max_new_tokens=1, device="cpu")
    assert capsys.readouterr().err == (
        f"hint: `outpace generate` does not apply repetition_penalty 1.05, bad_words_ids [[8]] of "
        f"{file}; transformers does, so it generates different texts by default\n"
    )


def test_the_python_api_prints_the_hints_of_the_commands(tmp_path: Path, capsys: Any) -> None:
    _chat_model(tmp_path, WITHOUT_TOOLS)
    capsys.readouterr()
    for long, said in (("a b " * 20, "the prompt has 40 tokens, and the model has 32"), ("a", "")):
        outpace.generate(tmp_path, long, max_new_tokens=1, device="cpu")
        told = capsys.readouterr().err
        assert told.startswith(f"hint: {said}") if said else told == ""


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
WITH_TOOLS = (
    "{% if tools %}{{ tools[0].function.name }} {% endif %}{% for m in messages %}"
    "{{ m.role + ' ' + m.content + ' ' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
WITHOUT_TOOLS = "{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}"


def _chat_model(folder: Path, template: str) -> None:
    """Write a tiny model whose tokenizer has a token for each word of the conversations."""
    words = ["</s>", "[UNK]", "user", "system", "assistant", "tool", "critic", "look", "a", "b"]
    inner = tokenizers.Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["</s>"])
    Tokenizer(inner, "</s>", {"chat_template": template}).save(folder)
    model: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
            vocab_size=10, max_position_embeddings=32, bos_token_id=None, eos_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(folder)


def _prompts_of(folder: Path, row: dict[str, Any], monkeypatch: Any) -> tuple[list[str], list[str]]:
    """Return the prompts from which a row of a file is answered, and the hints."""
    file, hints, prompts = folder / "asked.jsonl", list[str](), list[str]()
    file.write_text(json.dumps(row) + "\n")
    writer = Writer(folder, Sampling(1, 0.0, None, 0), "cpu", hints.append)
    generated = inference.generation.generate

    def record(model: Any, given: list[int], **rules: Any) -> list[int]:
        prompts.append(writer._tokenizer.inner.decode(given, skip_special_tokens=False))
        return generated(model, given, **rules)

    monkeypatch.setattr(inference.generation, "generate", record)
    for talk in writer.questions(file):
        writer.answer(talk.messages, talk.tools)
    monkeypatch.undo()
    return prompts, hints


def test_a_prompt_has_all_that_an_answer_depends_on(tmp_path: Path, monkeypatch: Any) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    _chat_model(tmp_path, WITH_TOOLS)
    row = {"messages": talk, "tools": TOOLS}
    assert _prompts_of(tmp_path, row, monkeypatch) == (["look user a assistant"], [])
    old = {"messages": talk, "functions": [TOOLS[0]["function"]]}
    assert _prompts_of(tmp_path, old, monkeypatch) == (["look user a assistant"], [])
    assert _prompts_of(tmp_path, {"messages": talk}, monkeypatch) == (["user a assistant"], [])


def test_what_the_template_leaves_out_of_a_prompt_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    _chat_model(tmp_path, WITHOUT_TOOLS)
    call = {"function": {"name": "look", "arguments": {}}}
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b"},
    ]
    prompts, hints = _prompts_of(tmp_path, {"messages": talk, "tools": TOOLS}, monkeypatch)
    assert prompts == ["user a assistant tool b"]
    said = "the tokenizer's chat template leaves out "
    assert [hint.removeprefix(said).partition(",")[0] for hint in hints] == [
        "tools", "calls of tools",
    ]  # fmt: skip


def test_speakers_that_the_template_names_are_answered(tmp_path: Path, monkeypatch: Any) -> None:
    _chat_model(tmp_path, "{% if messages[-1].role == 'critic' %}a {% endif %}" + WITHOUT_TOOLS)
    talk = [{"role": "user", "content": "a"}, {"role": "critic", "content": "b"}]
    assert _prompts_of(tmp_path, {"messages": talk}, monkeypatch)[0] == ["a user a critic b"]


def test_a_second_system_message_is_refused(tmp_path: Path, capsys: Any) -> None:
    _chat_model(tmp_path, WITHOUT_TOOLS)
    talk = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    asked = ["generate", f"--run={tmp_path}", f"--conversations={tmp_path / 'asked.jsonl'}"]
    assert main([*asked, "--max-new-tokens=1"]) == 0
    capsys.readouterr()
    assert main([*asked, "--system=b"]) == 2
    assert "already has a system message, 'a'. Leave one of the two out" in capsys.readouterr().err
