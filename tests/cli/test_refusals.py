"""What cannot be read is refused by its option, its line and its kind, with what to do next."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from outpace.cli.main import main
from outpace.records.base import format_path
from outpace.records.plan import Plan, PlanFile

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["plan", "--model=gpt2", "--machine"], "--machine"),
        (["train", "--plan"], "--plan"),
        (["estimate", "--model=gpt2", "--machine=hgx-h100", "--plan"], "--plan"),
        (["train", "--config"], "--config"),
    ],
)
def test_a_file_that_is_not_there_is_named_with_its_option(
    words: list[str], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.json"
    assert f"cannot read {option} {path}" in refused(capsys, *words, path)


def test_adapters_of_a_plan_are_refused_as_the_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--lora-rank` was never typed."""
    file = PlanFile.from_plan(Plan(lora_rank=16, lora_alpha=16.0), 64, 8)
    (path := tmp_path / "lora.json").write_text(file.model_dump_json())
    words = ["train", "--model=outpace-tiny", f"--out={tmp_path / 'run'}", "--steps=1"]
    said = " ".join(refused(capsys, *words, f"--plan={path}").split())
    assert f"lora_rank 16 of plan {path} trains adapters over pretrained weights" in said
    assert "--lora-rank" not in said and "a plan without adapters" in said
    typed = " ".join(refused(capsys, *words, "--lora-rank=16").split())
    assert "--lora-rank 16 trains adapters" in typed and "a plan without" not in typed


@pytest.mark.parametrize("text", ["steps = 3\nlr = 1e-3\nsteps = 4\n", "[a]\nb = 1\n[a]\nc = 2\n"])
def test_toml_that_says_a_thing_twice_is_shown_where(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "config.toml").write_text(text)
    assert f"Line 3 is {text.splitlines()[2]!r}" in refused(capsys, "train", "--config", path)


def test_names_stay_on_their_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        format_path(Path("a b/c.json")) == "a b/c.json" and format_path(Path("a\nb")) == "'a\\nb'"
    )
    for words in (["report", "a\nb.json"], ["plan", "--model=gpt2", "--machine=a\nb"],
                  ["train", "--model=a\nb"], ["train", "--config=a\nb"]):  # fmt: skip
        assert len(refused(capsys, *words).strip().splitlines()) == 1, words


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "data"])
def test_a_pointer_of_git_lfs_is_said_to_be_one(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], corpus: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in (run / "model").iterdir():
        if path.name != "checksums.json":
            (model / path.name).write_bytes(path.read_bytes())
    data = corpus
    if name == "data":
        (data := tmp_path / "data.jsonl").write_text(POINTER)
    else:
        (model / name).write_text(POINTER)
    said = refused(capsys, "train", f"--model={model}", f"--data={data}",
                   f"--out={tmp_path / 'out'}", "--seq-len=32", "--steps=1", "--device=cpu",
                   f"--cache-dir={tmp_path / 'cache'}")  # fmt: skip
    assert "a Git LFS pointer" in said and "git lfs pull" in said


def test_sentencepiece_alone_is_refused_with_what_writes_the_other_form(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    said = refused(capsys, "train", f"--data={corpus}", f"--tokenizer={tmp_path}",
                   f"--out={tmp_path / 'out'}")  # fmt: skip
    assert "tokenizer.model is a SentencePiece model" in said and "save_pretrained" in said


class Code:
    """Pickled as a call of a function."""

    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("hacked",))


def test_weights_that_are_code_are_named_and_not_run(
    run: Path, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((run / "model" / "config.json").read_bytes())
    torch.save({"a": torch.ones(2), "b": Code()}, tmp_path / "pytorch_model.bin", pickle)
    said = refused(capsys, "train", f"--model={tmp_path}", f"--tokenizer={run / 'model'}",
                   f"--data={corpus}", f"--out={tmp_path / 'out'}", "--device=cpu")  # fmt: skip
    assert (
        "refers to code, print, which would run when the file is loaded" in said
        and "Nothing was run" in said
    )
    assert "weights_only" not in said


def test_a_bad_line_of_metrics_is_named_by_its_number(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("run.json", "result.json", "metrics.jsonl"):
        (copy / name).write_bytes((run / name).read_bytes())
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    for bad in (json.dumps({"stfp": 3}) + "\n", "{\n", "null\n"):
        (copy / "metrics.jsonl").write_text("".join([*lines[:2], bad, *lines[3:]]))
        said = refused(capsys, "report", copy, "--format=md")
        assert "line 3 is not a step of a run" in said and "--resume" in said


def test_a_damaged_tokenizer_of_the_cache_is_learnt_anew(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--model=outpace-tiny", "--seq-len=32", "--global-batch=4", "--steps=1",
             f"--data={corpus}", f"--cache-dir={tmp_path}", "--measure-only", "--device=cpu",
             "--eval-batches=0", "--sample-tokens=0"]  # fmt: skip
    assert main([*words, f"--out={tmp_path / 'a'}"]) == 0
    (file,) = (tmp_path / "tokenizers").glob("*/tokenizer.json")
    whole = file.read_bytes()
    for number, harm in enumerate((whole[: len(whole) // 2], whole.replace(b"e", b"f", 1), None)):
        if harm is None:
            file.unlink()
        else:
            file.write_bytes(harm)
        assert main([*words, f"--out={tmp_path / str(number)}"]) == 0
        assert file.read_bytes() == whole
