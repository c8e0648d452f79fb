"""Where the cache lies, also for users without a home."""

import pwd
from pathlib import Path

import pytest

from outpace.cli import main as command
from outpace.interop.user_file import load_function, require_named
from outpace.records.cache_folders import cache_folder, user_cache
from outpace.records.errors import BadInputError


@pytest.fixture
def homeless(monkeypatch):
    """As in a container whose user has no entry: no HOME, and nobody knows the user."""

    def unknown(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_it_is_asked_for_or_lies_in_the_users_cache(tmp_path):
    assert cache_folder(tmp_path / "a" / "b", {}) == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
    assert user_cache({}) == Path.home() / ".cache" / "outpace"
    assert user_cache({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "outpace"
    assert user_cache({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "outpace"


def test_without_a_home_the_ways_out_are_named(homeless, tmp_path):
    with pytest.raises(BadInputError, match=r"HOME is not set.* --cache-dir or XDG_CACHE_HOME"):
        cache_folder(None, {})
    assert cache_folder(None, {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "outpace"
    (tmp_path / "own.py").write_text("def build(): return 3\n")
    reference = f"{tmp_path / 'own.py'}:build"
    assert load_function(reference)() == 3
    with pytest.raises(BadInputError, match="would run code"):
        require_named(reference, tmp_path)


def test_one_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        BadInputError, match=r"cannot use the cache folder .*: Not a directory.* --cache-dir"
    ):
        cache_folder(tmp_path / "file" / "cache", {})
    with pytest.raises(
        BadInputError, match=r"cannot use the cache folder .*: File exists.* --cache-dir"
    ):
        cache_folder(tmp_path / "file", {})


def test_a_command_without_a_home_ends_with_a_sentence(homeless, capsys):
    assert command.main(["train", "--model", "outpace-tiny", "--steps", "1"]) == 2
    assert "XDG_CACHE_HOME" in capsys.readouterr().err
    assert command.main(["plan", "--model", "gpt2", "--machine", "~/machine.json"]) == 2
    assert "a path begins with ~" in capsys.readouterr().err
