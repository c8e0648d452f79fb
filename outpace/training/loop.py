"""The training loop: steps, evaluations and checkpoints, until the run ends or is interrupted."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.parallel import Layout
from outpace.records.errors import DivergedError, InterruptedRunError
from outpace.records.measurement import Evaluation
from outpace.records.run import resume_command
from outpace.records.settings import TrainSettings
from outpace.training.accounting import Ledger
from outpace.training.callbacks import Callback, notify
from outpace.training.checkpoint import Checkpointer, Progress, whole_checkpoints
from outpace.training.evaluate import EvaluationStopped
from outpace.training.guards import StopSignal, collect_garbage_every, seed_step
from outpace.training.schedule import learning_rate
from outpace.training.step import Batch, RawStep, Stepper


@dataclass
class Loop:
    """Training loop of one rank, from the step after `start_step` to the last."""

    settings: TrainSettings
    stepper: Stepper
    layout: Layout
    optimizer: torch.optim.Optimizer
    steps: Iterator[list[Batch]]
    ledger: Ledger
    checkpointer: Checkpointer
    evaluate: Callable[[int], Evaluation | None]
    callbacks: Sequence[Callback]
    stop: StopSignal
    random_rank: int
    world_size: int
    total_steps: int
    start_step: int
    device: torch.device
    begin_activity: Callable[..., None] = lambda what, limited=False: None  # for the hang watchdog
    # a profiler's context, whose value is called after each step
    watch: AbstractContextManager[Callable[[], None]] | None = None
    # Called with the first batch before its step; returns the step's totals if it ran its passes.
    check_first_batch: Callable[[list[Batch], bool], Tensor | None] | None = None
    step_context: Callable[[int, list[Batch]], AbstractContextManager[None]] | None = None
    run_started: str | None = None  # `started` in run.json, by which checkpoints name their run
    # Steps between garbage collections; None leaves them to Python.
    collect_every: int | None = None

    def run(self) -> None:
        """Train to the last step.

        Raises InterruptedRunError, after saving a checkpoint, if a signal ended the run, and
        DivergedError if the loss or the gradient's norm is not finite.
        """
        for _ in self.iterate():
            pass

    def iterate(self) -> Iterator[int]:
        """Train as `run` does, and yield the number of each step after it."""
        waiting: deque[RawStep] = deque()
        self.stop.stepping = True
        with (
            self.watch or nullcontext(lambda: None) as after_step,
            collect_garbage_every(self.collect_every) as collect,
        ):
            try:
                for step in range(self.start_step + 1, self.total_steps + 1):
                    first = step == self.start_step + 1
                    raw = self._run_first_step() if first else self._run_step(step)
                    waiting.append(raw)
                    # A GPU runs behind the host, so record earlier steps while it computes.
                    self._record_steps(waiting, self.stepper.queue.steps_behind)
                    after_step()
                    collect()
                    self._end_step(step, waiting)
                    yield step
            except DivergedError as error:
                raise self._explain_divergence(error) from None
        self.checkpointer.wait_for_ranks()

    def _run_first_step(self) -> RawStep:
        """Run the first step, which compiles. A signal interrupts it immediately."""
        return self.stop.unless_ended(lambda: self._run_step(self.start_step + 1))

    def _run_step(self, step: int) -> RawStep:
        settings = self.settings
        self.begin_activity(f"step {step}", limited=True)
        self.stepper.begin()
        batches = next(self.steps)
        seed_step(settings.seed, step, self.random_rank, self.device)
        if self.check_first_batch is not None and step == self.start_step + 1:
            self.begin_activity("the check of the first batch", limited=True)
            # With a step context, which measures memory, the step has to run its passes itself.
            self.stepper.totals = self.check_first_batch(batches, self.step_context is None)
            if self.stepper.totals is None:
                self.stepper.begin()
            self.begin_activity(f"step {step}", limited=True)
        rate = learning_rate(settings, step - 1, self.total_steps)
        with self.step_context(step, batches) if self.step_context else nullcontext():
            return self.stepper.run(step, rate, batches, lambda: self.stop.requested)

    def _record_steps(self, waiting: deque[RawStep], left: int) -> None:
        """Record the oldest steps until at most `left` steps are waiting for the device to finish.

        A single rank also records any step that the device has already finished. With several
        ranks, only `left` decides: all ranks then see a NaN loss at the same step and end together.
        """
        alone = self.world_size == 1
        while waiting and (len(waiting) > left or (alone and waiting[0].done)):
            record = self.ledger.record(waiting.popleft())
            notify(self.callbacks, "on_step", record)

    def _end_step(self, step: int, waiting: deque[RawStep]) -> None:
        settings = self.settings
        heard = self.stepper.heard
        stopping = heard is not None and heard.stop and step < self.total_steps
        last = step == self.total_steps
        due_eval = settings.eval_every and step % settings.eval_every == 0 and not last
        due_save = last or stopping or (settings.save_every and step % settings.save_every == 0)
        if due_eval or due_save:
            self._record_steps(waiting, 0)  # raises for a NaN loss, so it is never saved
            self.stepper.pause()
        if due_eval and not stopping:
            self.begin_activity(f"the evaluation after step {step}")
            try:
                evaluation = self.evaluate(step)
            except EvaluationStopped:
                stopping = due_save = True
            else:
                if evaluation is not None:
                    notify(self.callbacks, "on_eval", evaluation, False)
        if due_save and not settings.measure_only:
            self.begin_activity(f"saving after step {step}")
            self.checkpointer.save(
                *self.layout.checkpoint_state(self.optimizer), self.progress(step)
            )
        elif step == self.start_step + 1 and not settings.measure_only:
            self.checkpointer.make_ready()
        else:
            self.checkpointer.poll()
        if stopping:
            self._raise_interrupted(step)

    def _raise_interrupted(self, step: int) -> None:
        saved = self.checkpointer.wait_for_ranks()
        if self.settings.measure_only:
            raise InterruptedRunError("interrupted. With --measure-only, nothing was saved")
        where = f"saved after step {step} of {self.total_steps}" if saved else "but not saved"
        again = resume_command(self.checkpointer.directory.parent)
        raise InterruptedRunError(f"interrupted, {where}. Resume with: {again}")

    def _explain_divergence(self, error: DivergedError) -> DivergedError:
        self.checkpointer.wait()
        good = whole_checkpoints(self.checkpointer.directory)
        last = f"The last good checkpoint is {good[0]}." if good else "There is no checkpoint yet."
        return DivergedError(
            f"{error}. {last} Try a lower --lr, a longer --warmup, --clip 1, or bf16 instead of "
            "fp16."
        )

    def progress(self, step: int) -> Progress:
        """Return the run's state at `step` without tensors."""
        ledger, scaler = self.ledger, self.stepper.mixed.scaler
        return Progress(
            step=step,
            tokens=ledger.tokens,
            samples=ledger.samples,
            loss_sum=ledger.loss_sum,
            skipped_steps=ledger.skipped_steps,
            scaler=None if scaler is None else scaler.state_dict(),
            first_loss=ledger.first_loss,
            world_size=self.world_size,
            run_started=self.run_started,
        )
