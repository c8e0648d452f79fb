"""Whose warnings reach a user of a command."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import outpace

_SCRIPT = """
import sys
import warnings
from outpace.cli.library_warnings import hide_library_warnings

hide_library_warnings()
for name, path in zip(sys.argv[1::2], sys.argv[2::2]):
    warnings.warn_explicit(f"said by {name}", UserWarning, path, 1)
"""


def shown(folder: Path, *options: str) -> str:
    """Standard error of a process in which torch, outpace and a user's file warn."""
    paths = sysconfig.get_paths()
    own = Path(outpace.__file__).parent / "optim" / "build.py"
    given = {
        "torch": Path(paths["purelib"]) / "torch" / "nn.py",
        "python": Path(paths["stdlib"]) / "asyncio" / "x.py",
        "outpace": own,
        "the user": folder / "model.py",
    }
    words = [str(word) for pair in given.items() for word in pair]
    ended = subprocess.run(
        [sys.executable, *options, "-c", _SCRIPT, *words],
        env={**os.environ, "PYTHONWARNINGS": ""}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return ended.stderr


def test_those_of_libraries_do_not(tmp_path: Path) -> None:
    text = shown(tmp_path)
    assert "torch" not in text and "python" not in text
    assert "outpace: said by outpace\n" in text
    assert "model.py:1: UserWarning: said by the user" in text


@pytest.mark.parametrize("options", [("-W", "default")])
def test_who_asks_for_them_sees_all(tmp_path: Path, options: tuple[str, ...]) -> None:
    text = shown(tmp_path, *options)
    assert all(f"said by {name}" in text for name in ("torch", "python", "outpace", "the user"))


_LAYERS = {
    "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 500, "max_position_embeddings": 128,
}  # fmt: skip


def test_those_of_what_transformers_imports_to_build_a_model_do_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_LAYERS))
    words = ["plan", "--model", str(tmp_path), "--machine", "h100-sxm", "--seq-len", "64"]
    ended = subprocess.run(
        [sys.executable, "-m", "outpace", *words, "--count", "1"],
        env={**os.environ, "PYTHONWARNINGS": ""}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "one forward pass was traced" in " ".join(ended.stdout.split())
    assert ended.stderr == ""
