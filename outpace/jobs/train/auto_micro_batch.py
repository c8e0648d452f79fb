"""`--micro-batch auto`: find the largest micro-batch that fits, by prediction and trials.

Without `auto`, `jobs.micro_batch` decides.

A trial is a separate job with the same number of ranks: each rank starts a child process, and the
children run two steps together and save. When one of them runs out of memory, all end (see
`oom_guard`); if one is killed, the others fail. The ranks of this job wait only for their children,
never for each other's steps, and agree on the outcome over a separate group. So no rank ever waits
in a collective that another has left.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outpace.jobs.memory.fit import MemoryFit
from outpace.jobs.ranks.process_groups import Groups
from outpace.launch import slurm_env
from outpace.launch.launcher_env import free_port
from outpace.launch.network_interfaces import LOOPBACK
from outpace.launch.parent_watch import PARENT
from outpace.parallel.rank_objects import gather_objects
from outpace.planner.fit.cost import Predict
from outpace.records.errors import OUT_OF_MEMORY_CODES, BadInputError, OutOfMemoryError
from outpace.records.interpreter import PYTHON
from outpace.records.plan import POWERSGD_LEAST_START, Plan
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback, notify

# The second step is the first to start with optimizer state.
TRIAL_STEPS = 2
# A long run needs slightly more than a short one, because of fragmentation.
OF_LIMIT = 0.95

# Runs a trial with these settings in a child process, with the rendezvous at this port of rank 0's
# host; returns the child's exit code and error message.
Try = Callable[[TrainSettings, int], tuple[int, str]]


def sizes(plan: Plan) -> list[int]:
    """Return micro-batch sizes that keep the global batch, largest first.

    They are the divisors of the plan's micro-batch.
    """
    return [n for n in range(plan.micro_batch, 0, -1) if plan.micro_batch % n == 0]


def with_size(plan: Plan, size: int) -> Plan:
    """Return the plan with another micro-batch; accumulation keeps the global batch."""
    return plan.model_copy(update={"micro_batch": size})


def predict_largest(plan: Plan, predict: Predict | None, limit_bytes: int) -> int:
    """Return the largest micro-batch size that is predicted to need at most `limit_bytes`.

    Returns the smallest size if none is, and the largest if there is no prediction.
    """
    known = sizes(plan)
    if predict is None:
        return known[0]
    low, high = 0, len(known) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            fits = predict(with_size(plan, known[middle])).peak_memory_bytes <= limit_bytes
        except BadInputError:
            return known[0]  # models that cannot be traced are tried
        low, high = (low, middle) if fits else (middle + 1, high)
    return known[low]


def find_micro_batch(
    plan: Plan,
    settings: TrainSettings,
    fitting: MemoryFit,
    groups: Groups,
    attempt: Try | None,
    callbacks: Sequence[Callback],
) -> Plan:
    """Return the plan with the largest micro-batch that fits, the same on all ranks.

    Raises OutOfMemoryError if one sample does not fit, and BadInputError if a trial fails for
    another reason.
    """
    notify(callbacks, "on_stage", "predicting the largest micro-batch")
    limit = fitting.limit.bytes
    size = groups.run_on_rank_0(lambda: predict_largest(plan, fitting.predict, limit))
    if attempt is None:
        return with_size(plan, size)
    for size in [known for known in sizes(plan) if known <= size]:
        notify(callbacks, "on_stage", f"trying micro-batch {size}")
        port = groups.run_on_rank_0(free_port)
        code, words = attempt(_trial_settings(settings, with_size(plan, size)), port)
        outcomes = gather_objects((code, words), groups.patient)
        codes = [code for code, _ in outcomes]
        if not any(codes):
            return with_size(plan, size)
        if not any(code in OUT_OF_MEMORY_CODES for code in codes):
            said = next((words for _, words in outcomes if words), f"exit codes {codes}")
            raise BadInputError(f"--micro-batch auto: the trial with {size} failed: {said}")
    raise OutOfMemoryError(
        "out of memory: not even a micro-batch of 1 sample fits. Use --checkpointing full, a "
        "smaller --seq-len or model, or --strategy zero3 on more processes."
    )


def _trial_settings(settings: TrainSettings, plan: Plan) -> TrainSettings:
    """Return settings of a short run that needs as much memory as a long one."""
    limit = settings.memory_limit
    passes = min(2, plan.accumulation(settings.global_batch))
    powersgd = plan.compress_gradients == "powersgd" and plan.world_size > 1
    return settings.model_copy(
        update={
            "micro_batch": plan.micro_batch,
            "memory_limit": None if limit is None else round(OF_LIMIT * limit),
            "pp_microbatches": plan.pp_microbatches if plan.pp_microbatches > 1 else None,
            "global_batch": plan.samples_per_pass * plan.data_parallel * passes,
            "steps": POWERSGD_LEAST_START + 1 if powersgd else TRIAL_STEPS,
            "tokens": None,
            "epochs": None,
            "warmup": None,
            "powersgd_start": POWERSGD_LEAST_START if powersgd else None,
            "padding": None if settings.task == "pretrain" else "fixed",  # the longest samples
            "eval_every": 0,
            "eval_batches": 1,
            "save_every": 0,
            "resume": False,
            "log": (),
            "profile": False,
            "memory": False,
            "memory_snapshot": False,
            "nproc": None,
        }
    )


def trial_runner(environ: Mapping[str, str]) -> Try:
    """Return a function that runs trials in child processes with the environment `environ`."""
    kept = {name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC_")}
    of_srun = slurm_env.variables(environ).get("MASTER_ADDR")

    def attempt(settings: TrainSettings, port: int) -> tuple[int, str]:
        # On the run's disk, since the system's temporary files may be in memory.
        beside = settings.offload_dir or (settings.out or Path("runs") / "trial").parent
        beside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".trial-", dir=beside) as folder:
            own = settings.model_copy(update={"out": Path(folder) / "run"})
            document = {
                "settings": own.model_dump(mode="json"),
                "origins": dict.fromkeys(TrainSettings.model_fields, "default"),
                "progress": False,
                "trial": True,
            }
            handed_over = Path(folder) / "settings.json"
            handed_over.write_text(json.dumps(document), encoding="utf-8")
            done = subprocess.run(
                [*PYTHON, "-m", "outpace", "train", "--json", "--handed-over", handed_over],
                env={
                    "MASTER_ADDR": of_srun or LOOPBACK,
                    **kept,
                    "MASTER_PORT": str(port),
                    PARENT: str(os.getpid()),
                },
                capture_output=True,
                text=True,
                check=False,
            )
        return done.returncode, _read_error(done.stdout)

    return attempt


def _read_error(output: str) -> str:
    try:
        return str(json.loads(output)["error"])
    except (ValueError, KeyError, TypeError):
        return ""
