"""A training job on one rank, built from its settings and run to its end."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from outpace.catalog.accelerators import find_accelerator
from outpace.data.tokenizer import Tokenizer
from outpace.interop.models import names_code
from outpace.interop.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, fingerprint_config
from outpace.interop.user_file import code_fingerprint
from outpace.interop.weight_files import fingerprint_files, weight_files
from outpace.jobs.defaults import (
    note_passes,
    resolve_device,
    resolve_lr,
    resolve_out,
    resolve_plan,
    resolve_steps,
    takes_cuda_graphs,
    with_axes_that_fit,
    with_powersgd_start,
)
from outpace.jobs.inputs.inputs import TrainingInputs, gather
from outpace.jobs.inputs.tasks import check_task
from outpace.jobs.memory.fit import MemoryFit, limit_device
from outpace.jobs.memory.trace_worker import Tracer
from outpace.jobs.ranks.hang_watchdog import RankActivity, hang_watchdog
from outpace.jobs.ranks.oom_guard import End, Guard, readings
from outpace.jobs.ranks.process_groups import Fact, Groups, process_groups, resolve_backend
from outpace.jobs.train import auto_micro_batch
from outpace.jobs.train.auto_micro_batch import TRIAL_STEPS
from outpace.jobs.train.auto_micro_batch_on_gpu import can_try, device_steps, find_on_device
from outpace.jobs.train.build import PreparedRun, assemble
from outpace.jobs.train.context import Job, RunContext
from outpace.jobs.train.oom_message import OomMessage
from outpace.jobs.train.run_record import with_earlier_precision
from outpace.jobs.train.sample_check import check_samples
from outpace.launch.exit_deadline import ExitDeadline
from outpace.nn.compilation import compiler_cache, find_disabling_variable
from outpace.nn.fp8 import require_fp8
from outpace.nn.mixed_precision import fp32_matmuls
from outpace.nn.torch_versions import VERSION
from outpace.parallel import why_not
from outpace.parallel.offload import require
from outpace.probing.hardware.machine import identify, usable_cores
from outpace.records.cache_folders import cache_folder
from outpace.records.errors import BadInputError
from outpace.records.hang_report import HangReport
from outpace.records.machine import Machine
from outpace.records.measurement import Measurement
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.records.version import __version__
from outpace.training.callbacks import Callback, notify
from outpace.training.cuda_allocator import grow_segments
from outpace.training.guards import StopSignal, deterministic_kernels
from outpace.training.heap import keep_freed
from outpace.training.loggers import require_loggers
from outpace.training.run_dir import STANDSTILL_FILE, RunDir
from outpace.training.threads import set_threads

if TYPE_CHECKING:
    from outpace.jobs.train.memory_report import MemoryReporter


def train(settings: TrainSettings, context: RunContext) -> Measurement:
    """Train with `settings` on this rank; every rank of a job calls this.

    Raises BadInputError, DivergedError, InterruptedRunError, OutOfMemoryError, RankLostError.
    """
    with prepare_run(settings, context) as ready:
        return ready.run()


def try_steps(settings: TrainSettings, *, ranks: Ranks, end: End) -> None:
    """Run a few steps and save, as `train` would, in a separate folder. Raises the same errors."""
    with prepare_run(settings, RunContext(ranks, end=end, foresee=False)) as ready:
        assert settings.steps == TRIAL_STEPS  # it saves after the last of them
        ready.loop.run()


@contextmanager
def prepare_run(settings: TrainSettings, context: RunContext) -> Iterator[PreparedRun]:
    """Prepare a run up to its first step, like `train`, for callers that drive the loop."""
    began_s = time.perf_counter()
    ranks, ahead = context.ranks, context.page_prefaulter
    heard = list(context.callbacks) if ranks.rank == 0 else []
    with ExitStack() as stack:
        on_hint = partial(notify, heard, "on_hint")
        deadline = stack.enter_context(ExitDeadline(context.end))
        stack.callback(lambda: notify(heard, "close"))
        if ahead is not None:
            stack.callback(ahead.end)
        stop = stack.enter_context(StopSignal(on_hint))
        settings = with_earlier_precision(settings)
        settings = with_axes_that_fit(settings, ranks, context.origins, on_hint)
        if settings.device in ("auto", "cuda"):
            grow_segments(os.environ)  # before the first tensor on the device
        device = resolve_device(settings, ranks)
        stack.enter_context(deterministic_kernels(settings.deterministic, device, os.environ))
        backend = resolve_backend(settings.backend, device)
        threads = set_threads(settings.threads, usable_cores(), ranks.local_world_size, os.environ)
        machine = identify(find_accelerator)
        live = context.model is not None
        plan = resolve_plan(settings, ranks, device, machine, custom_model=live)
        plan = _without_disabled_compilation(settings, plan, heard)
        _keep_freed_memory(settings, plan, device)
        guard = Guard(ranks, device, context.end)
        stack.callback(guard.close)
        deadline.tidy = partial(_call_tidy, guard)
        stack.enter_context(fp32_matmuls(plan.precision, device))
        _require_possible(settings, plan, context, device, backend)
        cache_dir = cache_folder(settings.cache_dir, os.environ)
        inputs = _prepare_inputs(settings, context, plan, device, cache_dir, heard)
        lr = resolve_lr(settings, inputs.starts_from_stored(settings))
        settings = settings.model_copy(update={"lr": lr})
        total_steps = _resolve_total_steps(settings, inputs, heard)
        plan = with_powersgd_start(plan, settings, total_steps)
        timeout_s = settings.comm_timeout_s
        groups = stack.enter_context(process_groups(ranks, device, timeout_s, backend))
        doing = RankActivity("the preparation", on_surplus=on_hint)
        with hang_watchdog(groups, doing, timeout_s, deadline, stop), guard:
            guard.watch(readings(settings.memory_limit, device, ranks), groups.store)
            limit_device(settings.memory_limit, device)
            groups.require_one_job()
            _require_same_training(groups, settings, device, plan, total_steps, inputs)
            tracer = Tracer()
            stack.callback(tracer.close)
            guard.relieve = tracer.give_up
            fitting = _make_memory_fit(settings, context, device, machine, inputs, tracer)
            plan = groups.run_on_rank_0(lambda: fitting.with_budget(plan))
            plan = _decide_compile(groups, settings, plan, fitting, total_steps, inputs, heard)
            stack.enter_context(compiler_cache(os.environ, cache_dir, plan.compile))
            if settings.micro_batch == "auto":
                plan = _find_micro_batch(settings, plan, context, groups, fitting, inputs, heard)
                settings = settings.model_copy(update={"micro_batch": plan.micro_batch})
            _compare_samples(groups, settings, inputs, heard, doing)
            run_dir = RunDir(groups.run_on_rank_0(lambda: resolve_out(settings, inputs.name)))
            doing.on_hang = partial(_save_hang_report, run_dir, context.explain)
            job = Job(
                settings, context, groups, device, machine, plan, inputs, total_steps, run_dir,
                heard, doing,
            )  # fmt: skip
            answer = OomMessage(job, fitting)
            guard.answer = answer.format
            groups.run_on_rank_0(answer.check_fit)
            reporter = _make_reporter(job, fitting, tracer, stack) if settings.memory else None
            tracer.close()  # frees memory for training
            ready = assemble(job, threads, stop, stack, guard, answer, reporter, began_s)
            if ahead is not None:
                ahead.end()
            yield ready


def _prepare_inputs(
    settings: TrainSettings, context: RunContext, plan: Plan, device: torch.device,
    cache_dir: Path, callbacks: Sequence[Callback],
) -> TrainingInputs:  # fmt: skip
    notify(callbacks, "on_stage", "preparing data")
    return gather(
        settings, context.model, cache_dir, usable_cores(), callbacks, plan, device.type,
        context.origins,
    )  # fmt: skip


def _keep_freed_memory(settings: TrainSettings, plan: Plan, device: torch.device) -> None:
    if device.type == "cpu" and settings.memory_limit is None and not plan.empty_cache:
        keep_freed(os.environ)


def _compare_samples(
    groups: Groups, settings: TrainSettings, inputs: TrainingInputs, callbacks: Sequence[Callback],
    activity: RankActivity,
) -> None:  # fmt: skip
    """Compare some samples of the ranks' data sets (`check_samples`), which may take long.

    All ranks must call this.
    """
    activity.begin("comparing samples of the ranks' data sets")
    check_samples(groups, settings, inputs.custom_model, callbacks)
    activity.begin("the preparation")


def _make_memory_fit(
    settings: TrainSettings, context: RunContext, device: torch.device, machine: Machine,
    inputs: TrainingInputs, tracer: Tracer,
) -> MemoryFit:  # fmt: skip
    """Create the run's prediction of whether it fits in memory.

    Memory that was touched in advance (prefaulted) does not count as used. Afterwards, it is handed
    over to training.
    """
    ahead = context.page_prefaulter
    # A trace assumes a head over the vocabulary.
    account = tracer if context.foresee and inputs.is_transformer else None
    with nullcontext(0) if ahead is None else ahead.pause() as ahead_bytes:
        fitting = MemoryFit(
            settings, context.ranks, device, machine, inputs.spec, inputs.seq_len, account,
            ahead_bytes,
        )  # fmt: skip
    if ahead is not None:
        ahead.hand_over()
    return fitting


def _find_micro_batch(
    settings: TrainSettings, plan: Plan, context: RunContext, groups: Groups, fitting: MemoryFit,
    inputs: TrainingInputs, callbacks: Sequence[Callback],
) -> Plan:  # fmt: skip
    device, spec, seq_len = fitting.device, inputs.spec, inputs.seq_len
    if can_try(plan, settings, device, inputs.is_transformer):
        assert spec is not None and seq_len is not None
        take = device_steps(
            spec, seq_len, device, groups.control, fitting.limit.bytes, settings.memory_limit
        )
        return find_on_device(plan, settings, take, callbacks)
    return auto_micro_batch.find_micro_batch(
        plan, settings, fitting, groups, context.attempt, callbacks
    )


def _make_reporter(
    job: Job, fitting: MemoryFit, tracer: Tracer, stack: ExitStack
) -> "MemoryReporter":
    """Trace the memory of a step, to compare it with the run's measured memory."""
    # Loaded on demand: a trace is 30 MiB of code.
    from outpace.jobs.train.memory_report import MemoryReporter

    notify(job.callbacks, "on_stage", "tracing memory")
    return MemoryReporter(job, fitting, tracer, stack)


def _call_tidy(guard: Guard, message: str) -> None:
    """Call the guard's present `tidy`; the job replaces it when it creates more objects."""
    guard.tidy(message)


def _without_disabled_compilation(
    settings: TrainSettings, plan: Plan, callbacks: Sequence[Callback]
) -> Plan:
    """Return the plan without compilation if the environment disables torch.compile.

    Raises BadInputError if compilation was requested.
    """
    variable = find_disabling_variable(os.environ) if plan.compile else None
    if variable is None:
        return plan
    if settings.compile:
        raise BadInputError(
            f"--compile: the environment has {variable}, which turns torch.compile off. Unset this "
            "variable, or train with --no-compile."
        )
    notify(callbacks, "on_hint", f"compile: no, since the environment has {variable}")
    return plan.model_copy(update={"compile": False})


def _decide_compile(
    groups: Groups, settings: TrainSettings, plan: Plan, fitting: MemoryFit, total_steps: int,
    inputs: TrainingInputs, callbacks: Sequence[Callback],
) -> Plan:  # fmt: skip
    """Return the plan, compiled as requested, or by default if that pays off within the run."""
    if settings.compile is not None or not plan.compile:
        return plan
    # The planner is loaded only if needed.
    from outpace.jobs.train.compile_decision import decide

    layers = None if inputs.spec is None else inputs.spec.layers
    device, machine = fitting.device, fitting.machine
    decision = groups.run_on_rank_0(
        lambda: decide(settings, plan, device, machine, groups.ranks, total_steps, layers)
    )
    if decision.sentence is not None:
        notify(callbacks, "on_hint", decision.sentence)
    return plan.model_copy(update={"compile": decision.compile})


def _save_hang_report(
    run_dir: RunDir, explain: Callable[[Path], None] | None, report: HangReport
) -> None:
    path = run_dir.path / STANDSTILL_FILE
    report.save(path)
    if explain is not None:
        explain(path)


def _resolve_total_steps(
    settings: TrainSettings, inputs: TrainingInputs, callbacks: Sequence[Callback]
) -> int:
    samples = len(inputs.train_data)
    if note := note_passes(settings.global_batch, samples):
        notify(callbacks, "on_hint", note)
    return resolve_steps(settings, samples, inputs.seq_len)


def _require_possible(
    settings: TrainSettings, plan: Plan, context: RunContext, device: torch.device, backend: str
) -> None:
    """Raise BadInputError for impossible requests before preparing data, which may take long."""
    live = context.model is not None
    if settings.micro_batch == "auto" and (live or backend == "mpi"):
        raise BadInputError(
            "--micro-batch auto runs trials in separate processes, which is not possible "
            "with a live model or MPI. Pass a number, refer to the model by its file, or use "
            "gloo or nccl."
        )
    check_task(settings, plan, context.origins)
    takes_cuda_graphs(settings, plan, device, live or names_code(settings.model))
    require(plan, device)
    if plan.precision == "fp8":
        require_fp8(device)
    lacking = why_not(plan.strategy, context.ranks, device)
    if lacking is not None:
        raise BadInputError(f"--strategy {plan.strategy}: {lacking}.")
    require_loggers(settings.log)
    if settings.out is not None and not settings.resume:
        RunDir(settings.out).require_free()


# Settings that may differ between ranks: those that belong to one host or rank, and paths whose
# contents are compared. The device, the number of steps and the plan are compared as resolved.
_RANK_LOCAL_SETTINGS = frozenset(Plan.model_fields) | {
    "model", "tokenizer", "data", "eval_data", "cache_dir", "offload_dir", "out", "plan", "log",
    "threads", "workers", "pin_memory", "nproc", "memory_limit", "comm_timeout_s", "backend",
    "device", "resume", "steps", "tokens", "epochs", "expect_step_time_s", "profile",
    "memory_snapshot",
}  # fmt: skip
_SAMPLE_BYTES = 16 << 10  # from each of three places in a file: every host reads them


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _require_same_training(
    groups: Groups, settings: TrainSettings, device: torch.device, plan: Plan, total_steps: int,
    inputs: TrainingInputs,
) -> None:  # fmt: skip
    """Raise BadInputError if ranks would train differently, before any rank waits for another."""
    planned = {
        _flag(name) if name in TrainSettings.model_fields else f"plan's {name}": value
        for name, value in plan
    }
    asked = {_flag(name): value for name, value in settings if name not in _RANK_LOCAL_SETTINGS}
    has_code = inputs.custom_model is not None
    spec, tokenizer = inputs.spec, inputs.tokenizer
    start = (
        "Start all ranks with the same options. If they are the same, devices differ, or another "
        "job uses the same MASTER_PORT."
    )
    data = "Give all hosts the same files, by a copy or on a shared file system"
    install = "Install one version on all hosts."
    evaluated = None if inputs.eval_data is None else len(inputs.eval_data)
    facts = {
        install: {"version of outpace": __version__, "version of torch": VERSION},
        "Use the same kind of device on all hosts.": {"device": device.type},
        start: {
            "--resume": settings.resume,
            **asked,
            **planned,
            # These decide which collectives follow, even if they resolve to the same plan.
            "--micro-batch": "auto" if settings.micro_batch == "auto" else plan.micro_batch,
            "--compile": settings.compile,
            "decision to compile": plan.compile,
            "number of steps": total_steps,
        },
        f"Give all hosts the same model, as {settings.model}.": {
            "model": None if spec is None else spec.model_dump_json()
        },
        f"Copy {settings.model.rpartition(':')[0]} from rank 0's host. If it is the same file, "
        "install one version of Python: 3.11 reads code differently from later versions.": {
            "model code": code_fingerprint(settings.model) if has_code else None
        },
        f"{data}: {settings.tokenizer or 'the tokenizer'}.": {
            "tokenizer": tokenizer.fingerprint if tokenizer else None,
            "chat template": _fingerprint_template(settings, tokenizer),
        },
        # A user's data sets have no fingerprint, and their length determines the order of samples;
        # `check_samples` compares some of their contents.
        f"{data}: {', '.join(settings.data)}.": {
            "training data": inputs.train_fingerprint,
            "number of training samples": len(inputs.train_data),
        },
        f"{data}: {', '.join(settings.eval_data or settings.data)} (validation data).": {
            "validation data": inputs.eval_fingerprint,
            "number of validation samples": evaluated,
        },
    }
    groups.require_same(
        {
            what: Fact(value, remedy)
            for remedy, values in facts.items()
            for what, value in values.items()
        }
    )
    if groups.ranks.world_size > 1 and not settings.resume:  # resuming reads a checkpoint instead
        groups.require_same(_weights_facts(groups.ranks, settings, inputs))


def _fingerprint_template(settings: TrainSettings, tokenizer: Tokenizer | None) -> str | None:
    if settings.task != "chat" or tokenizer is None:
        return None
    return xxhash.xxh3_64_hexdigest((tokenizer.chat_template or "").encode())


def _weights_facts(
    ranks: Ranks, settings: TrainSettings, inputs: TrainingInputs
) -> dict[str, Fact]:
    """Return sampled digests of the weights from which the run starts, to compare between hosts.

    Returns {} except on the first rank of each host.
    """
    if ranks.rank != 0 and ranks.local_rank != 0:
        return {}
    opened, content, folder = inputs.opened, None, settings.model
    scaled: str | None = None
    if opened is not None and opened.weights is not None and inputs.starts_from_stored(settings):
        files = weight_files(opened.weights)
        folder = str(opened.weights)
        if opened.adapter is not None:
            # If it is missing, the reader reports that.
            files += [path for path in [opened.adapter / ADAPTER_WEIGHTS] if path.is_file()]
            folder += f" and {opened.adapter}"
            scaled = fingerprint_config(opened.adapter)
        content = fingerprint_files(files, _SAMPLE_BYTES)
    remedy = f"Give all hosts the files of rank 0's host: replace {folder} with a copy of them."
    return {
        f"{ADAPTER_CONFIG} (without the base's name)": Fact(scaled, remedy),
        "content of the weights": Fact(content, remedy),
    }
