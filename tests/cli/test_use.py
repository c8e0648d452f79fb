"""`outpace generate` and `outpace eval` on a finished run."""

import io
import json
import math
import shutil
from pathlib import Path

import pytest

from outpace.cli.main import main
from outpace.data.tokenizer_files import load_tokenizer


def generated(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["generate", *argv, "--max-new-tokens=12", "--device=cpu"]) == 0
    return capsys.readouterr().out


def test_generate_goes_on_from_the_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    text = generated(capsys, f"--run={run}", "import ", "--seed=3")
    assert text.startswith("import ")
    assert len(text) > len("import \n")
    assert text == generated(capsys, f"--run={run}", "import ", "--seed=3")
    assert text != generated(capsys, f"--run={run}", "import ", "--seed=4")
    greedy = [generated(capsys, f"--run={run}", "x", "--temperature=0", s) for s in
              ("--seed=1", "--seed=2")]  # fmt: skip
    assert greedy[0] == greedy[1]


def test_generate_reads_stdin_and_writes_json(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("class A"))
    document = json.loads(generated(capsys, f"--run={run}", "-", "--json", "--top-k=5"))
    assert document["prompt"] == "class A"
    assert document["text"].startswith("class A")


def test_generate_and_eval_say_where_the_tokenizers_class_reads_otherwise(
    run: Path, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers builds Qwen 2's tokenizer by its class, which cuts digits one by one."""
    model = shutil.copytree(run / "model", tmp_path / "model")
    (model / "checksums.json").unlink()
    path = model / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "tokenizer_class": "Qwen2Tokenizer"})
    )
    capsys.readouterr()
    words = ["--model", str(model), "--device=cpu"]
    assert main(["generate", *words, "--max-new-tokens=1", "In 1234"]) == 0
    said = capsys.readouterr().err
    assert "by its class Qwen2Tokenizer, which differs from the tokenizer.json" in said
    assert main(["eval", *words, "--batches=1", "--batch-size=1", "--data", str(corpus)]) == 0
    [hint] = [line for line in capsys.readouterr().err.splitlines() if "Qwen2Tokenizer" in line]
    assert hint in said


def test_eval_measures_what_the_run_held_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["eval", f"--run={run}", "--json", "--device=cpu"]) == 0
    evaluation = json.loads(capsys.readouterr().out)
    assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["loss"]))
    assert evaluation["tokens"] > 0 and evaluation["tokens_per_s"] > 0
    assert main(["eval", f"--run={run}", "--device=cpu"]) == 0
    assert f"{evaluation['loss']:.4f}" in capsys.readouterr().out


def test_eval_takes_other_data(
    run: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    other = tmp_path / "other.jsonl"
    text = (corpus / "ast.txt").read_text()
    other.write_text(json.dumps({"body": text}) + "\n")
    flags = [f"--run={run}", f"--data={other}", "--text-field=body", "--json", "--device=cpu"]
    assert main(["eval", *flags]) == 0
    all_of_it = json.loads(capsys.readouterr().out)
    assert main(["eval", *flags, "--batches=1", "--batch-size=2"]) == 0
    part = json.loads(capsys.readouterr().out)
    assert part["tokens"] == 2 * 32 < all_of_it["tokens"]
    ids = load_tokenizer(str(run / "model")).encode(text)  # and the end of text, a target, too
    assert all_of_it["seq_len"] == 32 and 0 < all_of_it["left_over_tokens"] < 32
    assert all_of_it["tokens"] + all_of_it["left_over_tokens"] == len(ids)
    assert "is not a run of outpace" not in capsys.readouterr().err

    # The folder of the run's model says no length: it is told, and --seq-len gives the run's.
    of_model = [f"--model={run / 'model'}", *flags[1:]]
    assert main(["eval", *of_model]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["seq_len"] > 32 and "give that run's length with --seq" in said.err
    assert main(["eval", *of_model, "--seq-len=32"]) == 0
    said = capsys.readouterr()
    alike = json.loads(said.out)
    assert alike["loss"] == pytest.approx(all_of_it["loss"], rel=1e-4)
    assert alike["seq_len"] == 32 and "is not a run" not in said.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generate", "--run=none", "x"], "--run none: there is no such directory"),
        (["eval", "--run=none"], "--run none: there is no such directory"),
        (["generate", "x"], "required: --run"),
        (["generate", "--run=."], "needs a TEXT to continue"),
        (["generate", "--run=.", "x", "--conversations=y"], "Use only one of them"),
        (["generate", "--model=none", "x"], "there is no such directory"),
        (["eval", "--run=.", "--task=talk"], "'talk' is not one of"),
        (["generate", "--run=.", "x", "--temperature=-1"], "-1 is not at least 0"),
        (["generate", "--run=.", "x", "--top-k=0"], "0 is not at least 1"),
        (["generate", "--run=.", "x", "--top-p=1"], "Did you mean '--top-k'"),
        (["eval", "--run=.", "--device=tpu"], "'tpu' is not one of"),
    ],
)
def test_mistakes_are_sentences(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.out == ""


def test_a_directory_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["generate", f"--run={tmp_path}", "x"], ["eval", f"--run={tmp_path}"]):
        assert main(command) == 2
        assert str(tmp_path) in capsys.readouterr().err
