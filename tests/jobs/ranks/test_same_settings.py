"""Ranks that a user started with different settings."""

import json
import shutil
import socket
from pathlib import Path

import pytest

from outpace.data.tokenizer_training import train_tokenizer
from outpace.interop.huggingface import write_model
from outpace.interop.peft import write_adapter
from outpace.nn.lora import add_adapters
from outpace.nn.transformer import Transformer
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan

OTHER = f"rank 1 (on {socket.gethostname()}) has a different {{}} from rank 0 (on "
FORKED = Path(__file__).parents[2] / "parallel" / "forked.py"
FLAGS = ("--model=outpace-tiny", "--seq-len=32", "--global-batch=4", "--steps=2", "--lr=1e-3",
         "--sample-tokens=0", "--precision=fp32", "--device=cpu", "--threads=1")  # fmt: skip
UNLIKE = """
import os, sys
from outpace.cli.main import command

unlike = sys.argv[1:3] if os.environ["RANK"] == "1" else []
command(["train", *sys.argv[3:], *unlike])
"""
EACH_ON_A_HOST = "os.environ |= {'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'}\n"
CODE = """
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(512, 16), nn.Tanh(), nn.Linear(16, 512))
"""


@pytest.mark.parametrize(
    "setting",
    [
        ("--lr", "9e-3"),
        ("--seed", "5"),
        ("--save-every", "1"),
        ("--micro-batch", "auto"),
        ("--compile", "--no-pin-memory"),
    ],
    ids=lambda setting: setting[0],
)
def test_ranks_with_other_settings_are_refused(setting, command, corpus, token_cache, tmp_path):
    """They would train, each with a rate or an order of its own, or wait for each other."""
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE)
    places = (f"--data={corpus}", f"--cache-dir={token_cache}", f"--out={tmp_path / 'run'}")
    done = command(FORKED, 2, script, *setting, *FLAGS, *places)
    assert done.returncode != 0
    assert OTHER.format(setting[0]) in done.stdout + done.stderr
    assert "Start all ranks with the same options." in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_code_or_weights_are_refused(command, corpus, token_cache, tmp_path):
    """Folders of one name on two hosts, one of them out of date."""
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE.replace("unlike =", EACH_ON_A_HOST + "unlike =", 1))
    for name, text in (("one", CODE), ("two", CODE.replace("Tanh", "Sigmoid"))):
        (tmp_path / f"{name}.py").write_text(text)
        spec = ModelSpec(family="llama", layers=1, hidden=16, heads=2, vocab=512, max_positions=64)
        weights = Transformer(spec, seed=len(text)).state_dict()
        write_model(tmp_path / name, spec, weights, None)
    train_tokenizer((corpus / "wave.txt").read_text().splitlines(), 512).save(tmp_path / "words")
    places = (f"--data={corpus}", f"--cache-dir={token_cache}", f"--tokenizer={tmp_path / 'words'}")
    for first, second, what in (
        (tmp_path / "one.py:build", tmp_path / "two.py:build", "model code"),
        (tmp_path / "one", tmp_path / "two", "content of the weights"),
    ):
        other = ("--model", second)
        out = f"--out={tmp_path / 'run'}"
        done = command(FORKED, 2, script, *other, *FLAGS, *places, f"--model={first}", out)
        assert done.returncode != 0
        assert OTHER.format(what) in done.stdout + done.stderr
        assert str(second).removesuffix(":build") in done.stdout + done.stderr


def test_ranks_with_other_chat_templates_are_refused(command, token_cache, tmp_path):
    """The tokens differ by it, and so do the data; but it is the template that has to be copied."""
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE)
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b a"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
    template = (
        "{% for m in messages %}{{ m.role }}SIGN{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistantSIGN{% endif %}"
    )
    learnt = train_tokenizer(["a b c"] * 9, 300)
    for name, sign in (("one", ": "), ("two", "> ")):
        words = {"chat_template": template.replace("SIGN", sign)}
        learnt.replace(learnt.inner, words).save(tmp_path / name)
    given = ("--task=chat", f"--data={tmp_path / 'chats.jsonl'}", f"--cache-dir={token_cache}",
             f"--out={tmp_path / 'run'}", f"--tokenizer={tmp_path / 'one'}")  # fmt: skip
    other = ("--tokenizer", tmp_path / "two")
    done = command(FORKED, 2, script, *other, *FLAGS, *given)
    assert OTHER.format("chat template") in done.stdout + done.stderr


def test_settings_of_one_rank_may_differ(command, corpus, token_cache, tmp_path):
    """Hosts have places and cores of their own, and one rank alone may be profiled."""
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE.replace("sys.argv[1:3]", "sys.argv[1:6]").replace("[3:]", "[6:]"))
    own = (f"--cache-dir={tmp_path / 'own'}", f"--out={tmp_path / 'other'}", "--threads=2",
           "--profile", "--expect-step-time-s=9")  # fmt: skip
    places = (f"--data={corpus}", f"--cache-dir={token_cache}", f"--out={tmp_path / 'run'}")
    done = command(FORKED, 2, script, *own, *FLAGS, *places)
    assert "has another" not in done.stdout + done.stderr
    assert (tmp_path / "run" / "model").is_dir()


def test_ranks_with_another_scale_of_an_adapter_are_refused(command, corpus, token_cache, tmp_path):
    """Its matrices are the same file, and the base has another name on each host."""
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE.replace("unlike =", EACH_ON_A_HOST + "unlike =", 1))
    spec = ModelSpec(family="llama", layers=1, hidden=16, heads=2, vocab=512, max_positions=64)
    module = Transformer(spec, seed=3)
    write_model(tmp_path / "base", spec, module.state_dict(), None)
    train_tokenizer((corpus / "wave.txt").read_text().splitlines(), 512).save(tmp_path / "words")
    plan = Plan(lora_rank=2, lora_alpha=4.0, lora_targets=("q",))
    for name in ("one", "two", "like"):
        adapted = add_adapters(Transformer(spec, seed=3), plan, 5)
        write_adapter(tmp_path / name, adapted, plan, tmp_path / "base", None)
        (tmp_path / name / "checksums.json").unlink()  # as peft's own have none
    path = tmp_path / "two" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 8}))
    shutil.copytree(tmp_path / "base", tmp_path / "elsewhere")
    path = tmp_path / "like" / "adapter_config.json"
    other = {"base_model_name_or_path": str(tmp_path / "elsewhere")}
    path.write_text(json.dumps({**json.loads(path.read_text()), **other}))
    places = (f"--data={corpus}", f"--cache-dir={token_cache}", f"--tokenizer={tmp_path / 'words'}")
    for second, refused in (("two", True), ("like", False)):
        words = ("--model", tmp_path / second, *FLAGS, *places, f"--model={tmp_path / 'one'}")
        done = command(FORKED, 2, script, *words, f"--out={tmp_path / f'{second}-run'}")
        said = "has a different adapter_config.json (without the base's name) from rank 0"
        assert (said in done.stdout + done.stderr) == refused
        assert ('"lora_alpha": 8' in done.stdout + done.stderr) == refused
        assert (tmp_path / f"{second}-run" / "model").is_dir() != refused, done.stderr
