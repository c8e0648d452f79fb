"""The live objects of a job on one rank: model, optimizer, checkpoints, data and loop."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outpace.data.loader import Loader
from outpace.data.padded_batches import PaddedDataset
from outpace.data.workers import worker_troubles
from outpace.jobs.defaults import peak_flops_per_s
from outpace.jobs.inputs.model import build_objective, weights_of
from outpace.jobs.ranks.oom_guard import Guard
from outpace.jobs.ranks.placement import placement_hints
from outpace.jobs.ranks.shared_filesystem import require_shared
from outpace.jobs.train.comm_stats import CommStats
from outpace.jobs.train.context import Job
from outpace.jobs.train.evaluation import (
    evaluate_before,
    evaluate_held_out,
    evaluation_stage,
    make_loader,
    warn_if_not_finite,
)
from outpace.jobs.train.export import finish
from outpace.jobs.train.model_layout import lay_out, make_first_check
from outpace.jobs.train.oom_message import OomMessage
from outpace.jobs.train.restore import continue_run, restore
from outpace.jobs.train.run_record import claim, run_info, run_record
from outpace.jobs.train.step_time_check import StepTimeMonitor
from outpace.jobs.train.stragglers import Stragglers
from outpace.jobs.train.task_costs import step_costs
from outpace.jobs.train.utilisation import Recording
from outpace.nn.compilation import compile_time_s
from outpace.nn.kernels import without_faulty_kernels
from outpace.nn.lora import parameter_counts
from outpace.nn.mixed_precision import MixedPrecision, keeps_casts, lower_weights, make_mixed
from outpace.nn.scratch_files import Scratch
from outpace.nn.transformer import use_dense_masks
from outpace.optim.build import leave_compiler_out, make_optimizer
from outpace.parallel import Layout
from outpace.parallel.batchnorm import require_run_once
from outpace.parallel.deferred_init import fill, fills_later, parts_of
from outpace.parallel.offload import parameter_device, place_optimizer
from outpace.parallel.tensors import make_equal
from outpace.planner.model.flops import step_flops
from outpace.records.errors import BadInputError, OutpaceError
from outpace.records.measurement import Evaluation, Measurement
from outpace.records.run import RunRecord, resume_command
from outpace.records.units import show_seconds
from outpace.training.accounting import Costs, Ledger
from outpace.training.callbacks import TRAINING, notify
from outpace.training.checkpoint import (
    Checkpointer,
    Progress,
    clear_partial,
    step_of,
    whole_checkpoints,
)
from outpace.training.guards import COLLECT_EVERY, StopSignal
from outpace.training.loggers import LoggerContext, make_loggers
from outpace.training.loop import Loop
from outpace.training.profile import memory_history, profiler
from outpace.training.run_dir import MetricsWriter
from outpace.training.step import Stepper

if TYPE_CHECKING:
    from outpace.jobs.train.memory_report import MemoryReporter


@dataclass(frozen=True)
class PreparedRun:
    """A training job that is ready for its first step."""

    job: Job
    loop: Loop
    parameters: int
    initial: Evaluation | None
    measure: Callable[[int], Evaluation | None]
    reporter: "MemoryReporter | None"
    recording: Recording
    comm_stats: CommStats | None
    stragglers: Stragglers
    began_s: float
    compiled_s: float  # spent in the compiler earlier in this process

    def run(self) -> Measurement:
        """Train to the end and return the measurement."""
        notify(self.job.callbacks, "on_stage", TRAINING)
        wanted, rank = self.job.settings.memory_snapshot, self.job.ranks.rank
        self.recording.start()
        began_s = time.perf_counter()
        seen: dict[str, Any] = {}
        try:
            with (
                worker_troubles(self.job.settings.workers, elsewhere=True),
                memory_history(wanted, self.job.run_dir.path, rank),
            ):
                for step in self.loop.iterate():
                    if not seen:
                        seen |= self._first_step_times()
                    self.stragglers.after_step(self.loop.stepper.heard)
                    if self.comm_stats is not None:
                        self.comm_stats.after_step(step)
            train_s = time.perf_counter() - began_s
        finally:
            self.recording.close()
        seen["utilisation"] = self.recording.averages()
        if self.comm_stats is not None:
            seen |= self.comm_stats.figures()
        if self.reporter is not None:
            self.reporter.finish()
        # From here on, a signal to one rank may end all ranks: by now, each has saved and can
        # report that.
        self.loop.stop.message = self._interruption_message
        self.job.groups.wait_for_all()
        return self.loop.stop.unless_ended(partial(self._conclude, train_s, seen))

    def _conclude(self, train_s: float, seen: Mapping[str, Any]) -> Measurement:
        """Evaluate the trained model, export it, and return the run's measurement.

        All ranks must call this.
        """
        notify(self.job.callbacks, "on_stage", evaluation_stage(self.job, "final"))
        self.job.doing.begin("the final evaluation")
        final = self.measure(self.job.total_steps)
        return finish(self.job, self.loop, self.parameters, self.initial, final, train_s, seen)

    @property
    def _interruption_message(self) -> str:
        if self.job.settings.measure_only:
            return "interrupted after the last step; with --measure-only nothing was saved"
        return (
            f"interrupted, saved after step {self.job.total_steps}, the last one; the final "
            "loss was not measured, or the model not written. Resume with: "
            f"{resume_command(self.job.run_dir.path)}"
        )

    def _first_step_times(self) -> dict[str, Any]:
        first_step_s = time.perf_counter() - self.began_s
        compile_s = compile_time_s() - self.compiled_s
        if self.job.plan.compile:
            notify(
                self.job.callbacks,
                "on_hint",
                f"the first step was done after {show_seconds(first_step_s)}, including "
                f"{show_seconds(compile_s)} of compilation",
            )
        return {"first_step_s": first_step_s, "compile_s": compile_s}


def _choose_kernels(job: Job, objective: nn.Module, stack: ExitStack) -> None:
    """Exclude attention kernels that cannot be used in this job.

    With --no-compile, these are the kernels that must be compiled; for a custom model on CUDA, the
    kernels that are faulty in this version of cuDNN.
    """
    if job.settings.compile is False:
        use_dense_masks(objective)
    if job.inputs.custom_model is not None and job.device.type == "cuda":
        stack.enter_context(without_faulty_kernels(torch.backends.cudnn.version()))


def _build_objective(job: Job, stack: ExitStack) -> tuple[Any, MixedPrecision]:
    """Build the model with its loss; return it with the plan's mixed precision.

    All ranks must call this.
    """
    settings, plan, device = job.settings, job.plan, job.device
    own = job.inputs.custom_model is not None
    mixed = make_mixed(
        plan.precision, device, keeps_casts(settings.autocast_cache, own), own, plan.fully_shards
    )
    objective = build_objective(job.inputs, settings, plan, mixed.dtype, device)
    _choose_kernels(job, objective, stack)
    if own and mixed.keeps_masters and plan.world_size > 1:
        make_equal(objective)  # otherwise ranks would start from different master weights
    return objective, mixed


def _begin_record(
    job: Job, threads: int, parameters: int, stack: ExitStack, guard: Guard
) -> RunRecord:
    """Claim the run's folder and start its record and logs. Collective.

    A run that fails during its first step leaves no files behind.
    """
    record = run_record(job, threads, parameters)
    record = job.groups.run_on_rank_0(lambda: claim(job, record, stack))
    stack.push(lambda kind, *_: _discard_unbegun(job) if kind is not None else None)
    guard.tidy = partial(_clean_up, job)
    if not job.settings.measure_only:
        require_shared(job.groups, job.run_dir.path)
    if not job.settings.resume:
        _open_logs(job, record)
    return record


def _fill_weights(job: Job, layout: Layout, mixed: MixedPrecision) -> dict[str, torch.Tensor]:
    """Initialize parameters laid out on the meta device; return the values to keep in fp32."""
    return fill(
        layout,
        parameter_device(job.plan, job.device),
        weights_of(job.inputs, job.settings, job.plan, job.device),
        keeps_wide=mixed.keeps_masters,
    )


@dataclass(frozen=True)
class _StepParts:
    """The live objects of a step; `start_step` is the step from which a run resumes, or 0."""

    record: RunRecord
    layout: Layout
    optimizer: torch.optim.Optimizer
    stepper: Stepper
    checkpointer: Checkpointer
    start_step: int


def assemble(
    job: Job,
    threads: int,
    stop: StopSignal,
    stack: ExitStack,
    guard: Guard,
    answer: OomMessage,
    reporter: "MemoryReporter | None",
    began_s: float,
) -> PreparedRun:
    """Build everything that the first step needs. Call this on every rank.

    `began_s`: when the job started.
    """
    settings, plan = job.settings, job.plan
    compiled_s = compile_time_s()
    notify(job.callbacks, "on_stage", "building the model")
    objective, mixed = _build_objective(job, stack)
    whole_values = lower_weights(objective, mixed)
    parameters, trained = parameter_counts(objective.model)
    record = _begin_record(job, threads, parameters, stack, guard)
    require_run_once(objective.model, plan.recomputes)
    scratch = Scratch(settings.offload_dir or job.run_dir.path)
    say = partial(notify, job.callbacks, "on_hint")
    layout, first = lay_out(job, objective, scratch, say)
    wide_values = parts_of(layout, whole_values)
    del whole_values
    if job.inputs.is_transformer and fills_later(plan):
        wide_values = _fill_weights(job, layout, mixed)
    optimizer = _build_optimizer(job, layout, scratch, mixed, wide_values)
    checkpointer = _build_checkpointer(job, mixed)
    stack.callback(checkpointer.close)
    progress = restore(job, checkpointer, *layout.checkpoint_state(optimizer), mixed)
    start_step = progress.step if progress else 0
    recording = Recording(job, start_step)
    guard.tidy = partial(_clean_up, job, recording=recording)
    guard.list_holders = partial(answer.anatomy, layout, optimizer)
    layout.resume_from(start_step)
    job.groups.run_on_rank_0(lambda: continue_run(job, record, start_step))
    if settings.resume:
        _open_logs(job, record, start_step)
    stack.push(lambda _, error, __: None if error is None else _record_end(job, _reason_of(error)))
    stepper = _build_stepper(job, layout, optimizer, mixed, checkpointer.before_change)
    loader = make_loader(job, job.inputs.train_data, start_step, job.total_steps)
    stack.callback(loader.close)
    hint_once = cache(say)

    def measure(step: int, heeds_stop: bool = False) -> Evaluation | None:
        found = evaluate_held_out(job, layout, mixed, step, stop if heeds_stop else None)
        stepper.free_cache()
        warn_if_not_finite(hint_once, found)
        return found

    placement = placement_hints(job.groups)
    notify(job.callbacks, "on_start", run_info(job, record, trained, start_step, placement))
    initial = stop.unless_ended(partial(evaluate_before, job, start_step, measure, layout))
    parts = _StepParts(record, layout, optimizer, stepper, checkpointer, start_step)
    heedful, ledger = partial(measure, heeds_stop=True), _build_ledger(job, progress, trained)
    loop = _make_loop(job, parts, loader, ledger, stop, heedful)
    loop.check_first_batch = make_first_check(first, layout, stepper, job.device, start_step)
    comm_stats = _watch_steps(job, parts, loop, reporter)
    stragglers = Stragglers(job, recording)
    return PreparedRun(
        job, loop, parameters, initial, measure, reporter, recording, comm_stats, stragglers,
        began_s, compiled_s,
    )  # fmt: skip


def _make_loop(
    job: Job,
    parts: _StepParts,
    loader: Loader,
    ledger: Ledger,
    stop: StopSignal,
    evaluate: Callable[[int], Evaluation | None],
) -> Loop:
    p, settings = parts, job.settings
    return Loop(
        settings=settings,
        stepper=p.stepper,
        layout=p.layout,
        optimizer=p.optimizer,
        steps=iter(loader),
        ledger=ledger,
        checkpointer=p.checkpointer,
        evaluate=evaluate,
        callbacks=job.callbacks,
        stop=stop,
        run_started=p.record.started,
        random_rank=job.plan.random_rank(job.ranks.rank),
        world_size=job.ranks.world_size,
        total_steps=job.total_steps,
        start_step=p.start_step,
        device=job.device,
        # Custom code may leave large tensors in reference cycles, which only the garbage collector
        # frees.
        collect_every=COLLECT_EVERY if job.inputs.custom_model is None else None,
        begin_activity=job.doing.begin,
        watch=profiler(job.run_dir.path, job.device, job.ranks.rank, job.total_steps - p.start_step)
        if settings.profile
        else None,
    )


def _watch_steps(
    job: Job, parts: _StepParts, loop: Loop, reporter: "MemoryReporter | None"
) -> CommStats | None:
    """Set up the check of step times, and the measurement of memory or communication.

    `reporter` measures memory. Without it, communication is counted if `measure_only` is set.
    Returns the statistics of communication; None without `measure_only`.
    """
    expected_s = job.settings.expect_step_time_s
    if expected_s is not None and job.ranks.rank == 0:
        job.callbacks.append(StepTimeMonitor(loop.ledger, expected_s, job.callbacks))
    comm_stats = CommStats(job, parts.start_step) if job.settings.measure_only else None
    if reporter is not None:
        reporter.follow(parts.stepper, parts.layout, parts.optimizer, parts.start_step)
        loop.step_context = reporter.step_context  # not both: the counter uses memory too
    elif comm_stats is not None:
        loop.step_context = comm_stats.step_context
    return comm_stats


def _build_optimizer(
    job: Job,
    layout: Layout,
    scratch: Scratch,
    mixed: MixedPrecision,
    wide_values: dict[str, torch.Tensor],
) -> torch.optim.Optimizer:
    if not job.plan.compile:
        leave_compiler_out()
    optimizer = make_optimizer(
        layout.named_parameters(),
        job.plan.optimizer,
        job.settings,
        partial(place_optimizer, layout, job.plan, scratch),
        master_weights=mixed.keeps_masters,
        wide_values=wide_values,
        compiled=job.plan.compile and job.device.type == "cuda",
    )
    if job.plan.optimizer_in_backward:
        _require_known_targets(job)
        layout.step_in_backward(optimizer)
    return optimizer


def _open_logs(job: Job, record: RunRecord, start_step: int | None = None) -> None:
    if job.ranks.rank == 0:
        logged = LoggerContext(
            job.run_dir, record, start_step, partial(notify, job.callbacks, "on_hint")
        )
        job.callbacks.extend([MetricsWriter(job.run_dir), *make_loggers(logged)])


def _discard_unbegun(job: Job) -> None:
    if job.ranks.rank == 0 and not job.settings.resume:
        job.run_dir.discard_unbegun()


def _record_end(job: Job, reason: str) -> None:
    if job.ranks.rank == 0:
        with suppress(OSError):  # the disk may be full
            saved = whole_checkpoints(job.run_dir.checkpoints)
            job.run_dir.end_early(reason, step_of(saved[0]) if saved else None)


def _reason_of(error: BaseException) -> str:
    return str(error) if isinstance(error, OutpaceError) else f"{type(error).__name__}: {error}"


def _clean_up(job: Job, reason: str, recording: Recording | None = None) -> None:
    """Close logs and remove partial files of a process that ends in the middle of training."""
    notify(job.callbacks, "close")
    if recording is not None:
        recording.close()
        _record_end(job, reason)
    _discard_unbegun(job)
    if job.ranks.rank == 0:
        clear_partial(job.run_dir.checkpoints)


def _build_stepper(
    job: Job,
    layout: Layout,
    optimizer: torch.optim.Optimizer,
    mixed: MixedPrecision,
    on_gradients: Callable[[], None],
) -> Stepper:
    targets = job.inputs.targets_per_sample
    return Stepper(
        layout=layout,
        optimizer=optimizer,
        mixed=mixed,
        plan=job.plan,
        clip=job.settings.clip,
        device=job.device,
        control=job.groups.control,
        expected_targets=job.settings.global_batch * (targets or job.inputs.likely_targets),
        targets_known=targets is not None,
        on_gradients=on_gradients,
    )


def _require_known_targets(job: Job) -> None:
    """Raise BadInputError if the number of targets is known only after the backward pass.

    --optimizer-in-backward divides gradients by this number during the backward pass.
    """
    if job.inputs.targets_per_sample is None:
        raise BadInputError(
            "--optimizer-in-backward: gradients are divided by a batch's number of targets, but "
            "with masked tokens or a custom loss, this number is known only after the backward "
            "pass. Leave out --optimizer-in-backward."
        )


def _build_checkpointer(job: Job, mixed: MixedPrecision) -> Checkpointer:
    own = job.inputs.custom_model is not None  # a custom model's forward may change any state
    return Checkpointer(
        job.run_dir.checkpoints,
        job.settings.keep,
        job.ranks.rank,
        job.groups.saving,
        on_whole=lambda path: notify(job.callbacks, "on_checkpoint", path),
        on_trouble=lambda sentence: notify(job.callbacks, "on_hint", sentence),
        copies="disk" not in (job.plan.offload_optimizer, job.plan.offload_parameters),
        lends=not job.plan.optimizer_in_backward and not own,
        trained_only=job.plan.lora_rank is not None,
        masters=mixed.keeps_masters,
    )


def _build_ledger(job: Job, progress: Progress | None, trained: int) -> Ledger:
    spec, seq_len = job.inputs.spec, job.inputs.seq_len
    samples = job.settings.global_batch
    model_flops = hardware_flops = None
    adapters = None if job.plan.lora_rank is None else trained
    if spec is not None and seq_len is not None:
        model_flops = step_flops(spec, seq_len, samples, adapters=adapters)
        modes = job.plan.modes(spec.layers)
        hardware_flops = step_flops(spec, seq_len, samples, modes, adapters)
    costs = Costs(
        samples=samples,
        tokens=None if seq_len is None else samples * seq_len,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        peak_flops_per_s=peak_flops_per_s(job.plan, job.machine, job.device),
    )
    data, costs_of = job.inputs.train_data, None
    if isinstance(data, PaddedDataset):
        labels, peak = job.inputs.labels, costs.peak_flops_per_s
        costs_of = step_costs(data, job.settings, job.plan, spec, labels, peak, adapters)
    if progress is None:
        return Ledger(costs, None if seq_len is None else 0, 0, costs_of=costs_of)
    return Ledger(
        costs,
        tokens=progress.tokens,
        samples=progress.samples,
        skipped_steps=progress.skipped_steps,
        loss_sum=progress.loss_sum,
        first_loss=progress.first_loss,
        costs_of=costs_of,
    )
