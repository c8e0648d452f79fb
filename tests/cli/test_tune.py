"""`outpace tune`: real trials, what is kept, going on, the promise, what is refused."""

import json
import shutil

import pytest

from outpace.catalog.models import preset
from outpace.cli.main import main
from outpace.planner.model.adapters import AdapterSettings
from outpace.planner.model.outline import outline
from outpace.records.measurement import Measurement
from outpace.records.plan import PlanFile
from outpace.records.tuning import Tuning

WORDS = ["--model=outpace-tiny", "--seq-len=16", "--global-batch=8"]


pytestmark = pytest.mark.usefixtures("short_trials")


@pytest.fixture(scope="module")
def tuned(short_trials, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning")
    corpus = folder / "corpus.txt"
    corpus.write_text("def a():\n    return 1\n" * 400)
    words = [*WORDS, f"--data={corpus}", f"--cache-dir={folder / 'cache'}"]
    assert main(["tune", *words, "--trials=2", f"--out={folder / 't'}"]) == 0
    return folder / "t", words


def test_the_fastest_of_real_trials_is_kept_with_all_that_was_tried(tuned, capsys):
    folder, words = tuned
    tuning = Tuning.load(folder / "tuning.json")
    assert [trial.number for trial in tuning.trials] == [1, 2]
    assert tuning.trials[0].why == "what outpace train does by default"
    measured = [Measurement.load(folder / t.run / "result.json").step_time_s for t in tuning.trials]
    assert measured == [trial.step_time_s for trial in tuning.trials]
    assert tuning.fastest.compared_s == min(trial.compared_s for trial in tuning.trials)
    assert tuning.step_time_s == tuning.fastest.step_time_s
    assert PlanFile.load(folder / "plan.json").plan == tuning.fastest.plan
    assert not (folder / tuning.trials[0].run / "model").exists()
    assert main(["tune", *words, "--trials=2", f"--out={folder}", "--resume", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["trials"] == json.loads(tuning.model_dump_json())["trials"]
    assert again["took_s"] >= sum(trial.took_s for trial in tuning.trials)
    assert again["command"][-6:] == ["--trials", "2", "--budget", "600.0", "--within", "0.02"]
    longer = [*words, "--steps=500", "--trials=2", f"--out={folder}", "--resume"]
    assert main(["tune", *longer]) == 0  # trials are as short as before
    shown = " ".join(capsys.readouterr().out.split())
    assert "--steps 500 --plan" in shown


@pytest.mark.slow
def test_trials_of_adapters_train_adapters(tuned, tmp_path):
    words = [*tuned[1], "--init=random", "--lora-rank=8", "--lora-targets", "q", "v"]
    asked = ["tune", *words, "--nproc=1", "--trials=2", "--within=0", f"--out={tmp_path / 't'}"]
    assert main(asked) == 0
    tuning = Tuning.load(tmp_path / "t" / "tuning.json")
    assert tuning.trials and not any(trial.failure for trial in tuning.trials)
    for trial in tuning.trials:
        run = json.loads((tmp_path / "t" / trial.run / "run.json").read_text())
        for plan in (trial.plan.model_dump(mode="json"), run["plan"]):
            assert (plan["lora_rank"], plan["lora_targets"]) == (8, ["q", "v"])
    trials = [
        (tmp_path / "t", tuning.trials[0]),
        (tuned[0], Tuning.load(tuned[0] / "tuning.json").trials[0]),
    ]
    built, whole = (
        Measurement.load(folder / trial.run / "result.json").parameters for folder, trial in trials
    )
    spec = outline(preset("outpace-tiny"), "tiny")
    assert built - whole == AdapterSettings(8, ("q", "v")).trained_parameters(spec)


@pytest.mark.slow
def test_what_is_close_runs_in_turn_at_the_end(tuned, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("outpace.experiment.tune._CLOSE", 9.0)
    monkeypatch.setattr("outpace.experiment.trials.TURN_S", 0.2)
    monkeypatch.setattr(
        "outpace.planner.calibration.strategy_residuals._OWN", 1.0
    )  # whatever is left may win
    words = [*tuned[1], "--nproc=2", "--within=0", "--trials=5", f"--out={tmp_path / 't'}"]
    assert main(["tune", *words]) == 0
    told = capsys.readouterr()
    assert "outpace: measured in turn, to distinguish them: " in told.err
    tuning = Tuning.load(tmp_path / "t" / "tuning.json")
    assert [trial.raced for trial in tuning.trials] == [False] * 3 + [True] * 2
    fastest = min(tuning.trials[3:], key=lambda trial: trial.compared_s)
    assert tuning.fastest.plan == fastest.plan and tuning.step_time_s == fastest.step_time_s
    assert all((tmp_path / "t" / one.run / "result.json").is_file() for one in tuning.trials)


def test_an_interrupted_one_is_kept_and_its_folder_named(tuned, capsys, tmp_path, monkeypatch):
    def interrupted(*given, **more):
        raise KeyboardInterrupt

    folder, words = tuned
    monkeypatch.setattr(
        "outpace.planner.calibration.strategy_residuals._OWN", 1.0
    )  # whatever is left may win
    shutil.copytree(folder, tmp_path / "t")
    # As fast as was predicted, however busy the machine was: then others may win.
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    for line in lines:
        del line["xxh3_64"]
    as_predicted = [{**line, "step_time_s": line["first_predicted_s"]} for line in lines]
    (tmp_path / "t" / "trials.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in as_predicted)
        + '{"number": 3, "wh'  # killed while it was written
    )
    (tmp_path / "t" / "tuning.json").unlink()
    monkeypatch.setattr("outpace.experiment.trials.Trials.run", interrupted)
    asked = ["tune", *words, "--trials=9", "--within=0", "--resume"]
    assert main([*asked, f"--out={tmp_path / 't'}"]) == 130
    told = capsys.readouterr().err
    assert "resume with:\noutpace tune " in told and f" --resume --out={tmp_path / 't'}\n" in told
    kept = Tuning.load(tmp_path / "t" / "tuning.json")
    assert kept.stopped == "it was interrupted" and len(kept.trials) == 2
    assert PlanFile.load(tmp_path / "t" / "plan.json").plan == kept.fastest.plan
    assert main(asked) == 2
    assert "--resume needs a tuning run. Give its directory" in capsys.readouterr().err


def test_training_by_the_plan_checks_the_promise(tuned, capfd, tmp_path):
    folder, words = tuned
    tuning = Tuning.load(folder / "tuning.json")
    plan = [*words, f"--plan={folder / 'plan.json'}", "--steps=8", "--sample-tokens=0"]
    assert main(["train", *plan, f"--out={tmp_path / 'run'}", "--json"]) == 0
    promise = json.loads(capfd.readouterr().out)["promise"]
    assert promise["expected_s"] == tuning.step_time_s and promise["steps"] == 5
    off = promise["step_time_s"] / promise["expected_s"] - 1
    assert promise["kept"] == (abs(off) <= 0.03)
    short = [*plan, "--steps=3", f"--out={tmp_path / 'short'}"]
    assert main(["train", *short]) == 0
    assert "which cannot be checked: the first 3 steps are warm-up" in capfd.readouterr().err
    other = [*plan, "--global-batch=16", f"--out={tmp_path / 'other'}", "--json"]
    assert main(["train", *other]) == 0
    assert json.loads(capfd.readouterr().out)["promise"] is None


def test_a_run_says_that_its_first_steps_are_not_as_expected(tuned, capsys, tmp_path):
    _, words = tuned
    slow = ["--expect-step-time-s=1e-6", "--steps=104", "--measure-only", "--sample-tokens=0"]
    assert main(["train", *words, *slow, f"--out={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr()
    assert "the first 100 steps took" in said.err and "outpace tune" in said.err
    assert "Slower than expected" in said.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan=auto"], "Leave out --plan"),
        (["--micro-batch=auto"], "searches micro-batch sizes itself"),
        (["--memory-budget=2GiB"], "Use --memory-limit"),
        (["--data=nowhere/at/all"], "nowhere/at/all"),
        (["--trials=0"], "0"),
        (["--lora-rank=8", "--nproc=2", "--strategy=tp"], "lora_rank 8 with strategy tp"),
        (["--lora-rank=8", "--data=corpus"], "would start with random ones"),
        (["--compress-gradients=bf16"], "does not support --compress-gradients"),
        (["--resume", "--out=none"], "there is no tuning run in none"),
        (["--model=gpt3"], "gpt3"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *words]) == 2
    assert said in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_trials_of_another_machine_are_not_gone_on_with(tuned, capsys, tmp_path):
    folder, words = tuned
    shutil.copytree(folder, tmp_path / "t")
    host = json.loads((tmp_path / "t" / "host.json").read_text())
    host.pop("xxh3_128")  # changed on purpose
    (tmp_path / "t" / "host.json").write_text(json.dumps({**host, "host_cores": 999}))
    assert main(["tune", *words, f"--out={tmp_path / 't'}", "--resume"]) == 2
    assert "another machine: host_cores was 999" in capsys.readouterr().err
    (tmp_path / "t" / "settings.json").write_text('{"seq_len": 1')
    assert main(["tune", *words, f"--out={tmp_path / 't'}", "--resume"]) == 2
    assert "settings.json cannot be read" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(tuned, capsys, tmp_path):
    folder, words = tuned
    assert main(["tune", *words, f"--out={folder}"]) == 2
    assert "--resume to continue" in capsys.readouterr().err
    other = [*words, "--seq-len=32", f"--out={folder}", "--resume"]
    assert main(["tune", *other]) == 2
    assert "other settings" in capsys.readouterr().err
    (tmp_path / "a").write_text("")
    assert main(["tune", *words, f"--out={tmp_path}"]) == 2
    assert "not empty" in capsys.readouterr().err
