import json
import shutil
from pathlib import Path

import pytest

import outpace
from outpace.cli.main import main
from outpace.records.errors import BadInputError
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


def test_resume_takes_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--resume", str(run)], [f"--resume={run}"], ["--lr=0.1", "--resume", str(run)]):
        assert main(["train", "--print-config", "--json", *words]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["model"] == {"value": "gpt2", "origin": "run.json"}
        assert shown["out"]["value"] == str(run) and shown["resume"]["value"] is True
    same = ["--resume", str(run), "--out", str(run)]
    assert main(["train", "--print-config", "--json", *same]) == 0
    capsys.readouterr()
    assert main(["train", "--print-config", "--resume", str(run), "--out=other"]) == 2
    assert "and --out other are different runs" in capsys.readouterr().err
    assert main(["train", "--print-config", "--resume"]) == 2
    assert "--resume DIR" in capsys.readouterr().err


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
        (["--dropout", "0.1"], "was started with --dropout chosen by outpace"),
        (["--lora-rank", "8"], "was started with --lora-rank chosen by outpace"),
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
    assert "Give its directory: --resume DIR" in refusal(capsys)
    assert "there is no directory" in refusal(capsys, "--out", str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    holds_none = refusal(capsys, "--out", str(tmp_path / "empty"))
    assert "holds no run" in holds_none and "leave --resume out to start one there" in holds_none
    holds_none = refusal(capsys, "--out", str(tmp_path))  # where no run could be started
    assert f"restore {tmp_path / 'run.json'}, or start a run with another --out" in holds_none
    (run / "checkpoints" / "step-8").mkdir(parents=True)
    within = refusal(capsys, "--out", str(run / "checkpoints"))
    assert f"It is inside a run: give --resume {run}" in within and "--out" not in within
    removed = refusal(capsys, "--out", str(run / "checkpoints" / "step-1"))
    assert "Older checkpoints are removed" in removed and "of this run, step-8 is left" in removed
    (run / "run.json").write_text("{")
    assert "is damaged" in refusal(capsys, "--out", str(run))
    (run / "run.json").write_text('{"settings": {"modell": "gpt2"}}')
    assert "unknown key 'modell'. Did you mean 'model'" in refusal(capsys, "--out", str(run))


def test_what_the_run_read_is_looked_for_where_it_was(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    resume = ["train", "--resume", str(run)]
    assert main(resume) == 2
    error = capsys.readouterr().err
    assert f"the run read --data corpus/, which does not exist in {tmp_path}. Change to" in error
    assert "add --data with the new path" in error
    with pytest.raises(BadInputError, match="the run read --data corpus/"):
        outpace.train(resume=True, out=run)
    (tmp_path / "new").mkdir()
    assert main([*resume, "--data=new"]) == 2  # is looked at, and holds nothing
    assert "the run read" not in capsys.readouterr().err


def test_half_a_run_file_is_told_with_what_is_left(run, capsys):
    step, model = run / "checkpoints" / "step-12", run / "model"
    for path in (step / "complete.json", model / "config.json"):
        path.parent.mkdir(parents=True)
        path.write_text("{}", encoding="utf-8")
    text = (run / "run.json").read_text(encoding="utf-8")
    (run / "run.json").write_text(text[: len(text) // 2], encoding="utf-8")
    error = refusal(capsys, "--out", str(run))
    assert f"Restore {run / 'run.json'} from a copy" in error
    assert f"--model {model}." in error
    assert f"dcp_to_torch {step} weights.pt" in error and "step 12 are intact" in error


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


@pytest.fixture
def begun(tmp_path: Path) -> tuple[list[str], Path]:
    """A run of 2 of 4 steps with a model, data and tokenizer in files of their own."""
    rows = [{"text": f"orchard window {n} " * 9} for n in range(30)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = "family = 'llama'\nlayers = 1\nhidden = 16\nheads = 4\nkv_heads = 2\nvocab = 300\n"
    (tmp_path / "m.toml").write_text(spec + "max_positions = 64\n")
    out = tmp_path / "run"
    assert main(["train", *first_flags(tmp_path), f"--out={out}", "--steps=4"]) == 0
    return ["train", "--resume", f"--out={out}"], tmp_path


def first_flags(folder: Path) -> list[str]:
    return [
        f"--model={folder / 'm.toml'}", f"--data={folder / 'd.jsonl'}", "--seq-len=16",
        "--global-batch=2", "--precision=fp32", "--device=cpu", "--eval-batches=0", "--lr=1e-3",
        "--sample-tokens=0", f"--cache-dir={folder / 'cache'}",
    ]  # fmt: skip


def said_by(capsys: pytest.CaptureFixture[str], argv: list[str], *more: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main([*argv, *more])
    told = capsys.readouterr()
    return code, " ".join((told.out + told.err).split())


def test_what_a_resumed_run_does_otherwise_is_said_with_its_learning_rate(
    begun: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    resume, _ = begun
    code, said = said_by(capsys, resume, "--steps=8", "--lr=5e-4", "--weight-decay=0", "--warmup=2")
    assert code == 0
    for part in (
        "the run had 4 steps, now has 8", "--lr was 0.001, is 0.0005",
        "--weight-decay was 0.1, is 0.0", "--warmup was None, is 2",
        "rate of step 5 would have been 0.0001, and is 0.00038",
    ):  # fmt: skip
        assert part in said, (part, said)
    code, said = said_by(capsys, resume, "--steps=8")
    assert code == 2 and "has already completed" in said
    code, said = said_by(capsys, resume, "--steps=9", "--precision=bf16", "--schedule=constant",
                         "--eval-batches=1", "--strategy=ddp",
                         "--compress-gradients=bf16")  # fmt: skip
    assert "--eval-batches was 0, is 1" in said
    assert "compress_gradients was none, is now bf16" in said
    assert "precision was fp32, is now bf16" in said
    assert "--schedule was cosine, is constant" in said


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_other_masks_of_dropout_are_said(
    begun: tuple[list[str], Path], capsys: pytest.CaptureFixture[str], dropout: float
) -> None:
    """Without dropout, batches divided otherwise give the same losses."""
    _, folder = begun
    spec = folder / "m.toml"
    spec.write_text(f"{spec.read_text()}dropout = {dropout}\n")
    run = folder / "dropping"
    argv = [*first_flags(folder), f"--out={run}", "--steps=1"]
    assert main(["train", *argv]) == 0
    code, said = said_by(capsys, ["train", "--resume", f"--out={run}", "--steps=2"])
    assert code == 0 and "dropout draws" not in said
    code, said = said_by(capsys, ["train", "--resume", f"--out={run}", "--steps=3",
                                  "--micro-batch=1"])  # fmt: skip
    assert code == 0 and ("dropout draws other masks" in said) is (dropout > 0)


def test_a_run_is_resumed_with_its_data_and_model_elsewhere(
    begun: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    resume, home = begun
    (home / "moved").mkdir()
    (home / "d.jsonl").rename(home / "moved" / "e.jsonl")
    (home / "m.toml").rename(home / "moved" / "n.toml")
    moved = [f"--data={home / 'moved' / 'e.jsonl'}", f"--model={home / 'moved' / 'n.toml'}"]
    code, said = said_by(capsys, resume, "--steps=5", *moved)
    assert code == 0, said
    (home / "moved" / "e.jsonl").write_text(json.dumps({"text": "others " * 2000}) + "\n")
    code, said = said_by(capsys, resume, "--steps=6", *moved)
    assert code == 2 and "cannot be resumed: the t" in said
    assert "changed since it started. Restore" in said


def test_a_run_whose_data_an_earlier_outpace_read_otherwise_says_so(
    begun: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    resume, home = begun
    path = home / "run" / "run.json"
    record = RunRecord.load(path)
    earlier = {"train_data": "0" * 32, "reading": 0, "commit": "0123456789" * 4}
    record.model_copy(update=earlier).save(path)
    code, said = said_by(capsys, resume, "--steps=5")
    assert (
        code == 2
        and "the training data has changed since it started, or this version of outpace" in said
    )
    assert (
        "from the one that started the run (commit 01234567). Restore the original, finish" in said
    )


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (
            ("heads = 4\nkv_heads = 2", "heads = 2\nkv_heads = 1"),
            "heads was 4, is now 2; kv_heads was",
        ),
        (("vocab", "rope_theta = 500000.0\nvocab"), "rope_theta was 10000.0, is now 500000.0"),
    ],
)
def test_another_model_under_a_run_is_refused(
    begun: tuple[list[str], Path],
    capsys: pytest.CaptureFixture[str],
    edit: tuple[str, str],
    part: str,
) -> None:
    resume, home = begun
    spec = (home / "m.toml").read_text()
    (home / "m.toml").write_text(spec.replace(*edit))
    code, said = said_by(capsys, resume, "--steps=5")
    assert code == 2 and part in said, said
    (home / "m.toml").write_text(spec.replace("heads", "# as before\nheads", 1))
    assert said_by(capsys, resume, "--steps=5")[0] == 0


OWN = """
import torch
def build():
    layers = torch.nn.Embedding(300, 8), torch.nn.{layer}(), torch.nn.Linear(8, 300)
    return torch.nn.Sequential(*layers)
"""


def test_another_code_of_your_model_is_refused(
    begun: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, home = begun
    (home / "mine.py").write_text(OWN.format(layer="ReLU"))
    flags = ["train", f"--model={home / 'mine.py'}:build", f"--data={home / 'd.jsonl'}",
             "--seq-len=16", "--global-batch=2", "--precision=fp32", "--device=cpu",
             "--eval-batches=0", f"--cache-dir={home / 'cache'}",
             f"--out={home / 'own'}"]  # fmt: skip
    assert main([*flags, "--steps=1"]) == 0
    resume = ["train", "--resume", f"--out={home / 'own'}"]
    (home / "mine.py").write_text("# a comment\n" + OWN.format(layer="ReLU"))
    assert said_by(capsys, resume, "--steps=2")[0] == 0
    (home / "mine.py").write_text(OWN.format(layer="Tanh"))
    code, said = said_by(capsys, resume, "--steps=3")
    assert code == 2 and "the code of your model has changed" in said


def test_runs_and_a_cache_within_the_data_are_no_data(
    train_flags: list[str], corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A resumed run, and the next one, would have learnt logs and tokens of the first."""
    data = shutil.copytree(corpus, tmp_path / "data")
    flags = [word for word in train_flags if not word.startswith(("--data", "--cache-dir"))]
    flags += [f"--data={data}", f"--cache-dir={data / 'cache'}", "--save-every=3"]
    assert main(["train", *flags, f"--out={data / 'run'}"]) == 0
    assert main(["train", "--resume", f"--out={data / 'run'}", "--steps=7"]) == 0
    assert main(["train", *flags, f"--out={data / 'other'}"]) == 0
    capfd.readouterr()
    first, second = (
        [
            json.loads(line)["loss"]
            for line in (data / name / "metrics.jsonl").read_text().split("\n")[:-1]
        ]
        for name in ("run", "other")
    )
    assert len(first) == 7 and first[:6] == second
