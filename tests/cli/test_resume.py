import json
from pathlib import Path

import pytest

from outpace.cli.main import main
from outpace.records.run import RunRecord
from outpace.records.settings import TrainSettings


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory as far as its settings go."""
    settings = TrainSettings(model="gpt2", data=("corpus/",), steps=500, lr=3e-4, global_batch=8)
    directory = tmp_path / "run"
    directory.mkdir()
    document = {"settings": settings.model_dump(mode="json"), "seq_len": 256}
    (directory / "run.json").write_text(json.dumps(document))
    return directory


def config(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, object]]:
    assert main(["train", "--print-config", "--json", "--resume", *argv]) == 0
    document: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)
    return document


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["train", "--print-config", "--resume", *argv]) == 2
    return capsys.readouterr().err


def test_settings_come_from_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = config(capsys, "--out", str(run))
    assert shown["model"] == {"value": "gpt2", "origin": "run.json"}
    assert shown["lr"] == {"value": 3e-4, "origin": "run.json"}
    assert shown["seq_len"] == {"value": 256, "origin": "run.json"}
    assert shown["out"] == {"value": str(run), "origin": "command line"}
    assert shown["resume"] == {"value": True, "origin": "command line"}


def test_command_line_then_file_then_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "more.toml"
    file.write_text("tokens = '1M'\nlr = 1e-5\nclip = 0.5\n")
    shown = config(capsys, "--out", str(run), "--config", str(file), "--lr", "2e-5")
    assert shown["lr"] == {"value": 2e-5, "origin": "command line"}
    assert shown["clip"] == {"value": 0.5, "origin": str(file)}
    assert shown["tokens"] == {"value": 1_000_000, "origin": str(file)}
    assert shown["steps"]["value"] is None


def test_giving_the_run_s_own_values_is_fine(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = config(capsys, "--out", str(run), "--data", "corpus", "--seq-len", "256")
    assert shown["data"]["value"] == ["corpus"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "gpt2-xl"], "--model gpt2-xl: the run in {run} was started with --model gpt2"),
        (["--data", "other/"], "was started with --data corpus/"),
        (["--global-batch", "16"], "was started with --global-batch 8"),
        (["--seed", "1"], "was started with --seed 0"),
        (["--seq-len", "128"], "was started with --seq-len 256"),
        (["--dropout", "0.1"], "was started with --dropout left to outpace"),
        (["--lora-rank", "8"], "was started with --lora-rank left to outpace"),
        (["--base", "nf4"], "was started with --base fp32"),
    ],
)
def test_what_makes_the_run_what_it_is_may_not_change(
    argv: list[str], said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said.format(run=run) in refusal(capsys, "--out", str(run), *argv)


def test_a_run_has_to_be_named_and_be_there(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--out DIR" in refusal(capsys)
    assert "there is no directory" in refusal(capsys, "--out", str(tmp_path / "none"))
    assert "holds no run" in refusal(capsys, "--out", str(tmp_path))
    (run / "run.json").write_text("{")
    assert "is damaged" in refusal(capsys, "--out", str(run))
    (run / "run.json").write_text('{"settings": {"modell": "gpt2"}}')
    assert "unknown key 'modell'. Did you mean 'model'" in refusal(capsys, "--out", str(run))


def test_what_repeats_a_run_that_went_on_is_what_began_it(
    train_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "run", tmp_path / "asked.toml"
    file.write_text("lr = 2e-3\n")
    start = ["train", *train_flags, f"--config={file}", f"--out={out}"]
    assert main(start) == 0
    first = RunRecord.load(out / "run.json")
    for steps in ("7", "8"):
        assert main(["train", "--resume", f"--out={out}", f"--steps={steps}", "--clip=0.5"]) == 0
    gone_on = RunRecord.load(out / "run.json")
    assert gone_on.command == first.command == ("outpace", *start)
    assert [one["command"][-2] for one in gone_on.resumes] == ["--steps=7", "--steps=8"]
    given_now = {"resume": "command line", "clip": "command line"}
    assert gone_on.origins == first.origins | given_now
    assert gone_on.origins["lr"] == str(file) and gone_on.origins["nproc"] == "default"
    capsys.readouterr()
    assert main(["runs", "show", str(out), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["again"]
    assert "--steps 8" in again and "--clip 0.5" in again
    flags = {word.split("=")[0] for word in train_flags} | {"--lr", "--clip"}
    assert {word for word in again.split() if word.startswith("--")} <= flags
