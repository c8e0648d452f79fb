import json
from pathlib import Path
from typing import Any

import pytest

from outpace.cli import options
from outpace.cli.main import main
from outpace.records.plan import Plan, PlanFile
from outpace.records.settings import TrainSettings

Config = dict[str, dict[str, Any]]


def config(capsys: pytest.CaptureFixture[str], *argv: str) -> Config:
    assert main(["train", "--print-config", "--json", *argv]) == 0
    document: Config = json.loads(capsys.readouterr().out)
    return document


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["train", "--print-config", *argv]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


def test_every_setting_has_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    for name, field in TrainSettings.model_fields.items():
        assert options.flag(name) in words
        assert field.description


def test_without_options_every_value_is_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    shown = config(capsys)
    assert {name: entry["value"] for name, entry in shown.items()} == TrainSettings().model_dump(
        mode="json"
    )
    assert {entry["origin"] for entry in shown.values()} == {"default"}


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--tokens", "2B"], "tokens", 2 * 10**9),
        (["--steps", "1e3"], "steps", 1000),
        (["--lr", "3e-4"], "lr", 3e-4),
        (["--compile"], "compile", True),
        (["--no-autocast-cache"], "autocast_cache", False),
        (["--no-pin-memory"], "pin_memory", False),
        (["--data", "a", "--data", "b,c"], "data", ["a", "b,c"]),
        (["--data", "a", "b"], "data", ["a", "b"]),
        (["--data", "a", "b", "--data-weights", "0.5,2"], "data_weights", [0.5, 2.0]),
        (["--data", "a", "b", "--data-weights", "0.5", "2"], "data_weights", [0.5, 2.0]),
        (["--log", "tensorboard,mlflow"], "log", ["tensorboard", "mlflow"]),
        (["--out=runs/x"], "out", "runs/x"),
        (["--memory-limit", "8GiB"], "memory_limit", 8 * 2**30),
        (["--memory-limit", "900 MiB"], "memory_limit", 900 * 2**20),
        (["--memory-budget", "2e9"], "memory_budget", 2 * 10**9),
        (["--memory-budget", "8GB"], "memory_budget", 8 * 10**9),
        (["--micro-batch", "auto"], "micro_batch", "auto"),
        (["--micro-batch", "1e1"], "micro_batch", 10),
        (["--checkpoint-layers", "full,none"], "checkpoint_layers", ["full", "none"]),
    ],
)
def test_flags_are_read_as_what_they_hold(
    argv: list[str], name: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = config(capsys, *argv)
    assert shown[name] == {"value": value, "origin": "command line"}


def test_a_place_may_begin_with_the_home_where_no_shell_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell leaves --out=~/runs as it is, and so do TOML, YAML and lists of words."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path / "c.toml", 'data = ["~/a.txt", "b~"]\ncache-dir = "~/cache"')
    shown = config(capsys, "--out=~/runs/x", "--config", file, "--eval-data", "~/c.txt")
    assert shown["out"]["value"] == str(tmp_path / "runs/x")
    assert shown["cache_dir"]["value"] == str(tmp_path / "cache")
    assert shown["data"]["value"] == [str(tmp_path / "a.txt"), "b~"]
    assert shown["eval_data"]["value"] == [str(tmp_path / "c.txt")]
    assert "cannot be expanded" in refusal(capsys, "--out=~nobody-of-this-name/x")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--stepps", "3"], "no option '--stepps'. Did you mean '--steps'"),
        (["--steps", "many"], "--steps: 'many' is not a whole number, such as 200, 1e6 or 10M"),
        (["--steps", "0"], "--steps 0: input should be greater than 0"),
        (["--lr", "-1"], "--lr -1"),
        (["--lr", "nan"], "--lr nan"),
        (["--memory-limit", "lots"], "--memory-limit: 'lots' is not a number of bytes. Write 8GiB"),
        (["--memory-limit", "0"], "--memory-limit: '0' is not a number of bytes"),
        (["--micro-batch", "all"], "not a whole number, such as 200, 1e6 or 10M, not 'auto'"),
        (["--comm-timeout-s", "inf"], "--comm-timeout-s: 'inf' is not a duration. Write 180"),
        (["--comm-timeout-s", "1e308"], "'1e308' is not a duration"),
        (["--comm-timeout-s", "20000000"], "input should be less than or equal to 10000000"),
        (["--lr", "inf"], "--lr inf: input should be a finite number"),
        (["--tokens", "1e30"], "must be at most 1,000,000,000,000,000,000"),
        (["--seed", "1e30"], "must be at most 9,223,372,036,854,775,807"),
        (["--lr", "1e30"], "--lr 1e+30: must be at most 10,000.0"),
        (["--lr", "1e-30"], "--lr 1e-30: must be at least 1e-15"),
        (["--dp-shard", "1e9"], "--dp-shard 1000000000: must be at most 16,777,216"),
        (["--data-weights", "1e30"], "must be at most 1e+18"),
        (["--workers", "1e30"], "must be at most 65,536"),
        (["--clip", "nan"], "--clip nan: input should be a finite number"),
        (["--micro-batch", "0"], "--micro-batch 0: input should be greater than 0"),
        (["--memory-budget", "1GiB", "--checkpointing", "full"], "Leave one out"),
        (
            ["--schedule", "cosin"],
            "not one of cosine, linear, wsd, constant. Did you mean 'cosine'",
        ),
        (["--log", "wandb,tensorbord"], "Did you mean 'tensorboard'"),
        (["--offload", "optimizer"], "Did you mean --offload-optimizer {none,cpu,disk}?"),
        (["--steps", "5", "--epochs", "1"], "give one of steps, tokens, epochs"),
        (["--data-weights", "1,2"], "2 values for 1 sources"),
        (["--compile", "yes"], "no argument 'yes'"),
        (["--config", "not-there.toml"], "cannot read --config not-there.toml"),
    ],
)
def test_bad_values_are_named_by_their_flag(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *argv)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_command_line_wins_over_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(
        tmp_path / "run.toml",
        'global-batch = 8\nmin_lr_ratio = 0.2\nsteps = "2k"\ndata = "a"\nlr = 1\ncompile = true\n',
    )
    shown = config(capsys, "--config", file, "--global-batch", "32")
    assert shown["global_batch"] == {"value": 32, "origin": "command line"}
    assert shown["steps"] == {"value": 2000, "origin": file}
    assert shown["min_lr_ratio"] == {"value": 0.2, "origin": file}
    assert shown["data"] == {"value": ["a"], "origin": file}
    assert shown["compile"] == {"value": True, "origin": file}
    assert shown["seed"]["origin"] == "default"


def test_a_length_on_the_command_line_replaces_another_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "run.toml", "epochs = 2\n")
    shown = config(capsys, "--config", file, "--steps", "10")
    assert shown["steps"]["value"] == 10
    assert shown["epochs"] == {"value": None, "origin": "default"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("global-bach = 8", "unknown key 'global-bach'. Did you mean 'global-batch'"),
        ("global_bach = 8", "Did you mean 'global_batch'"),
        ("[train]\nlr = 1", "unknown key 'train'"),
        ("lr = 1\nlr = 2", "is not TOML"),
        ("min-lr-ratio = 1\nmin_lr_ratio = 1", "given twice"),
        ('schedule = "cosin"', "Did you mean 'cosine'"),
        ("steps = 1.5", "steps 1.5"),
        ("lr = true\nsteps = -3", "steps -3"),
        ("compile = 7", "compile 7"),
    ],
)
def test_the_file_s_mistakes_name_the_file(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "run.toml", text)
    message = refusal(capsys, "--config", file)
    assert said in message
    assert file in message


def test_print_config_for_a_person_shows_values_and_origins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "--print-config", "--data", "[bold]corpus[/bold]", "--lr", "3e-4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (data,) = [line.split() for line in lines if line.split()[:1] == ["data"]]
    (lr,) = [line.split() for line in lines if line.split()[:1] == ["lr"]]
    assert data == ["data", "[bold]corpus[/bold]", "command", "line"]
    assert lr == ["lr", "0.0003", "command", "line"]
    # What nobody gave is what training makes of it, as the help says.
    (dropout,) = [line.split() for line in lines if line.split()[:1] == ["dropout"]]
    assert dropout == ["dropout", "(the", "model's)", "default"]
    (limit,) = [line for line in lines if line.split()[:1] == ["memory-limit"]]
    assert "(on a CPU: the control group's limit)" in limit
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("line", ["lr = true", "steps = true", "seed = false"])
def test_a_truth_value_is_no_number(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lr = true` trained at a rate of 1."""
    (tmp_path / "c.toml").write_text(f"{line}\ncompile = false\n")
    said = refusal(capsys, f"--config={tmp_path / 'c.toml'}")
    assert f"{line.split()[2]} is neither a number nor a name" in said


def test_print_config_shows_what_a_plan_file_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(strategy="ddp", dp_replicate=2, micro_batch=2, checkpointing="full")
    PlanFile.from_plan(plan, 16, 8).save(tmp_path / "plan.json")
    words = [f"--plan={tmp_path / 'plan.json'}", "--seq-len=32"]
    assert main(["train", "--print-config", "--json", *words]) == 0
    shown = json.loads(capsys.readouterr().out)
    of_plan = {"global_batch": 8, "micro_batch": 2, "checkpointing": "full", "nproc": 2}
    assert {name: shown[name]["value"] for name in of_plan} == of_plan
    assert all(shown[name]["origin"].startswith("plan ") for name in of_plan)
    assert shown["seq_len"] == {"value": 32, "origin": "command line"}
