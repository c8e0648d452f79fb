"""`outpace launch slurm` under a real SLURM: a controller and two nodes, all on this machine.

The nodes' names mean nothing to the resolver, so that jobs are told to meet on the loopback.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "scancel", "squeue")
CONFIG = """
ClusterName=outpace
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
KillWait=20
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{nodes}-{last}] CPUs=2
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10
"""
TRAIN = ("--", "train", "--model", "outpace-tiny", "--seq-len", "32", "--global-batch", "4",
         "--sample-tokens", "0", "--eval-batches", "1")  # fmt: skip


class Slurm:
    """Its programs, called with its configuration, and the folder where jobs are."""

    def __init__(self, folder, config):
        self.folder = folder
        self.environ = {**os.environ, "PATH": PATH, "SLURM_CONF": str(config),
                        "MASTER_ADDR": "127.0.0.1"}  # fmt: skip

    def __call__(self, *words):
        done = subprocess.run(words, cwd=self.folder, env=self.environ, capture_output=True,
                              text=True, check=False)  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def launch(self, name, starter, steps, *words):
        command = [sys.executable, "-m", "outpace", "launch", "slurm", "--nodes", "2", "--name",
                   name, "--starter", starter, "--submit", "--json", *words, *TRAIN]  # fmt: skip
        return json.loads(self(*command, "--steps", str(steps)))["job"]

    def state(self, job):
        shown = self("scontrol", "show", "job", job)
        return next(word.partition("=")[2] for word in shown.split() if word[:9] == "JobState=")

    def until(self, what, job, said=""):
        """Wait until `what()` holds."""
        deadline_s = time.monotonic() + 600
        while not what():
            text = "".join(path.read_text() for path in self.folder.glob(f"*-{job}.log"))
            assert time.monotonic() < deadline_s, f"{self.state(job)} {said}\n{text}"
            time.sleep(0.3)

    def steps(self, name):
        path = self.folder / "runs" / name / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["step"] for line in lines]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if lacking:
        pytest.skip(f"needs {', '.join(lacking)} of slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "work dir").mkdir()
    config = folder / "slurm.conf"
    # Below the ports that the kernel gives to programs that ask for any.
    controller, nodes = (10 * at + os.getpid() % 2000 for at in (1700, 2000))
    config.write_text(CONFIG.format(host=socket.gethostname(), folder=folder, port=controller,
                                    nodes=nodes, last=nodes + 1))  # fmt: skip
    started = []
    try:
        with (folder / "log").open("w") as log:
            for words in services(folder, config):
                started.append(subprocess.Popen(words, stdout=log, stderr=log))
                time.sleep(1)
        found = Slurm(folder / "work dir", config)
        deadline_s = time.monotonic() + 120
        while found("sinfo", "-h", "-o", "%t %D", "-p", "main").split() != ["idle", "2"]:
            if time.monotonic() > deadline_s:
                pytest.skip("SLURM does not run here: " + (folder / "log").read_text()[-800:])
            time.sleep(0.5)
        yield found
    finally:
        for one in reversed(started):
            one.terminate()
            one.wait()


def services(folder, config):
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    where = {name: shutil.which(name, path=PATH) for name in PROGRAMS}
    yield [where["munged"], "-F", "--force", f"--key-file={key}", f"--pid-file={folder}/munge.pid",
           f"--socket={folder}/munge.socket", f"--seed-file={folder}/seed",
           f"--log-file={folder}/munge.log"]  # fmt: skip
    yield [where["slurmctld"], "-D", "-c", "-f", str(config)]
    for name in ("n1", "n2"):
        yield [where["slurmd"], "-D", "-f", str(config), "-N", name]


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["srun", "torchrun"])
def test_a_slurm_job_trains_and_completes(slurm, starter):
    job = slurm.launch(f"short-{starter}", starter, 6)
    slurm.until(lambda: slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), job)
    text = (slurm.folder / f"short-{starter}-{job}.log").read_text()
    assert slurm.state(job) == "COMPLETED", text
    assert "2 processes" in text and slurm.steps(f"short-{starter}")[-1] == 6


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["srun", "torchrun"])
def test_a_job_near_its_time_limit_saves_and_requeues_itself(slurm, starter):
    name = f"limit-{starter}"
    job = slurm.launch(name, starter, 1_000_000, "--time", "2", "--save-s", "60")
    goes_on(slurm, name, job)


@pytest.mark.slow
def test_a_preempted_job_saves_and_resumes_but_a_cancelled_one_does_not(slurm):
    job = slurm.launch("preempted", "srun", 1_000_000)
    slurm.until(lambda: len(slurm.steps("preempted")) > 3, job)
    slurm("sbatch", "-p", "urgent", "-N2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    goes_on(slurm, "preempted", job)


def goes_on(slurm, name, job):
    """It is put back with what it saved, goes on from there, and is not put back when cancelled."""
    slurm.until(lambda: slurm.state(job) == "PENDING" and slurm.steps(name), job, "put back")
    folder = slurm.folder / "runs" / name / "checkpoints"
    saved = max(int(path.name.partition("-")[2]) for path in folder.glob("step-*"))
    # Rather than after two minutes; but not in the second of its end, for which slurmd takes
    # whatever it is told of the job to be revoked.
    time.sleep(3)
    slurm("scontrol", "update", f"jobid={job}", "starttime=now")
    slurm.until(lambda: slurm.state(job) == "RUNNING", job, "restarted")
    slurm.until(lambda: slurm.steps(name)[-1] > saved + 3, job, "gone on")
    steps = slurm.steps(name)
    assert steps == list(range(1, len(steps) + 1))
    assert f"from step {saved:,}" in (slurm.folder / f"{name}-{job}.log").read_text()
    slurm("scancel", job)
    slurm.until(lambda: slurm.state(job) == "CANCELLED", job, "cancelled")
    time.sleep(5)
    assert slurm.state(job) == "CANCELLED"
