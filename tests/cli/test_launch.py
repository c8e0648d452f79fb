"""`outpace launch`, and what it has every rank run."""

import json
import os
import stat
from pathlib import Path

import pytest
import yaml

from outpace.cli.main import main

TRAIN = ["--", "train", "--model", "gpt2", "--seq-len", "128"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_for_slurm_goes_on_by_itself(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "slurm", "--nodes=4", "--gpus-per-node=8", "--name=big"]
    words.append("--sbatch=qos=high")
    assert main([*words, *TRAIN]) == 0
    assert (
        capsys.readouterr().out
        == "big.sbatch: submit it with sbatch big.sbatch, or with --submit\n"
    )
    text = (here / "big.sbatch").read_text()
    assert "#SBATCH --ntasks-per-node=8\n" in text and "#SBATCH --qos=high\n" in text
    assert f"#SBATCH --chdir={here}\n" in text
    assert " outpace train --model gpt2 --seq-len 128 --out runs/big --auto-resume &\n" in text


def test_it_is_sent(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(here / "nowhere"))
    assert main(["launch", "slurm", "--submit", *TRAIN]) == 2
    assert "there is no sbatch on this host" in capsys.readouterr().err
    sbatch = here / "sbatch"
    sbatch.write_text('#!/bin/sh\necho "$@" >&2; [ -n "$REFUSE" ] && exit 1; echo "712;main"\n')
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{here}:{path}")
    assert main(["launch", "slurm", "--submit", "--json", *TRAIN]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "outpace.sbatch", "job": "712"}
    monkeypatch.setenv("REFUSE", "yes")
    assert main(["launch", "slurm", "--submit", *TRAIN]) == 2
    assert "sbatch rejected outpace.sbatch: --parsable -- outpace" in capsys.readouterr().err


def test_two_files_for_kubernetes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "kubernetes", "--nodes=2", "--gpus-per-node=8", "--image=x/y:1", "--file=k",
             "--claim=disk", "--folder=/data"]  # fmt: skip
    assert main([*words, *TRAIN]) == 0
    assert "kubectl apply -f k/outpace.trainjob.yaml" in capsys.readouterr().out
    kinds = [
        [one["kind"] for one in yaml.safe_load_all((here / "k" / name).read_text())]
        for name in ("outpace.trainjob.yaml", "outpace.job.yaml")
    ]
    assert kinds == [["TrainJob"], ["Service", "Job"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurn", *TRAIN], "no scheduler 'slurn'. Did you mean 'slurm'"),
        (["slurm"], "but there is none. Write outpace launch"),
        (["slurm", "--", "plan"], "the command that every rank runs, not 'plan'"),
        (["slurm", "--", "train", "--sequence", "3"], "outpace train has no option '--sequence'"),
        (["slurm", "--", "train", "--nproc", "2"], "--nproc 2: the scheduler starts the ranks"),
        (["slurm", "--name", "a b", *TRAIN], "lower-case letters, digits and hyphens"),
        (["slurm", "--time", "1:00 #", *TRAIN], "is not a time in sbatch's notation"),
        (["slurm", "--sbatch", "a=b\n#SBATCH --c", *TRAIN], "is not of the form partition=gpu"),
        (["slurm", "--sbatch", "ntasks-per-node=8", *TRAIN], "Use --ranks-per-node instead"),
        (["slurm", "--sbatch", "nodes=4", *TRAIN], "Use --nodes instead"),
        (["slurm", "--sbatch", "gpus-per-task=1", *TRAIN], "Use --gpus-per-node instead"),
        (["slurm", "--sbatch", "cpus-per-task=8", *TRAIN], "Use --cpus-per-rank instead"),
        (["slurm", "--sbatch", "signal=TERM@60", *TRAIN], "Use --save-s instead"),
        (["slurm", "--sbatch", "array=0-3", *TRAIN], "jobs of an array would train in one folder"),
        (["slurm", "--sbatch", "no-requeue", *TRAIN], "relies on SLURM to requeue it after a"),
        (["slurm", "--sbatch", "gpus-per-node=a100:4", *TRAIN], "--sbatch gres=gpu:a100:4 and"),
        (["slurm", "--nodes", "0", *TRAIN], "0 is not at least 1"),
        (
            ["slurm", *TRAIN, "--max-restarts", "3"],
            "--max-restarts: the cluster's scheduler starts and restarts the ranks",
        ),
        (["slurm", "--name", "7b", *TRAIN], "starting with a letter"),
        (["slurm", "--time", "2", *TRAIN], "--time 2 is 120 s, of which --save-s 120"),
        (["slurm", "--time", "0-0:1:30", *TRAIN], "is 90 s"),
        (["kubernetes", *TRAIN], "required: --image"),
        (["kubernetes", "--image=x", "--nodes=2", *TRAIN], "Name its claim with --claim"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_second_job_does_not_take_up_the_run_of_the_first_unasked(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "runs" / "outpace").mkdir(parents=True)
    begun = {"settings": {"model": "gpt2", "nproc": 4, "seq_len": 128}}
    (here / "runs" / "outpace" / "run.json").write_text(json.dumps(begun))
    assert main(["launch", "slurm", *TRAIN, "--lr", "3e-4"]) == 2
    assert "runs/outpace already holds a run" in capsys.readouterr().err
    assert main(["launch", "slurm", *TRAIN, "--out", "runs/outpace"]) == 0
    assert main(["launch", "slurm", "--time", "12", "--name", "other", *TRAIN]) == 0


def test_what_is_begun_is_gone_on_with(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--print-config", "--json", "--auto-resume"]
    assert main(words) == 2
    assert "--auto-resume needs a run." in capsys.readouterr().err
    assert main([*words, "--out=run"]) == 0
    assert json.loads(capsys.readouterr().out)["resume"]["value"] is False
    assert main(["train", "--print-config", "--out=run", "--resume"]) == 2
    (here / "run").mkdir()
    (here / "run" / "run.json").write_text(json.dumps({"settings": {"model": "gpt2"}}))
    capsys.readouterr()
    assert main([*words, "--out=run"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["resume"]["value"] is True and found["model"]["value"] == "gpt2"
