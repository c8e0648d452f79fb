"""The script for sbatch, run by a real shell beside stand-ins for SLURM's own programs."""

import os
import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from outpace.launch.slurm_script import SlurmOptions, script
from outpace.records.cluster_job import ClusterJob
from outpace.records.errors import BadInputError

# Each writes down how it was called; srun runs what it is given, as a node would.
PROGRAMS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": 'case "$1" in show) printf "host1\\nhost2\\n" ;; esac',
    # By the time it is back, what it told to end has: its parent's shell knows of it at once.
    "scancel": 'kill -TERM "$(cat training)"; '
    'while [ -d "/proc/$(cat training)" ]; do sleep 0.05; done; sleep 0.3',
    "outpace": 'trap "exit $ENDS" TERM; echo $$ >training; '
    "for at in $(seq $STEPS); do sleep 0.1; done; exit $CODE",
}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name, body in PROGRAMS.items():
        path = tmp_path / "bin" / name
        calls = shlex.quote(str(tmp_path / "calls"))
        said = f"printf '%s\\n' \"{name} $(printf '<%s>' \"$@\")\" >>{calls}"
        path.write_text(f"#!/bin/bash\n{said}\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def job(**more: object) -> ClusterJob:
    values = {
        "name": "try",
        "nodes": 2,
        "ranks_per_node": 4,
        "gpus_per_node": 4,
        "command": ("train", "--model", "a b; $(rm -rf x)", "--out", "r"),
        "folder": "/data/x y",
    }
    return ClusterJob.parse({**values, **more}, "test")


def started(
    cluster: Path, text: str, steps: int, code: int = 0, ends: int = 75
) -> "subprocess.Popen[str]":
    (cluster / "job.sbatch").write_text(text)
    environ = {**os.environ, "SLURM_JOB_ID": "7", "STEPS": str(steps), "CODE": str(code),
               "ENDS": str(ends), "SLURM_JOB_NODELIST": "host[1-2]",
               "SLURM_NNODES": "2"}  # fmt: skip
    return subprocess.Popen(
        ["bash", "job.sbatch"], cwd=cluster, env=environ, stderr=subprocess.PIPE, text=True
    )


def ended(process: "subprocess.Popen[str]", cluster: Path) -> tuple[int, list[str]]:
    _, errors = process.communicate(timeout=600)
    assert errors == ""
    return process.returncode, (cluster / "calls").read_text().splitlines()


@pytest.mark.parametrize("code", [0, 2])
def test_what_ends_by_itself_is_not_put_back(cluster: Path, code: int) -> None:
    text = script(job(), SlurmOptions(), str(cluster / "bin"))
    found, calls = ended(started(cluster, text, 1, code), cluster)
    assert found == code
    assert [call.split()[0] for call in calls] == ["srun", "outpace"]
    assert calls[1] == "outpace <train><--model><a b; $(rm -rf x)><--out><r>"


@pytest.mark.parametrize("ends", [75, 0])
def test_near_its_limit_it_saves_and_is_put_back(cluster: Path, ends: int) -> None:
    text = script(job(), SlurmOptions(time="1:00:00"), str(cluster / "bin"))
    process = started(cluster, text, 6000, ends=ends)
    while not (cluster / "training").exists() or not (cluster / "training").read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    code, calls = ended(process, cluster)
    assert code == ends
    back = ["scontrol <requeue><7>"] if ends else []  # what has finished meanwhile is not
    assert calls[2:] == ["scancel <--signal=TERM><7>", *back]


def test_what_twice_saves_nothing_within_its_time_is_not_put_back(cluster: Path) -> None:
    """But once: the first time it may have tokenised its data."""
    text = script(job(out="r s"), SlurmOptions(time="1:00:00"), str(cluster / "bin"))
    idle, checkpoints = cluster / "try-7.idle", cluster / "r s" / "checkpoints"
    for number, back in enumerate((True, False, True, True)):
        for name in ("training", "calls"):
            (cluster / name).unlink(missing_ok=True)
        process = started(cluster, text, 6000)
        while not (cluster / "training").exists() or not (cluster / "training").read_text():
            time.sleep(0.02)
        if number == 3:
            (checkpoints / "step-5").mkdir(parents=True)
            (checkpoints / "step-5" / "complete.json").touch()
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=600)
        calls = (cluster / "calls").read_text().splitlines()
        assert ("scontrol <requeue><7>" in calls) is back and process.returncode == 75
        assert ("nothing was saved within the time limit, twice" in errors) is not back
        assert idle.exists() is (number in (0, 2))


def test_what_else_is_asked_of_sbatch_stays_one_word() -> None:
    text = script(
        job(), SlurmOptions(directives=("comment=run 3 #x", "exclusive", "gres=gpu:2")), "/bin"
    )
    assert "#SBATCH --comment='run 3 #x'\n#SBATCH --exclusive\n#SBATCH --gres=gpu:2\n" in text


def test_torchrun_is_started_once_on_each_node(cluster: Path) -> None:
    (cluster / "bin" / "torchrun").symlink_to(cluster / "bin" / "outpace")
    text = script(job(cpus_per_rank=3), SlurmOptions(starter="torchrun"), str(cluster / "bin"))
    assert "#SBATCH --ntasks-per-node=1\n" in text and "#SBATCH --cpus-per-task=12\n" in text
    code, calls = ended(started(cluster, text, 1), cluster)
    assert code == 0
    assert "<--cpus-per-task=12>" in calls[1]
    assert calls[2] == (
        "outpace <--nnodes=2><--nproc-per-node=4><--rdzv-backend=c10d><--rdzv-id=7-0>"
        "<--rdzv-endpoint=host1:15007><--shutdown-timeout=120><-m><outpace><train>"
        "<--model><a b; $(rm -rf x)><--out><r>"
    )


def test_what_sbatch_reads_is_as_asked() -> None:
    wishes = SlurmOptions(time="2-0", save_s=90, directives=("partition=gpu", "exclusive"))
    read = [line for line in script(job(), wishes, "/bin").splitlines() if line[:7] == "#SBATCH"]
    assert read == [f"#SBATCH --{one}" for one in (
        "job-name=try", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "time=2-0",
        "chdir='/data/x y'", "output=try-%j.log", "open-mode=append", "requeue",
        "signal=B:USR1@90", "partition=gpu", "exclusive",
    )]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "a; rm"}, "lower-case letters, digits and hyphens"),
        ({"command": ("train", "a\nrm")}, "contains a line break"),
        ({"folder": "/a\n#SBATCH"}, "contains a line break"),
        ({"ranks_per_node": 5}, "5 ranks for 4 GPUs"),
        ({"nodes": 0}, "nodes"),
    ],
)
def test_what_no_script_can_say_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        job(**values)
