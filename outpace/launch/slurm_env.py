"""Translation of the variables that SLURM's srun sets for each task into torchrun's.

The names are from "OUTPUT ENVIRONMENT VARIABLES" in srun(1). A batch script also has some of them,
but is not a rank: only tasks that srun starts have the variables of a step.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from outpace.launch.host_list import expand
from outpace.records.errors import BadInputError

# Below the ports that systems assign to clients (32768 and up), and above those of services.
_PORTS = range(15000, 30000)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_SHELLS = ("ash", "bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh")
_WITH_VALUE = ("--rcfile", "--init-file")  # options of bash(1) with a value


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables (RANK, WORLD_SIZE, …) for a task of srun.

    Empty outside of a step with several tasks, and in an interactive shell that srun started, where
    `--nproc` works. Raises BadInputError if one of srun's variables is missing.
    """
    if environ.get("SLURM_STEP_NUM_TASKS", "1") == "1" or _is_interactive_shell(environ):
        return {}
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE",
              "SLURM_STEP_NODELIST", "SLURM_JOB_ID")  # fmt: skip
    missing = [name for name in needed if not environ.get(name)]
    if missing:
        raise BadInputError(
            f"the environment has SLURM_STEP_NUM_TASKS but not {' and '.join(missing)}. srun sets "
            "all of them; unset SLURM_STEP_NUM_TASKS to train on one process."
        )
    counts = list(_tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"]))
    node = environ["SLURM_NODEID"]
    if not node.isdigit() or int(node) >= len(counts):
        raise BadInputError(
            f"environment: SLURM_NODEID = {node!r} is not one of the {len(counts)} nodes of "
            f"SLURM_STEP_TASKS_PER_NODE = {environ['SLURM_STEP_TASKS_PER_NODE']!r}"
        )
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(counts[int(node)]),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or next(expand(environ["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": environ.get("MASTER_PORT") or _choose_port(environ),
    }


def _is_interactive_shell(environ: Mapping[str, str]) -> bool:
    """Return whether this task of srun is an interactive shell.

    `srun --pty -n 4 bash` starts four shells, of which only task 0 has the terminal. A shell that
    runs a script or a command does not count, since it does so in every task.
    """
    if not environ.get("SLURM_PTY_PORT"):
        return False
    try:
        text = Path("/proc", environ["SLURM_TASK_PID"], "cmdline").read_text(errors="replace")
    except (KeyError, OSError, ValueError):
        return False
    name, *words = text.split("\0")[:-1] or [""]
    if name.rpartition("/")[2].removeprefix("-") not in _SHELLS:
        return False
    while words:
        word = words.pop(0)
        if word in _WITH_VALUE:
            del words[:1]
        elif not word.startswith("-") or (not word.startswith("--") and "c" in word):
            return False  # a script or a command
    return True


def _tasks_per_node(text: str) -> Iterator[int]:
    """Yield the number of tasks on each node: '4(x2),3' gives 4, 4, 3."""
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if found is None:
            raise BadInputError(
                f"environment: SLURM_STEP_TASKS_PER_NODE = {text!r} is not of the form 4(x2),3"
            )
        yield from [int(found[1])] * int(found[2] or 1)


def _choose_port(environ: Mapping[str, str]) -> str:
    """Return a port reserved by srun (--resv-ports), or one derived from job and step."""
    reserved = re.match(r"\d+", environ.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved is not None:
        return reserved[0]
    job, step = environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", "0")
    if not (job.isdigit() and step.isdigit()):
        raise BadInputError(
            f"environment: SLURM_JOB_ID = {job!r} and SLURM_STEP_ID = {step!r} are not "
            "numbers. Set MASTER_PORT to a free port of the first node"
        )
    return str(_PORTS[(7 * int(job) + int(step)) % len(_PORTS)])
