"""`outpace.verify`: a custom model under every strategy, compared with one process.

Each plan runs in processes forked from this one, with a time limit, so that a hang or a crash is a
result, too.
"""

import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from outpace.catalog.accelerators import find_accelerator
from outpace.experiment.module_parity import (
    STEPS,
    ModuleTrial,
    PlannedRun,
    RankFindings,
    ReferenceFacts,
    ReferenceRun,
    Spoil,
    parameter_dtypes,
    reference,
)
from outpace.experiment.module_verdict import make_verdict, verdict_of
from outpace.interop.custom_model import CustomModel, build_custom_model
from outpace.launch.forked_job import ForkedRank, RankEnd, run_forked
from outpace.nn.evaluation_mode import explain_modes
from outpace.nn.extra_state import require_plain
from outpace.parallel import why_not
from outpace.parallel.batches import RUNS_WHOLE, explain_lengths, samples_in
from outpace.parallel.batchnorm import batch_norms
from outpace.parallel.parallel_module import refused_strategy
from outpace.parallel.parity.comparison import DOUBLE, HALF, SINGLE, ComparisonLimits
from outpace.parallel.parity.first_batch_messages import explain_new_parameters
from outpace.parallel.parity.loss_scale import explain_backwards
from outpace.parallel.parity.split_messages import explain_split_failure
from outpace.parallel.parity.state_messages import explain_reshaped
from outpace.parallel.plain import has_dropout
from outpace.parallel.sparse_gradients import refuse_sparse_gradients
from outpace.probing.hardware.machine import identify
from outpace.probing.hardware.versions import commit, versions
from outpace.records.axes import fill_axes
from outpace.records.certificate import WITHOUT_DROPOUT, Certificate, ParityVerdict
from outpace.records.errors import BadInputError, suggest
from outpace.records.pipelines import SCHEDULES, default_microbatches
from outpace.records.plan import Plan, Strategy
from outpace.records.ranks import Ranks

Batches = Any  # a global batch, or a function of the step (from 1) that returns one

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
DEFAULT_LIMIT_S = 120.0
# Imported before forking, since otherwise each rank of each plan would import them.
_USED = (
    "outpace.training.states", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
    "torch.distributed.optim",
)  # fmt: skip


def verify(
    module: nn.Module,
    *,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    batch: Batches,
    plans: Sequence[Plan | str] | str | None = None,
    nproc: int = 2,
    blocks: Sequence[str] | Sequence[Sequence[str]] | None = None,
    layouts: Mapping[str, str] | None = None,
    sync_batchnorm: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    time_limit_s: float = DEFAULT_LIMIT_S,
) -> Certificate:
    """Prove that strategies train your module as a single process does, or show where they differ.

    `batch` is a global batch, or a function of the step (1, 2, 3) that returns one. The number of
    its samples must be divisible by the number of ranks. `loss`, `blocks`, `layouts` and
    `sync_batchnorm` are as for `outpace.parallelize`. `plans` are plans, or names of strategies for
    `nproc` processes; None stands for every strategy that supports custom models.

    The proof runs on this host's CPU, in processes forked from this one, for at most `time_limit_s`
    seconds per plan. `module` itself is not changed. It is trained in its current mode, as by
    `outpace.parallelize`. The proof compares the loss, the gradients and their norm in each step.
    It also compares the weights and buffers after three steps of SGD with momentum, with and
    without a resume. It computes in float64 if the module supports it. `optimizer`, such as a class
    of torch.optim, is also tried, on small parameters: a strategy is refused if the optimizer
    updates them differently when each rank holds only a part of them. The certificate lists all
    differences. Raises BadInputError if the module or batch cannot be verified.
    """
    custom = build_custom_model(
        lambda: CustomModel(
            module,
            loss,
            blocks=blocks,
            layouts=layouts,
            sync_batchnorm=sync_batchnorm,
            optimizer=optimizer,
        )
    )
    return verify_custom(custom, batch, plans=plans, nproc=nproc, time_limit_s=time_limit_s)


def verify_custom(
    custom: CustomModel,
    batch: Batches,
    *,
    plans: Sequence[Plan | str] | str | None = None,
    nproc: int = 2,
    time_limit_s: float = DEFAULT_LIMIT_S,
    name: str | None = None,
    spoil: Spoil = lambda layout: None,
) -> Certificate:
    """Verify a model from `build_custom_model` as `verify` does.

    `name` replaces the class name in the certificate. `spoil` plants a fault, for tests.
    """
    _require_verifiable(custom.module)
    batches = [_to_cpu(batch(step) if callable(batch) else batch) for step in range(1, STEPS + 1)]
    samples = samples_in(batches[0])
    custom = _copy_to_host(custom)
    # With shared BatchNorm statistics, only steps without accumulation equal the whole batch.
    accumulates = not (custom.sync_batchnorm and batch_norms(custom.module))
    asked, skipped = _choose_plans(plans, nproc, samples, accumulates)
    double = len(parameter_dtypes(custom.module)) == 1 and min(_element_bytes(custom.module)) > 2
    trial = ModuleTrial(custom, batches, samples, double, spoil)
    with tempfile.TemporaryDirectory(prefix="outpace-verify-") as temporary:
        with warnings.catch_warnings():  # torch's warnings about its own code
            warnings.simplefilter("ignore")
            for used in _USED:
                import_module(used)
        verifier = _Verifier(trial, Path(temporary), time_limit_s)
        allowed, notes = verifier.run_reference()
        verdicts = [verifier.compare(plan, allowed) for plan in asked]
    head, dirty = commit()
    return Certificate(
        verdicts=tuple(verdicts),
        model=None,
        module=name or type(custom.module).__name__,
        notes=tuple(notes),
        processes=max(plan.world_size for plan in asked),
        steps=STEPS,
        global_batch=samples,
        seq_len=None,
        versions=versions(),
        commit=head,
        uncommitted_changes=bool(dirty),
        machine=identify(find_accelerator),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        skipped=skipped,
    )


def _require_verifiable(module: nn.Module) -> None:
    if sys.platform != "linux":
        raise BadInputError("verifying a module forks processes, which works on Linux only.")
    if dist.is_initialized():
        raise BadInputError(
            "torch.distributed is already initialised in this process, but verify starts "
            "processes of its own. Call verify before init_process_group, and not under torchrun."
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise BadInputError("the module has lazy parameters. Run a batch through it first.")
    if any(p.is_meta for p in module.parameters()):
        raise BadInputError("the module has parameters on the meta device. Give them values first.")
    refuse_sparse_gradients(module)
    require_plain(module)


def _element_bytes(module: nn.Module) -> list[int]:
    return [dtype.itemsize for dtype in parameter_dtypes(module)] or [4]


def _to_cpu(batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, batch)


def _copy_to_host(custom: CustomModel) -> CustomModel:
    """Return the model on the CPU; a model that is already there is not copied."""
    if all(t.device.type == "cpu" for t in [*custom.module.parameters(), *custom.module.buffers()]):
        return custom
    import copy

    return replace(custom, module=copy.deepcopy(custom.module).cpu())


def _choose_plans(
    requested: Sequence[Plan | str] | str | None, nproc: int, samples: int, accumulates: bool
) -> tuple[list[Plan], dict[str, str]]:
    """Return the plans to verify, and why strategies were skipped.

    If specific plans were requested, none are skipped.
    """
    if isinstance(requested, str):
        requested = None if requested == "all" else requested.split(",")
    if requested is not None:
        return [_resolve_plan(one, nproc, samples, accumulates) for one in requested], {}
    skipped: dict[str, str] = {}
    plans = []
    for name in STRATEGIES:
        reason = refused_strategy(name)
        ranks = Ranks(world_size=nproc, local_world_size=nproc)
        reason = reason or why_not(name, ranks, torch.device("cpu"))
        if reason is None and (name == "single") == (nproc == 1):
            try:
                plans.append(plan_for_module(name, nproc, samples, accumulates))
            except BadInputError as error:
                reason = str(error)
        if reason is not None:
            skipped[name] = reason
    return plans, skipped


def _resolve_plan(one: Plan | str, nproc: int, samples: int, accumulates: bool) -> Plan:
    if isinstance(one, Plan):
        one.accumulation(samples)  # raises if the samples cannot be divided
        return one
    if one not in STRATEGIES:
        raise BadInputError(
            f"there is no strategy {one!r}.{suggest(one, STRATEGIES)} Use any of "
            f"{', '.join(STRATEGIES)}."
        )
    reason = refused_strategy(one)
    if reason is not None:
        raise BadInputError(f"verifying a module does not support strategy {one}: {reason}.")
    return plan_for_module(one, 1 if one == "single" else nproc, samples, accumulates)


def plan_for_module(strategy: Strategy, nproc: int, samples: int, accumulates: bool = True) -> Plan:
    """Return a strategy's plan for a global batch of `samples` on `nproc` ranks.

    With `accumulates`, the plan has two gradient accumulation steps if there are enough samples.
    """
    sizes = fill_axes(strategy, nproc, {})
    shares = sizes["dp_replicate"] * sizes["dp_shard"]
    if samples % shares:
        raise BadInputError(
            f"a global batch of {samples} samples cannot be divided among {shares} data-parallel "
            f"ranks (strategy {strategy}). Pass a batch with a multiple of {shares} samples."
        )
    share = samples // shares
    parts = default_microbatches(strategy, sizes["pp"], share)
    each = share // parts
    if accumulates and strategy not in SCHEDULES and each % 2 == 0:
        each //= 2  # two accumulation steps
    return Plan.parse(
        {"strategy": strategy, **sizes, "micro_batch": each, "pp_microbatches": parts}, "verify"
    )


def plan_like(plan: Plan) -> Plan:
    """Return a run's plan in fp32 with SGD, for verification.

    Compilation, compression of gradients and an optimizer in the backward pass are switched off.
    Micro-batches have at most two samples, since the verified global batch is small.
    """
    changed = {"precision": "fp32", "compile": False, "compress_gradients": "none",
               "optimizer": "sgd", "optimizer_in_backward": False,
               "micro_batch": min(plan.micro_batch, 2)}  # fmt: skip
    return Plan.parse({**plan.model_dump(), **changed}, "run.json")


# How one process splits a batch: shares, micro-batches per share, and whether as a pipeline.
_Cut = tuple[int, int, bool]
_WHOLE: _Cut = (1, 1, False)


class _Verifier:
    def __init__(self, trial: ModuleTrial, folder: Path, limit_s: float) -> None:
        self._trial, self._folder, self._limit_s = trial, folder, limit_s
        self._numbers = iter(range(1_000_000))
        self._reference_paths: dict[_Cut, Path] = {}
        self._floor = DOUBLE.floor

    def run_reference(self) -> tuple[ComparisonLimits, list[str]]:
        """Train on whole batches in one process; return the allowed differences, and notes.

        Computes in float64 if the module supports it. Raises BadInputError if one process cannot
        train the module.
        """
        notes = []
        end = self._train_reference(_WHOLE)
        if not end.fine and self._trial.double:
            why = end.said or "it ended"
            self._trial = replace(self._trial, double=False)
            notes.append(f"in fp32, since its forward fails in float64 ({why.splitlines()[0]})")
            end = self._train_reference(_WHOLE)
        if end.refused and end.said:
            raise BadInputError(end.said)
        if not end.fine:
            model = type(self._trial.custom.module).__name__
            raise BadInputError(
                f"one process cannot train {model} on this batch: {_format_end(end, self._limit_s)}"
            )
        facts = self._load_reference().facts
        dtypes = parameter_dtypes(self._trial.custom.module)
        self._refuse_unsupported(facts)
        if facts.draws:
            raise BadInputError(
                f"{type(self._trial.custom.module).__name__} draws random numbers other than "
                "dropout's in its forward, which depend on how a batch is split. Derive them from "
                "the batch (one seed per sample), or disable them for the proof."
            )
        if self._trial.double and not facts.narrow:
            allowed = DOUBLE
        else:
            half = any(dtype.itemsize == 2 for dtype in dtypes)
            allowed = HALF if half else SINGLE
            if self._trial.double:
                notes.append("partly computed in fp32, because its forward casts to it")
            elif len(dtypes) > 1:
                names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
                notes.append(f"in its own dtypes ({', '.join(names)})")
        if has_dropout(self._trial.custom.module):
            notes.append(WITHOUT_DROPOUT)
        modes = explain_modes(self._trial.custom.module)
        if modes is not None:
            notes.append(modes)
        self._floor = allowed.floor
        return allowed, notes

    def _refuse_unsupported(self, facts: ReferenceFacts) -> None:
        if facts.made:
            raise BadInputError(explain_new_parameters(facts.made))
        if facts.state.reshaped:
            raise BadInputError(explain_reshaped(facts.state.reshaped))
        if facts.state.backwards:
            raise BadInputError(explain_backwards(facts.state.backwards))

    def _train_reference(self, cut: _Cut) -> RankEnd:
        folder = self._next_folder()
        path = folder / "course.pt"
        trial = self._trial

        def act(rank: ForkedRank) -> None:
            rank.note_phase("training in one process")
            torch.save(reference(trial, *cut), path)

        self._reference_paths[cut] = path
        return run_forked(1, act, self._limit_s, folder)[0]

    def _load_reference(self) -> ReferenceRun:
        course: ReferenceRun = torch.load(self._reference_paths[_WHOLE], weights_only=False)
        return course

    def _next_folder(self) -> Path:
        return self._folder / f"job-{next(self._numbers)}"

    def compare(self, plan: Plan, allowed: ComparisonLimits) -> ParityVerdict:
        precision = "fp64" if self._trial.double else "fp32"
        plan = plan.model_copy(update={"precision": precision})
        averages = plan.pp > 1 and bool(batch_norms(self._trial.custom.module))
        cut = (plan.data_parallel, self._count_micro_batches(plan), averages)
        cut_too = cut[:2] != (1, 1) and self._can_train_cut(cut)
        names = {"whole": _WHOLE} | ({"cut": cut} if cut_too else {})
        found: list[RankFindings] = []
        for phase in ("train", "resume"):
            if phase == "train":
                place = self._next_folder()
            folder = place / phase
            paths = {name: self._reference_paths[one] for name, one in names.items()}
            act = partial(_run_phase, self._trial, plan, place, paths, phase, self._floor)
            ends = run_forked(plan.world_size, act, self._limit_s, folder)
            if not all(end.fine for end in ends):
                return self._unfinished_verdict(plan, allowed, ends, phase, cut)
            found += [
                pickle.loads((place / f"{phase}-{rank}.found").read_bytes())
                for rank in range(plan.world_size)
            ]
        return verdict_of(plan, allowed, found, self._load_reference(), plan.world_size)

    def _count_micro_batches(self, plan: Plan) -> int:
        return self._trial.samples // plan.data_parallel // plan.micro_batch

    def _can_train_cut(self, cut: _Cut) -> bool:
        if cut not in self._reference_paths and not self._train_reference(cut).fine:
            self._reference_paths[cut] = Path()
        return self._reference_paths[cut] != Path()

    def _fails_only_cut(self, cut: _Cut) -> bool:
        return cut[:2] != _WHOLE[:2] and not self._can_train_cut(cut)

    def _unfinished_verdict(
        self, plan: Plan, allowed: ComparisonLimits, ends: Sequence[RankEnd], phase: str, cut: _Cut
    ) -> ParityVerdict:
        refusal = next((end.said for end in ends if end.refused), None)
        if refusal is not None:
            return make_verdict(plan, allowed, reason=refusal, refused=True)
        late = [(rank, end) for rank, end in enumerate(ends) if end.exit_code is None]
        # Ranks that lost a peer come last: the reason is with the rank that failed first.
        failed = [(rank, end) for rank, end in enumerate(ends) if not end.fine and end.exit_code]
        failed.sort(key=lambda one: _has_lost_peer(one[1]))
        if failed:
            rank, end = failed[0]
            said = f"rank {rank} failed in {end.at}: {_format_end(end, self._limit_s)}"
        else:
            where = "; ".join(f"rank {rank} was in {end.at}" for rank, end in late)
            said = f"it hangs: no end within {self._limit_s:.0f} s ({where})"
        if failed and self._fails_only_cut(cut):
            why = explain_lengths(self._trial.batches[0]) or f"{RUNS_WHOLE}."
            return make_verdict(plan, allowed, reason=f"{said}: {why}", refused=True)
        if failed and plan.tp > 1 and end.at == "step 1" and end.said:  # no signal
            advice = explain_split_failure(said, plan.tp)
            said = f"{said.removesuffix('.')}. {advice}"
            return make_verdict(plan, allowed, reason=said, refused=True)
        after = " (after resuming)" if phase == "resume" else ""
        return make_verdict(plan, allowed, reason=f"{said}{after}")


# Words in the errors of ranks that lost a peer.
_LOST_PEER_WORDS = ("connection closed", "connection reset", "gloo", "another rank")


def _has_lost_peer(end: RankEnd) -> bool:
    said = (end.said or "").lower()
    return any(word in said for word in _LOST_PEER_WORDS)


def _run_phase(
    trial: ModuleTrial,
    plan: Plan,
    place: Path,
    paths: Mapping[str, Path],
    phase: str,
    floor: float,
    rank: ForkedRank,
) -> None:
    """Train under a plan on one rank, or resume; write the differences found to the folder `place`.

    `phase` is "train" or "resume", and `paths` are the files of the runs in one process.
    """
    references = {
        name: torch.load(path, weights_only=False, mmap=True) for name, path in paths.items()
    }
    run = PlannedRun(trial, plan, rank.ranks, place, references, floor, rank.note_phase)
    if phase == "train":
        run.train()
    else:
        run.resume()
    rank.note_phase("leaving")
    (place / f"{phase}-{rank.ranks.rank}.found").write_bytes(pickle.dumps(run.found))


def _format_end(end: RankEnd, limit_s: float) -> str:
    if end.exit_code is None:
        return f"no end within {limit_s:.0f} s (in {end.at})"
    if end.exit_code < 0:
        import signal

        return f"ended by {signal.Signals(-end.exit_code).name} (in {end.at})"
    return end.said or f"exit code {end.exit_code}"
