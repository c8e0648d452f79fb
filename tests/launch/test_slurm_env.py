"""Ranks from the variables that srun sets for each task."""

import subprocess
import time
from pathlib import Path

import pytest

from outpace.launch.launcher_env import init_method, ranks_from
from outpace.records.errors import BadInputError
from outpace.records.ranks import Ranks

STEP = {
    "SLURM_JOB_ID": "712",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[03-04,9]",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}


def test_a_tasks_place_is_read() -> None:
    assert ranks_from(STEP) == Ranks(rank=9, world_size=11, local_rank=1, local_world_size=3)
    second = {**STEP, "SLURM_NODEID": "1", "SLURM_PROCID": "5"}
    assert ranks_from(second) == Ranks(rank=5, world_size=11, local_rank=1, local_world_size=4)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-04,9]", "gpu03"),
        ("gpu[7,9-11],login", "gpu7"),
        ("login,gpu[1-2]", "login"),
        ("a-b.example", "a-b.example"),
        ("c1", "c1"),
        ("rack[1-2]-gpu", "rack1-gpu"),
        ("rack[0-1]node[1-4]", "rack0node1"),
    ],
)
def test_tasks_meet_on_the_first_node(nodes: str, first: str) -> None:
    url = init_method({**STEP, "SLURM_STEP_NODELIST": nodes})
    assert url.startswith(f"tcp://{first}:")
    assert 15000 <= int(url.rpartition(":")[2]) < 30000


def test_steps_and_jobs_meet_at_ports_of_their_own() -> None:
    ports = {
        init_method({**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job in range(1000, 1010)
        for step in range(7)
    }
    assert len(ports) == 70
    assert init_method({**STEP, "SLURM_STEP_RESV_PORTS": "12001-12011"}) == "tcp://gpu03:12001"
    assert init_method({**STEP, "MASTER_ADDR": "x", "MASTER_PORT": "1"}) == "env://"


def test_a_shell_of_one_task_and_a_batch_script_are_no_ranks() -> None:
    assert ranks_from({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) is None
    batch = {"SLURM_JOB_ID": "712", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert ranks_from(batch) is None
    assert init_method(batch) == "env://"


def test_a_shell_that_has_the_terminal_of_several_tasks_is_no_rank(tmp_path: Path) -> None:
    (tmp_path / "script.sh").write_text("read line")

    def ranks(*words: str, **environ: str) -> Ranks | None:
        task = subprocess.Popen(words, stdin=subprocess.PIPE)
        try:
            while not Path(f"/proc/{task.pid}/cmdline").read_bytes():
                time.sleep(0.001)  # the kernel is about to write it
            of_task = {**STEP, "SLURM_PTY_PORT": "4711", "SLURM_TASK_PID": str(task.pid)}
            return ranks_from({**of_task, **environ})
        finally:
            task.communicate()

    assert ranks("bash", "--norc") is None
    assert ranks("bash", "--rcfile", "/dev/null", "-l") is None
    rank = Ranks(rank=9, local_rank=1, world_size=11, local_world_size=3)
    assert ranks("bash", str(tmp_path / "script.sh")) == rank
    assert ranks("bash", "-lc", "read line") == rank
    assert ranks("cat") == rank
    assert ranks("bash", SLURM_PTY_PORT="") == rank
    assert ranks("bash", SLURM_TASK_PID="0") == rank  # of another namespace of processes


def test_torchrun_under_srun_is_nearer() -> None:
    assert ranks_from({**STEP, "RANK": "0", "WORLD_SIZE": "1"}) == Ranks()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SLURM_STEP_NODELIST", "", "but not SLURM_STEP_NODELIST. srun sets"),
        ("SLURM_STEP_TASKS_PER_NODE", "many", "'many' is not of the form"),
        ("SLURM_NODEID", "3", "SLURM_NODEID = '3' is not one of the 3 nodes"),
        ("SLURM_PROCID", "x", "RANK = 'x' is not a whole number"),
        ("SLURM_LOCALID", "3", "local rank 3 of 3"),
        ("SLURM_JOB_ID", "1_2", "are not numbers. Set MASTER_PORT"),
    ],
)
def test_what_is_damaged_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        ranks_from({**STEP, name: value})
