"""Training of a custom model in a single process and under a plan, compared tensor by tensor.

The reference is a plain loop: the whole global batch at once, torch's clipping, and SGD with
momentum. With SGD, updates are proportional to gradients, so the tolerance of gradients also holds
for parameters, and a wrong factor in the gradients shows.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from outpace.interop.custom_model import CustomModel, CustomObjective
from outpace.nn.dtensor import is_spread, whole
from outpace.nn.mixed_precision import make_mixed
from outpace.nn.scratch_files import Scratch
from outpace.optim.build import make_optimizer
from outpace.parallel import Layout
from outpace.parallel.batches import concatenate, cut, take_first
from outpace.parallel.batchnorm import batch_norms, by_micro_batch, commit
from outpace.parallel.layout import StepHooks, divisor
from outpace.parallel.offload import place_optimizer
from outpace.parallel.optimizer_split import Build, explain_optimizer
from outpace.parallel.parallel_module import lay_out, synchronise_statistics
from outpace.parallel.parity.comparison import SINGLE, explain, mismatch, relative, scales
from outpace.parallel.parity.counted_buffers import find_counted_buffers
from outpace.parallel.parity.cut_cause import CutCause, find_cut_cause, fixed_statistics
from outpace.parallel.parity.kept_state import KeptState, find_kept_state
from outpace.parallel.parity.module_state import kept_attributes, preserve_state
from outpace.parallel.parity.moved_parameters import (
    NEEDED_BEFORE,
    MovedParameters,
    explain_lost_value,
    explain_writes,
    is_lost_value,
    keep_values,
)
from outpace.parallel.parity.piece_losses import total_of
from outpace.parallel.parity.read_buffers import find_moved_buffers
from outpace.parallel.plain import (
    NarrowResults,
    floating_dtypes,
    random_state,
    same_random_state,
    to_float64,
    without_dropout,
)
from outpace.parallel.rank_objects import gather_objects
from outpace.parallel.refusals import LoopPosition
from outpace.parallel.shard_access import combine_with_whole, read_whole_values
from outpace.parallel.shared_memory import refuse_shared_memory
from outpace.records.errors import BadInputError
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.training.checkpoint import Checkpointer, Progress
from outpace.training.step import RawStep, Stepper

STEPS = 3
SAVED_STEP = 2  # the run resumes after this step
LR, CLIP, MOMENTUM = 0.05, 1.0, 0.9
CPU = torch.device("cpu")
Spoil = Callable[[Layout], None]


@dataclass(frozen=True)
class ModuleTrial:
    """A user's module with its training data: one global batch of `samples` samples per step.

    `double`: whether to compute in float64. Tests pass `spoil`, which changes a parallel layout to
    be wrong, to check that the fault is found.
    """

    custom: CustomModel
    batches: Sequence[Any]
    samples: int
    double: bool = True
    spoil: Spoil = lambda layout: None

    def begin(self) -> CustomObjective:
        """Convert the module to the trial's dtype and return it as an objective.

        Call this once per process. Submodules keep their training or evaluation modes.
        """
        if self.double:
            torch.set_default_dtype(torch.float64)  # for tensors that the forward creates
            to_float64(self.custom.module)
        return CustomObjective(self.custom)

    def batch(self, step: int) -> Any:
        """Return the global batch of a step, counting from 1."""
        return tree_map(self._widen, self.batches[step - 1])

    def _widen(self, leaf: Any) -> Any:
        wide = self.double and isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.double() if wide else leaf


@dataclass
class ReferenceFacts:
    """Properties of a user's module that were found while it trained in one process."""

    narrow: bool = False  # whether fewer than 64 bits were used despite float64 inputs
    draws: bool = False  # whether random numbers other than dropout's were drawn
    seconds: float = 0.0
    made: tuple[str, ...] = ()  # parameters created by the first forward
    state: KeptState = field(default_factory=KeptState)  # state that checkpoints lack
    # state that each rank keeps separately
    state_of_ranks: KeptState = field(default_factory=KeptState)
    written: tuple[str, ...] = ()  # parameters that the forward writes to
    communicates: bool = False  # whether forwards call collectives
    cut_cause: CutCause = ""  # why the loss depends on how a batch is split, if it does
    has_batchnorm: bool = False
    shared_norms: tuple[str, ...] = ()  # BatchNorms with statistics over all ranks
    cut_cause_fixed: CutCause = ""  # the cause while the statistics of `shared_norms` are fixed
    counted: tuple[str, ...] = ()  # buffers and attributes whose changes depend on samples
    moved: tuple[str, ...] = ()  # buffers that forwards change and that affect training


@dataclass
class ReferenceRun:
    """Results of training a user's module in one process, with which plans are compared.

    `steps` holds each step's tensors by kind ("gradient") and then by name. `state` is the model's
    state after the last step.
    """

    steps: list[dict[str, dict[str, Tensor]]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    unsaved: dict[str, Tensor] = field(default_factory=dict)  # counted buffers not in `state`
    parameters: tuple[str, ...] = ()
    facts: ReferenceFacts = field(default_factory=ReferenceFacts)


def optimizer_settings() -> TrainSettings:
    """Return the optimizer's settings in one process and under each plan."""
    return TrainSettings(lr=LR, clip=CLIP, beta1=MOMENTUM)


def reference(
    trial: ModuleTrial, shares: int = 1, pieces: int = 1, pipeline: bool = False
) -> ReferenceRun:
    """Train a user's module in one process, and return its tensors in each step.

    Each global batch is split into `shares`, one per data-parallel rank of a plan, and each share
    into `pieces` micro-batches. The buffers are those after the first share, as on rank 0. With
    `pipeline`, running averages of BatchNorms cover all micro-batches of a step, as in a pipeline.
    If BatchNorms have statistics over all ranks, or if the forward calls collectives, the k-th
    micro-batches of all shares run together, as they would on ranks.
    """
    objective = trial.begin()
    module = trial.custom.module
    if pipeline:
        by_micro_batch(module)
    named = dict(module.named_parameters())
    optimizer = make_optimizer(named.items(), "sgd", optimizer_settings())
    course = ReferenceRun(parameters=tuple(named))
    facts = course.facts
    facts.state, facts.state_of_ranks = [
        find_kept_state(objective, trial.batch(1), StepHooks(), alone=alone)
        for alone in (True, False)
    ]
    facts.communicates = _calls_collectives(objective, trial.batch(1))
    facts.cut_cause = find_cut_cause(objective, StepHooks(), True, trial.batch(1), SINGLE.cut)
    facts.has_batchnorm = bool(batch_norms(module))
    if trial.custom.sync_batchnorm and facts.has_batchnorm:
        facts.shared_norms = tuple(batch_norms(module))
        with fixed_statistics(module):
            asked_cause = objective, StepHooks(), True, trial.batch(1), SINGLE.cut
            facts.cut_cause_fixed = find_cut_cause(*asked_cause)
    asked = objective, StepHooks(), True, trial.batch(1), None, None
    facts.counted = tuple(
        name.removeprefix("model.") for name in find_counted_buffers(*asked) or ()
    )
    facts.moved = find_moved_buffers(objective, StepHooks(), True, trial.batch(1))
    for step in range(1, STEPS + 1):
        with ExitStack() as stack:
            stack.enter_context(without_dropout(module))
            narrow = stack.enter_context(NarrowResults()) if step == 1 else None
            watch = stack.enter_context(MovedParameters(named.items())) if step == 1 else None
            drawn = random_state(CPU)
            together = facts.shared_norms or facts.communicates
            run = _run_shares_together if together else _run_shares
            totals = run(objective, trial.batch(step), shares, pieces)
            commit(module)
            facts.draws |= not same_random_state(drawn, random_state(CPU))
        if narrow is not None and watch is not None:
            facts.made = tuple(n for n, _ in module.named_parameters() if n not in named)
            facts.narrow = bool(narrow.dtypes)
            facts.written = tuple(sorted(watch.written))
        gradients = {n: p.grad for n, p in named.items() if p.grad is not None}
        for gradient in gradients.values():
            gradient.div_(divisor(totals[1]))
        kept = {name: gradient.clone() for name, gradient in gradients.items()}
        norm = nn.utils.clip_grad_norm_(named.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        course.steps.append(_step_tensors(totals, kept, norm))
    course.state = {name: t.clone() for name, t in module.state_dict().items() if _is_tensor(t)}
    counted = {*facts.counted} - course.state.keys()
    course.unsaved = {n: b.clone() for n, b in module.named_buffers() if n in counted}
    return course


def _calls_collectives(objective: CustomObjective, batch: Any) -> bool:
    watch = MovedParameters(())
    with suppress(Exception), keep_values(objective.named_parameters()), watch:
        total_of(objective, StepHooks(), True, [take_first(batch, 2)], alike=True)
    return watch.communicates


def require_optimizer(build: Build, layout: Layout, plan: Plan) -> None:
    """Raise BadInputError if the optimizer updates a model differently when ranks hold parts of it.

    All ranks must call this function together.
    """
    held = [p for _, p in layout.named_parameters() if p.requires_grad]
    has_shards = any(is_spread(one) for one in held)
    if has_shards:  # as in a user's loop
        read_whole_values(LoopPosition())
        combine_with_whole(True)
    try:
        reason = explain_optimizer(build, [{"params": held}], plan, CPU)
    finally:
        if has_shards:
            combine_with_whole(False)
    reasons = [one for one in gather_objects(reason) if one is not None]
    if reasons:
        raise BadInputError(reasons[0])


def _run_shares(objective: CustomObjective, batch: Any, shares: int, micro_batches: int) -> Tensor:
    """Run forward and backward of each data-parallel share of a batch, as separate ranks would.

    Returns the sum of losses and the number of targets. All gradients are added, but buffers and
    parameters keep only the changes that the first share makes.
    """
    first, *others = _cut_batch(batch, shares)
    totals = torch.zeros(2, dtype=torch.float64)
    for share in others:
        totals += _run_in_isolation(objective, share, micro_batches)
    return totals + _run_micro_batches(objective, _cut_batch(first, micro_batches))


def _run_shares_together(
    objective: CustomObjective, batch: Any, shares: int, micro_batches: int
) -> Tensor:
    if micro_batches == 1:
        return _run_micro_batches(objective, [batch])
    parts = [_cut_batch(share, micro_batches) for share in _cut_batch(batch, shares)]
    return _run_micro_batches(
        objective, [reduce(_concatenate, several) for several in zip(*parts, strict=True)]
    )


def _concatenate(one: Any, other: Any) -> Any:
    joined = concatenate(one, other)
    if joined is None:
        raise BadInputError("the batch's parts cannot be concatenated")
    return joined


def _cut_batch(batch: Any, parts: int) -> Sequence[Any]:
    return cut(batch, parts) if parts > 1 else [batch]


def _run_micro_batches(objective: CustomObjective, pieces: Sequence[Any]) -> Tensor:
    totals = torch.zeros(2, dtype=torch.float64)
    for piece in pieces:
        loss_sum, count = objective(piece)
        loss_sum.backward()
        totals += torch.stack((loss_sum.detach().double(), count.double()))
    return totals


def _run_in_isolation(objective: CustomObjective, share: Any, pieces: int) -> Tensor:
    """Run one data-parallel share, keep its gradients, and undo all other changes to the model.

    So each share starts from the same buffers, counters and parameters, as it would on its own
    rank.
    """
    parameters = list(objective.parameters())
    with preserve_state(objective, CPU), keep_values(objective.named_parameters()):
        totals = _run_micro_batches(objective, _cut_batch(share, pieces))
        made = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, made, strict=True):
        if gradient is not None:
            before = parameter.grad
            parameter.grad = gradient if before is None else before + gradient
    return totals


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _step_tensors(
    totals: Tensor, gradients: dict[str, Tensor], norm: Tensor
) -> dict[str, dict[str, Tensor]]:
    return {
        "loss": {"mean": totals[0] / divisor(totals[1]), "targets": totals[1].clone()},
        "gradient": gradients,
        "norm": {"before clipping": norm},
    }


@dataclass
class RankFindings:
    """Differences between the tensors of one rank and those of training in one process.

    `whole` has the relative differences, by (kind, name, step), from training on whole batches, and
    `cut` those from training on split batches. `notes` describes how some tensors differ.
    `unmatched` gives the reason why a tensor does not exist in one process. `held` names the
    parameters of which this rank had a gradient in the first step. `attributes` names the plain
    attributes that training changed, which no checkpoint contains. `summed` has the differences of
    unsharded gradients of the first step after they were summed over tensor-parallel ranks.
    """

    whole: dict[tuple[str, str, int], float | None] = field(default_factory=dict)
    cut: dict[tuple[str, str, int], float | None] = field(default_factory=dict)
    notes: dict[tuple[str, str, int], str] = field(default_factory=dict)
    unmatched: dict[tuple[str, str, int], str] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    summed: dict[str, float | None] = field(default_factory=dict)


class PlannedRun:
    """One rank's training under a plan, compared in each step with training in one process.

    `references` are the runs in one process. At the start of each phase, the function `at` is
    called with a description of it.
    """

    def __init__(
        self,
        trial: ModuleTrial,
        plan: Plan,
        ranks: Ranks,
        folder: Path,
        references: Mapping[str, ReferenceRun],
        floor: float,
        at: Callable[[str], None],
    ) -> None:
        self._floor = floor
        self._trial, self._plan, self._ranks, self._folder = trial, plan, ranks, folder
        self._references, self._at = references, at
        self.found = RankFindings()
        at("laying the module out")
        refuse_shared_memory(trial.custom.module, plan.strategy, trial.custom.loss)
        objective = trial.begin()
        self._control = dist.new_group(backend="gloo")
        scratch = Scratch(folder)
        alone = Ranks() if plan.world_size == 1 else ranks
        synchronise_statistics(trial.custom, plan)
        self.layout = lay_out(objective, trial.custom, plan, alone, CPU, scratch)
        if trial.custom.optimizer is not None:
            require_optimizer(trial.custom.optimizer, self.layout, plan)
        self._optimizer = make_optimizer(
            self.layout.named_parameters(),
            "sgd",
            optimizer_settings(),
            partial(place_optimizer, self.layout, plan, scratch),
        )
        trial.spoil(self.layout)
        self._gradients: dict[str, Tensor] = {}
        self._summed: dict[str, Tensor] = {}  # over tensor-parallel ranks
        self._stepper = Stepper(
            layout=self.layout,
            optimizer=self._optimizer,
            mixed=make_mixed(plan.precision, CPU, True, True, plan.fully_shards),
            plan=plan,
            clip=CLIP,
            device=CPU,
            control=self._control,
            expected_targets=trial.samples,
            targets_known=False,
            on_gradients=self._keep_gradients,
        )
        self._checkpointer = Checkpointer(
            folder / "checkpoints",
            keep=1,
            rank=ranks.rank,
            group=dist.new_group(backend="gloo"),
            on_whole=lambda path: None,
            on_trouble=_raise,
        )

    def train(self) -> None:
        """Run all steps, and save a checkpoint after step `SAVED_STEP`."""
        begin = kept_attributes(self.layout.objective)
        for step in range(1, STEPS + 1):
            self._train_step(step, "")
            if step == SAVED_STEP:
                now = kept_attributes(self.layout.objective)
                self.found.attributes = {n for n, v in now.items() if begin.get(n, v) != v}
                self._at(f"saving a checkpoint after step {step}")
                self._checkpointer.save(
                    *self.layout.checkpoint_state(self._optimizer), self._progress(step)
                )
                self._checkpointer.wait_for_ranks()
        self._compare_state("")
        self._checkpointer.close()

    def resume(self) -> None:
        """Resume from the checkpoint and run the remaining steps."""
        self._at("reading the checkpoint")
        folder = self._folder / "checkpoints" / f"step-{SAVED_STEP}"
        self._checkpointer.load(folder, *self.layout.checkpoint_state(self._optimizer))
        self.layout.resume_from(SAVED_STEP)
        for step in range(SAVED_STEP + 1, STEPS + 1):
            self._train_step(step, " after resuming")
        self._compare_state(" after resuming")
        self._checkpointer.close()

    def _progress(self, step: int) -> Progress:
        return Progress(
            step=step, tokens=None, samples=step * self._trial.samples, loss_sum=0.0,
            skipped_steps=0, scaler=None, first_loss=None, world_size=self._plan.world_size,
        )  # fmt: skip

    def _train_step(self, step: int, when: str) -> None:
        self._at(f"step {step}{when}")
        share = self._list_micro_batches(self._trial.batch(step))
        self._gradients.clear()
        self._summed.clear()
        self._stepper.begin()
        with without_dropout(self.layout.objective):
            raw = self._run_step(step, share)
        held = _step_tensors(raw.totals.double(), dict(self._gradients), raw.grad_norm)
        if step == 1:
            self.found.held = set(held["gradient"])
            wanted = self._references["whole"].steps[0]["gradient"]
            of = scales(wanted, self._floor)
            for name, tensor in self._summed.items():
                off = relative(tensor, wanted.get(name), of.get(name, 0.0))
                self.found.summed[name] = off
        for kind, tensors in held.items():
            for name, reference_of in self._references.items():
                wanted = reference_of.steps[step - 1][kind]
                self._record_differences(name, kind + when, step, wanted, tensors)

    def _run_step(self, step: int, share: list[Any]) -> RawStep:
        """Run one training step, and return its raw measurements.

        Raises BadInputError if the forward overwrites parameters that the backward needs.
        """
        versions = {name: p._version for name, p in self.layout.named_parameters()}
        try:
            return self._stepper.run(step, LR, share, lambda: False)
        except RuntimeError as error:
            now = dict(self.layout.named_parameters())
            written = [name for name, version in versions.items() if now[name]._version != version]
            if not is_lost_value(error) or not (written or self._plan.pp > 1):
                raise
            said = explain_writes(written, self._plan.strategy, NEEDED_BEFORE)
            if not written:
                said = explain_lost_value((), self._plan.strategy)
            raise BadInputError(said) from error

    def _list_micro_batches(self, batch: Any) -> list[Any]:
        plan = self._plan
        number = plan.data_rank(self._ranks.rank) or 0
        share = cut(batch, plan.data_parallel)[number] if plan.data_parallel > 1 else batch
        passes = self._trial.samples // plan.data_parallel // plan.samples_per_pass
        return cut(share, passes) if passes > 1 else [share]

    def _keep_gradients(self) -> None:
        """Keep an unsharded copy of each gradient; leave out those of which a rank has no shard."""
        named = dict(self.layout.named_parameters())
        mine = {name: parameter.grad is not None for name, parameter in named.items()}
        said = gather_objects(mine, self._control)
        for name, parameter in named.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            everywhere = all(one.get(name, True) for one in said)
            if is_spread(gradient) and not everywhere:
                continue
            self._gradients[name] = whole(gradient).clone()
            if self._plan.tp > 1 and everywhere and not is_spread(gradient):
                self._summed[name] = gradient.clone()
                dist.all_reduce(self._summed[name])

    def _compare_state(self, when: str) -> None:
        """Compare parameters and buffers on rank 0, gathered as for an export."""
        self._at(f"gathering the model{when}")
        model = self.layout.whole_model(self._ranks.rank == 0)
        if model is None or self._ranks.rank:
            return
        state = {name: t for name, t in model.state_dict().items() if _is_tensor(t)}
        for which, reference_of in self._references.items():
            known = set(reference_of.parameters)
            for kind, wanted in (("parameter", True), ("buffer", False)):
                expected = {n: t for n, t in reference_of.state.items() if (n in known) == wanted}
                found = {n: t for n, t in state.items() if (n in known) == wanted}
                if not (wanted or when or self._plan.pp > 1):  # no checkpoint contains them
                    expected |= reference_of.unsaved
                    held = self.layout.model.named_buffers()
                    found |= {n: b for n, b in held if n in expected and n not in found}
                found |= {n: torch.empty(0) for n in expected if n not in found}
                self._record_differences(which, kind + when, STEPS, expected, found)

    def _record_differences(
        self,
        reference_name: str,
        kind: str,
        step: int,
        wanted: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
    ) -> None:
        noted = self.found.whole if reference_name == "whole" else self.found.cut
        of = scales(wanted, self._floor)
        for name, tensor in tensors.items():
            noted[kind, name, step] = relative(tensor, wanted.get(name), of.get(name, 0.0))
            if reference_name == "whole" and noted[kind, name, step] is None:
                self.found.unmatched[kind, name, step] = mismatch(tensor, wanted.get(name))
            if reference_name == "whole" and kind == "gradient" and noted[kind, name, step]:
                explained = explain(name, tensor, wanted)
                if explained is not None:
                    self.found.notes[kind, name, step] = explained


def _raise(sentence: str) -> None:
    raise RuntimeError(sentence)


def parameter_dtypes(module: nn.Module) -> set[torch.dtype]:
    """Return the dtypes of a module's floating-point and complex parameters."""
    return floating_dtypes(module.parameters())
