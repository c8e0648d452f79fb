"""A small corpus of real text, prepared once for all runs of these tests."""

import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with a few files of the standard library, about 200 kB."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "base64", "bisect", "calendar", "cmd", "code", "copy", "csv", "dis",
             "glob", "heapq", "inspect", "shlex", "textwrap", "token", "uuid", "wave")  # fmt: skip
    for name in names:
        text = (library / f"{name}.py").read_text(encoding="utf-8")[:12_000]
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")
