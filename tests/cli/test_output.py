"""Where a file cannot be written is said before the work; what was found out is not lost."""

import os
from pathlib import Path

import pytest

from outpace.cli.main import main
from outpace.cli.output import write_output
from outpace.records.errors import BadInputError

COMMANDS = (
    ["plan", "--model=gpt2", "--machine=hgx-h100", "--out"],
    ["memory", "--model=gpt2", "--save"],
    ["memory", "--model=gpt2", "--plot"],
    ["verify", "single", "--nproc=1", "--out"],
    ["probe", "matmul", "--out"],
    ["report", "nothing", "--out"],
    ["topology", "--svg"],
    ["watch", "--out"],
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: f"{words[0]} {words[-1]}")
def test_a_place_that_cannot_be_written_is_refused_first(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place, why in (
        (tmp_path, "it is a folder"),
        ("", "an empty name"),
        (tmp_path / "no" / "p.json", "there is no folder"),
        (tmp_path / "file" / "p.json", "there is no folder"),
        (tmp_path / ("n" * 300), "name too long"),
        ("a\0b", "null"),
    ):
        assert main([*words, str(place)]) == 2
        said = capsys.readouterr().err
        assert why.lower() in said.lower() and words[-1] in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "--command=echo 1", "--command=echo 1 ", "--metric=(1)", "--rounds=1"],
        ["compare", "--runs", "one", "other"],
        ["tune", "--model=outpace-tiny", "--steps=5"],
        ["merge", "nothing"],
        ["train", "--model=outpace-tiny", "--steps=1"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_place_that_no_folder_can_have_is_refused_first(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name, said in (("file", "file "), ("link", f"is a link to {tmp_path / 'gone'}")):
        assert main([*words, f"--out={tmp_path / name}"]) == 2
        error = capsys.readouterr().err
        assert said in error and "another --out" in error and "File exists" not in error, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_what_cannot_be_written_any_more_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with pytest.raises(BadInputError, match="The output is saved in") as caught:
        write_output(tmp_path / "gone" / "machine.json", "what was measured")
    (kept,) = temporary.iterdir()
    assert str(kept) in str(caught.value) and kept.read_text() == "what was measured"


def test_a_named_pipe_gets_the_plan(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert main(["plan", "--model=gpt2", "--machine=hgx-h100", f"--out={pipe}"]) == 0
    assert b'"strategy"' in os.read(reader, 1 << 16)
    os.close(reader)
