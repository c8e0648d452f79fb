"""`outpace verify`: every strategy compared with a single process, in one job."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations
from types import MappingProxyType
from typing import Any

from outpace.catalog.accelerators import find_accelerator
from outpace.experiment.parity import Difference, Trial, differences, reference, train_under_plan
from outpace.experiment.tolerance import Tolerance, tolerance_of
from outpace.jobs.ranks.process_groups import Groups
from outpace.parallel import Layout
from outpace.parallel.rank_objects import gather_objects
from outpace.planner.communication.volume import Tally, step_traffic
from outpace.probing.hardware.machine import identify
from outpace.probing.hardware.versions import commit, versions
from outpace.records.axes import count_servers, fill_axes, schedule_of
from outpace.records.certificate import Certificate, ParityVerdict
from outpace.records.errors import BadInputError, join_or
from outpace.records.model import ModelSpec
from outpace.records.optimizers import EXACT
from outpace.records.pipelines import default_microbatches
from outpace.records.plan import AXES, Plan, Strategy
from outpace.records.precisions import Precision
from outpace.records.ranks import Ranks
from outpace.training.collective_counter import CollectiveCounter


def tiny_spec(plans: Iterable[Plan]) -> ModelSpec:
    """Return a small spec with features that often break: tied weights, grouped queries.

    It has one more layer than the plans have stages, so that stages are uneven, and enough key
    heads for tensor parallelism to split.
    """
    plans = list(plans)
    kv_heads = max([2, *(plan.tp for plan in plans)])
    layers = max([5, *(plan.stages + 1 for plan in plans)])
    given = [len(plan.checkpoint_layers) for plan in plans if plan.checkpoint_layers]
    layers = max(given, default=layers)
    return ModelSpec.parse(
        {"family": "llama", "layers": layers, "hidden": 16 * kv_heads,
         "heads": 2 * kv_heads, "kv_heads": kv_heads, "ffn": 24 * kv_heads, "vocab": 96,
         "max_positions": 64, "tied": True},
        "verify",
    )  # fmt: skip


def tiny_like(spec: ModelSpec, plans: Iterable[Plan]) -> ModelSpec:
    """Return a small model with `spec`'s features, as large as `tiny_spec`.

    Attention windows are short, and there is no dropout.
    """
    tiny = tiny_spec(plans)
    grouped = spec.kv_heads < spec.heads
    sizes = {
        name: getattr(tiny, name)
        for name in ("layers", "hidden", "heads", "head_dim", "ffn", "vocab", "max_positions")
    }
    return spec.model_copy(
        update={
            **sizes,
            "kv_heads": tiny.kv_heads if grouped else tiny.heads,
            "sliding_window": None if spec.sliding_window is None else 8,
            "window_layers": None if spec.window_layers is None else (0, 2),
            "dropout": 0.0,
        }
    )


def plan_of_run(plan: Plan, precision: Precision) -> Plan:
    """Return a run's plan for verification, with small micro-batches.

    Options by which results would differ from one process (compression of gradients, dropout of
    adapters, optimizers that round) are replaced, and compilation is switched off.
    """
    samples = max(1, Trial.global_batch // (2 * plan.data_parallel))
    parts = plan.pp_microbatches
    if samples % parts:
        parts = default_microbatches(plan.schedule, plan.pp, samples)
    changed = {
        "micro_batch": samples // parts,
        "pp_microbatches": parts,
        "precision": precision,
        "compress_gradients": "none",
        "compile": False,
        "optimizer": plan.optimizer if plan.optimizer in EXACT else "adamw-fused",
        "optimizer_in_backward": False,
        "lora_dropout": 0.0,
    }
    return Plan.parse({**plan.model_dump(), **changed}, "run.json")


def plans_for(strategy: Strategy, world_size: int, precision: Precision = "fp64") -> Iterator[Plan]:
    """Yield the plans to verify for a strategy on `world_size` ranks.

    This is one plan for most strategies. Strategy ps has further plans in which servers run the
    optimizer, or in which workers have two devices. Strategy 3d has a plan for each choice of axes
    with two ranks per axis, if `world_size` is a power of two.
    """
    if strategy == "3d" and world_size & (world_size - 1) == 0:
        for chosen in combinations(AXES, world_size.bit_length() - 1):
            asked: dict[str, int | None] = {axis: 2 if axis in chosen else 1 for axis in AXES}
            yield plan_for(strategy, world_size, precision, asked)
        return
    plan = plan_for(strategy, world_size, precision)
    yield plan
    if strategy == "ps":
        yield plan.model_copy(update={"server_updates": True})
        if plan.dp_replicate % 2 == 0:
            yield plan.model_copy(update={"worker_devices": 2})


def plan_for(
    strategy: Strategy,
    world_size: int,
    precision: Precision = "fp64",
    asked: Mapping[str, int | None] = MappingProxyType({}),
) -> Plan:
    """Return a strategy's plan on `world_size` ranks, with two gradient accumulation steps.

    `asked` fixes the sizes of some axes.
    """
    # ps gets as many servers as workers.
    servers = count_servers(strategy, world_size, world_size // 2 if strategy == "ps" else None)
    sizes = fill_axes(strategy, 1 if strategy == "single" else world_size - servers, asked)
    shares = sizes["dp_replicate"] * sizes["dp_shard"]
    samples, left = divmod(Trial.global_batch, 2 * shares)
    if left or not samples:
        raise BadInputError(
            f"the trial's {Trial.global_batch} samples cannot be divided among {shares} ranks with "
            f"two micro-batches each. Verify on {join_or((1, 2, 4, 8))} processes."
        )
    schedule = schedule_of(strategy, sizes["pp"], "1f1b")
    parts = default_microbatches(schedule, sizes["pp"], samples)
    values = {"micro_batch": samples // parts, "pp_microbatches": parts, "precision": precision}
    return Plan.parse({"strategy": strategy, "servers": servers, **sizes, **values}, "verify")


def verify(
    plans: Sequence[Plan],
    given: Trial,
    groups: Groups,
    spoil: Callable[[Layout], None] = lambda layout: None,
    skipped: Mapping[str, str] = MappingProxyType({}),
    notes: Sequence[str] = (),
) -> Certificate:
    """Compare training under each plan with training in one process, and return the certificate.

    All ranks must call this function. `skipped` has the reason for each strategy left out, and
    `notes` say what was not compared. Tests pass `spoil`, which makes each layout wrong.
    """
    for plan in plans:
        if plan.compress_gradients != "none":
            raise BadInputError(
                f"compress_gradients {plan.compress_gradients} drops part of the gradients, so the "
                "plan's steps differ from those of a single process. Verify it with "
                "compress_gradients none."
            )
        if plan.optimizer not in EXACT:
            raise BadInputError(
                f"optimizer {plan.optimizer} rounds its states or updates, differently under each "
                f"plan. Verify the plan with optimizer {join_or(EXACT)}; "
                "docs/concepts/optimizers.md compares the losses of optimizers."
            )
    expected = {}
    verdicts = []
    for plan in plans:
        plan, trial = _adapt_to_step_in_backward(plan, given)
        of = _reference_key(plan)
        if of not in expected:
            expected[of] = reference(trial, plan)
        alone = plan.world_size == 1
        ranks = Ranks() if alone else groups.ranks
        wire = CollectiveCounter()
        found = train_under_plan(trial, plan, ranks, groups.control, wire, spoil)
        tokens = trial.global_batch * trial.seq_len
        allowed = tolerance_of(plan, trial.spec, tokens=tokens, steps=trial.steps)
        seen = list(differences(expected[of], found, allowed))
        missing = expected[of].names() - found.names()
        formula = step_traffic(
            plan,
            trial.spec,
            global_batch=trial.global_batch,
            seq_len=trial.seq_len,
            rank=ranks.rank,
        )
        verdicts.append(_make_verdict(plan, allowed, seen, missing, (wire.tally, formula), groups))
    head, dirty = commit()
    return Certificate(
        verdicts=tuple(verdicts),
        model=given.spec,
        notes=tuple(notes),
        processes=groups.ranks.world_size,
        steps=given.steps,
        global_batch=given.global_batch,
        seq_len=given.seq_len,
        versions=versions(),
        commit=head,
        uncommitted_changes=bool(dirty),
        machine=identify(find_accelerator),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        skipped=dict(skipped),
    )


def _reference_key(plan: Plan) -> tuple[Any, ...]:
    """Return the fields of a plan that also change the result of training in one process."""
    lora = (plan.lora_rank, plan.lora_scale, plan.lora_targets, plan.base)
    return (plan.precision, plan.optimizer, plan.optimizer_in_backward, *lora)


def _adapt_to_step_in_backward(plan: Plan, trial: Trial) -> tuple[Plan, Trial]:
    """Adapt a plan and its trial to an optimizer that runs in the backward pass.

    Micro-batches are merged into one; padding and gradient clipping are switched off.
    """
    if not plan.optimizer_in_backward:
        return plan, trial
    whole = plan.micro_batch * plan.accumulation(trial.global_batch)
    plan = plan.model_copy(update={"micro_batch": whole})
    return plan, replace(trial, clip=0.0, padded=False)


def _make_verdict(
    plan: Plan,
    allowed: Tolerance,
    seen: list[Difference],
    missing: set[str],
    traffic: tuple[Tally, Tally | None],
    groups: Groups,
) -> ParityVerdict:
    """Combine the differences that all ranks found into one verdict on the plan.

    `missing` names tensors that this rank lacks. `traffic` is the communication that was counted,
    and the prediction of it by the planner. All ranks must call this function.
    """
    worst = max(seen, key=lambda difference: difference.relative)
    wrong = [difference for difference in seen if not difference.relative <= allowed.relative]
    first = min(wrong, key=lambda difference: difference.cause, default=None)
    said = gather_objects((worst, first, missing, *traffic), groups.control)
    worst = max((one[0] for one in said), key=lambda difference: difference.relative)
    causes = [one[1] for one in said if one[1] is not None]
    nowhere = set.intersection(*(one[2] for one in said))
    sent, formula = max((one[3:] for one in said), key=lambda both: both[0].bytes)
    reason = None
    if nowhere:
        reason = f"no rank has {min(nowhere)}"
    elif causes:
        cause = min(causes, key=lambda difference: difference.cause)
        reason = f"{cause} is off by {cause.relative:.2g} of its scale"
    return ParityVerdict(
        strategy=plan.strategy,
        mesh=plan.mesh,
        precision=plan.precision,
        passed=reason is None,
        worst_relative_difference=worst.relative if worst.relative < math.inf else None,
        worst_tensor=str(worst),
        tolerance=allowed.relative,
        # Horovod's collectives bypass torch.
        bytes_on_wire=None if plan.strategy == "horovod" else sent.bytes,
        bytes_formula=None if formula is None else formula.bytes,
        collectives=dict(sent.collectives),
        collectives_formula=None if formula is None else dict(formula.collectives),
        bytes_by_kind=dict(sent.bytes_by_kind),
        bytes_by_kind_formula=None if formula is None else dict(formula.bytes_by_kind),
        reason=reason,
    )
