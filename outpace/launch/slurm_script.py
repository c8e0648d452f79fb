"""Jobs for SLURM: a readable sbatch script."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from outpace.records.cluster_job import ClusterJob

# Seconds that srun waits for other ranks after one has ended; they may still be saving.
_WAIT_S = 600


@dataclass(frozen=True)
class SlurmOptions:
    """Options for SLURM. `directives`: further #SBATCH options, such as 'partition=gpu'."""

    starter: Literal["srun", "torchrun"] = "srun"
    time: str | None = None
    save_s: int = 120
    directives: tuple[str, ...] = ()


def script(job: ClusterJob, options: SlurmOptions, path: str) -> str:
    """Return the sbatch script of a job; `path` holds folders to put before PATH."""
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{one}" for one in _directives(job, options)),
            "",
            f"export PATH={shlex.quote(path)}:$PATH",
            "# The job resumes from its last checkpoint: SLURM requeues it after a preemption or a",
            "# lost node, and it requeues itself shortly before its time limit.",
            "stopping=",
            "trap 'stopping=yes; scancel --signal=TERM \"$SLURM_JOB_ID\"' USR1",
            *_newest_checkpoint_lines(job),
            "",
            *_start_lines(job, options),
            "running=$!",
            "# The signal interrupts `wait`, which then returns its number + 128: wait again.",
            "signalled=$((128 + $(kill -l USR1)))",
            'while wait "$running"; code=$?; [ "$code" -eq "$signalled" ]; do :; done',
            *_requeue_lines(job),
            'exit "$code"',
            "",
        ]
    )


def _newest_checkpoint_lines(job: ClusterJob) -> Iterator[str]:
    if job.out is not None:
        checkpoints = shlex.quote(f"{job.out}/checkpoints")
        yield f"saved() {{ ls -t {checkpoints}/*/complete.json 2>/dev/null | head -n 1; }}"
        yield "before=$(saved)"


def _requeue_lines(job: ClusterJob) -> Iterator[str]:
    """Yield the lines of the script that requeue the job after its time limit has stopped it.

    A job that saves nothing twice in a row is not requeued. The first time, it may have spent its
    time tokenising data, which are then cached.
    """
    if job.out is None:
        yield '[ -z "$stopping" ] || [ "$code" = 0 ] || scontrol requeue "$SLURM_JOB_ID"'
        return
    yield f'idle={job.name}-"$SLURM_JOB_ID".idle'
    yield 'if [ -n "$stopping" ] && [ "$code" != 0 ]; then'
    yield '    if [ "$(saved)" != "$before" ]; then'
    yield '        rm -f "$idle"'
    yield '    elif [ -e "$idle" ]; then'
    yield f"        echo '{job.name}: nothing was saved within the time limit, twice. It is' >&2"
    yield "        echo 'not requeued: allow more time (--time), or save more often.' >&2"
    yield '        rm -f "$idle"'
    yield '        exit "$code"'
    yield "    else"
    yield '        touch "$idle"'
    yield "    fi"
    yield '    scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"


def _directives(job: ClusterJob, options: SlurmOptions) -> Iterator[str]:
    tasks = 1 if options.starter == "torchrun" else job.ranks_per_node
    yield f"job-name={job.name}"
    yield f"nodes={job.nodes}"
    yield f"ntasks-per-node={tasks}"
    if job.gpus_per_node:
        yield f"gpus-per-node={job.gpus_per_node}"
    cpus = _cpus_per_task(job, options)
    if cpus is not None:
        yield f"cpus-per-task={cpus}"
    if options.time is not None:
        yield f"time={options.time}"
    yield f"chdir={shlex.quote(str(job.folder))}"
    yield f"output={job.name}-%j.log"
    yield "open-mode=append"
    yield "requeue"
    yield f"signal=B:USR1@{options.save_s}"
    for one in options.directives:
        name, equals, value = one.partition("=")
        yield f"{name}={shlex.quote(value)}" if equals else name


def _cpus_per_task(job: ClusterJob, options: SlurmOptions) -> int | None:
    if options.starter == "torchrun":
        return (job.cpus_per_rank or 1) * job.ranks_per_node
    return job.cpus_per_rank


def _start_lines(job: ClusterJob, options: SlurmOptions) -> Iterator[str]:
    srun = ["srun", "--distribution=block", "--kill-on-bad-exit=0", f"--wait={_WAIT_S}", "--label"]
    cpus = _cpus_per_task(job, options)
    if cpus is not None:  # since 22.05, srun no longer inherits it from sbatch
        srun.append(f"--cpus-per-task={cpus}")
    command = shlex.join(job.command)
    if options.starter == "srun":
        yield f"{' '.join(srun)} outpace {command} &"
        return
    yield 'head=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}'
    yield f"{' '.join(srun)} torchrun \\"
    yield f'    --nnodes="$SLURM_NNODES" --nproc-per-node={job.ranks_per_node} \\'
    yield '    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \\'
    yield '    --rdzv-endpoint="$head:$((15000 + SLURM_JOB_ID % 15000))" \\'
    yield f"    --shutdown-timeout={options.save_s} -m outpace {command} &"
