"""The space of plans, as columns: each possible layout of the ranks with each set of options."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from outpace.planner.plan_columns import (
    MODES,
    OFFLOADS,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULE_NAMES,
    STRATEGIES,
    Bools,
    Floats,
    Ints,
    PlanBatch,
    distinct_rows,
)
from outpace.planner.search.axis_sizes import divisors, expert_axes, meshes
from outpace.planner.search.plan_masks import (
    adapters_match,
    options_match,
    possible_mask,
)
from outpace.planner.search.search_request import (
    OFFLOAD_PLACES,
    OFFLOADED,
    PlanFilter,
    SearchRequest,
    offload_places,
)
from outpace.records.optimizers import OptimizerName, default_optimizer
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Offload, Plan, Strategy

# A mode of recomputation, and the interval of its layers: every layer, or every second one.
_MODES: tuple[tuple[str, int], ...] = (
    ("none", 1), ("selective", 1), ("attention", 1), ("full", 2), ("full", 1),
)  # fmt: skip
_MOST_MICRO_BATCH = 64
_MOST_VIRTUAL = 8
_LOOPS = tuple(
    name for name, one in SCHEDULES.items() if one.stages_per_rank > 1 and one.placement != "v"
)
# Columns of a layout: ranks by axis, schedule and micro-batch.
_COLUMNS = (
    "strategy", "dp_replicate", "dp_shard", "zero", "tp", "cp", "pp", "ep", "schedule",
    "stages_per_rank", "micro_batch", "microbatches", "passes", "servers",
)  # fmt: skip
_Row = tuple[int, ...]
# Settings of a plan whose columns have other names.
_ASKED = {"pp_microbatches": "microbatches", "virtual_stages": "stages_per_rank"}
_WORDS: Mapping[str, Sequence[str]] = {"strategy": STRATEGIES, "pp_schedule": SCHEDULE_NAMES}
Options = dict[str, Any]


def layouts(wanted: SearchRequest) -> PlanBatch:
    """Return every layout without memory options.

    Required memory options are left out too, because they only make a layout slower. Varied
    settings that make some layouts faster and others slower form separate layouts.
    """
    rows = np.array([*_layout_rows(wanted)], np.int64).reshape(-1, len(_COLUMNS))
    values: dict[str, Any] = dict(zip(_COLUMNS, rows.T, strict=True))
    optimizer, in_backward = _optimizer_choices(wanted)[0]
    plain = _make_options(wanted, ("none", 1), OFFLOAD_PLACES[0], False, optimizer, in_backward)
    count = len(rows)
    keep = wanted.keep
    among = values["dp_shard"] * values["cp"]
    found = PlanBatch(
        **values,
        etp=np.where(among % values["ep"] == 0, values["tp"], 1),
        **{
            "precision": np.full(count, PRECISIONS.index(keep.get("precision", wanted.precision))),
            **{name: _repeat_value(value, count) for name, value in plain.items()},
        },
        compile=np.full(count, bool(keep.get("compile", False))),
        sequence_parallel=np.full(count, bool(keep.get("sequence_parallel", True))),
        async_tp=np.full(count, bool(keep.get("async_tp", False))),
        even_stages=np.full(count, keep.get("stage_split", "cost") == "even"),
        bucket_bytes=np.full(count, int(keep.get("bucket_mib", 25)) * 2**20),
        adapters=np.full(count, wanted.adapters, dtype=object),
    )
    found = _vary_settings(found, wanted.vary)
    fine = _requirements_mask(found, keep) & options_match(found) & adapters_match(found)
    if wanted.trained:
        fine &= ~(found.async_tp & (found.tp > 1)) & ~(found.even_stages & (found.pp > 1))
    found = found.select(fine)
    if wanted.accepts is None or not len(found):
        return found
    return found.select(wanted.accepts.accepts_layouts(found))


def _vary_settings(found: PlanBatch, vary: Mapping[str, Sequence[Any]]) -> PlanBatch:
    """Combine each layout with every varied value.

    If a setting makes no difference to a layout, only its first value is used.
    """
    for name in ("precision", "compile", "stage_split", "sequence_parallel", "async_tp"):
        if name not in vary:
            continue
        column = "even_stages" if name == "stage_split" else name
        codes = [
            PRECISIONS.index(value) if name == "precision" else value == "even"
            if name == "stage_split" else value for value in vary[name]
        ]  # fmt: skip
        repeated = found.select(np.repeat(np.arange(len(found)), len(codes)))
        found = replace(repeated, **{column: np.tile(np.array(codes), len(found))})
        axis = {"stage_split": found.pp, "sequence_parallel": found.tp, "async_tp": found.tp}
        if name in axis:
            found = found.select((axis[name] > 1) | (getattr(found, column) == codes[0]))
    return found


def has_plans(wanted: SearchRequest) -> bool:
    """Return whether any plan satisfies the request, whether or not it fits into memory."""
    found, chosen = layouts(wanted), list(memory_options(wanted))
    return bool(len(found) and chosen and _allowed_options(found, chosen, wanted.accepts).any())


def _repeat_value(value: Any, count: int) -> Any:
    array = np.asarray(value)
    return np.broadcast_to(array, (count, *array.shape)).copy()


def expand(
    columns: PlanBatch, chosen: Sequence[Options], accepts: PlanFilter | None = None
) -> PlanBatch:
    """Combine every layout with all options that it allows and the trainer can express."""
    return _combine(columns, chosen, *np.nonzero(_allowed_options(columns, chosen, accepts)))


def expand_timed(
    columns: PlanBatch,
    chosen: Sequence[Options],
    seconds: Callable[[PlanBatch], Floats],
    able: Callable[[PlanBatch], Bools] | None = None,
    accepts: PlanFilter | None = None,
) -> tuple[PlanBatch, Floats]:
    """Return the plans of `expand` for which `able` holds, and their step times in seconds.

    Plans that differ only in a chunked loss take equally long and have the same permanent tensors,
    so only one of the two is estimated.
    """
    place, option = np.nonzero(_allowed_options(columns, chosen, accepts))
    alike = [{**one, "chunked_loss": None} for one in chosen]
    follows = np.array([False, *(one == other for one, other in pairwise(alike))])
    again = follows[option]
    again[1:] &= (place[1:] == place[:-1]) & (option[1:] == option[:-1] + 1)
    once, of = _combine(columns, chosen, place[~again], option[~again]), np.cumsum(~again) - 1
    if able is not None:
        fine = able(once)
        kept = fine[of]
        place, option, of = place[kept], option[kept], (np.cumsum(fine) - 1)[of[kept]]
        once = once.select(fine)
    return _combine(columns, chosen, place, option), seconds(once)[of]


def _combine(columns: PlanBatch, chosen: Sequence[Options], place: Ints, option: Ints) -> PlanBatch:
    """Return layouts with options: entry i has layout `place[i]` and the option `option[i]`."""
    values = {
        f.name: getattr(columns, f.name)[place]
        for f in fields(PlanBatch)
        if f.name not in chosen[0]
    }
    for name in chosen[0]:
        values[name] = np.array([options[name] for options in chosen])[option]
    return PlanBatch(**values)


def _allowed_options(
    columns: PlanBatch, chosen: Sequence[Options], accepts: PlanFilter | None
) -> Any:
    """Return which options each layout allows, with one row per layout.

    Layouts that are equal in everything that `possible_mask` and `accepts` read allow the same
    options, so only one layout of each kind is checked.
    """
    c = columns
    read = [c.strategy, c.zero, c.schedule, c.precision, c.optimizer, c.compile, c.in_backward,
            c.tp > 1, c.pp > 1, c.dp_replicate > 1]  # fmt: skip
    if accepts is not None:
        read += [c.dp_shard > 1, c.cp > 1, c.ep > 1]
    first, kind = distinct_rows([np.asarray(one, np.int64) for one in read])
    some, count = columns.select(np.repeat(first, len(chosen))), len(first)
    values = {}
    for name in chosen[0]:
        array = np.array([options[name] for options in chosen])
        values[name] = np.tile(array, (count, *[1] * (array.ndim - 1)))
    combined = replace(some, **values)
    found = possible_mask(combined)
    if accepts is not None:
        able = np.flatnonzero(found)
        found[able] = accepts.accepts_options(combined.select(able))
    return found.reshape(count, len(chosen))[kind]


def _requirements_mask(c: PlanBatch, keep: Mapping[str, Any]) -> Any:
    fine = np.ones(len(c), bool)
    for name, value in keep.items():
        if name in _WORDS:
            column = c.strategy if name == "strategy" else c.schedule
            fine &= column == list(_WORDS[name]).index(value)
        elif _ASKED.get(name, name) in _COLUMNS:
            fine &= getattr(c, _ASKED.get(name, name)) == value
    return fine


def memory_options(wanted: SearchRequest) -> Iterator[Options]:
    """Yield every combination of options that the request allows, the simplest first."""
    keep = wanted.keep
    modes = [
        (mode, every)
        for mode, every in _MODES
        if keep.get("checkpointing", mode) == mode and keep.get("checkpoint_every", every) == every
    ]
    every = keep.get("checkpoint_every", 1)
    if every > 2 and keep.get("checkpointing") != "none":
        modes = [(mode, every) for mode in MODES[1:] if keep.get("checkpointing", mode) == mode]
    losses = [keep["loss"] == "chunked"] if "loss" in keep else [False, True]
    for (name, now), three, mode, chunked in product(
        _optimizer_choices(wanted), offload_places(wanted), modes, losses
    ):
        yield _make_options(wanted, mode, three, chunked, name, now)


def _optimizer_choices(wanted: SearchRequest) -> list[tuple[OptimizerName, bool]]:
    """Return pairs of an optimizer and whether it runs in the backward, fastest first."""
    keep = wanted.keep
    precision = keep.get("precision", wanted.precision)
    own = keep.get("optimizer", wanted.optimizer or default_optimizer(precision))
    names = wanted.vary.get("optimizer", (own,))
    whens = wanted.vary.get("optimizer_in_backward", (keep.get("optimizer_in_backward", False),))
    return [*product(names, whens)]


def _make_options(
    wanted: SearchRequest,
    mode: tuple[str, int],
    places: tuple[Offload, Offload, Offload],
    chunked: bool,
    optimizer: OptimizerName,
    in_backward: bool,
) -> Options:
    shares, layers = [0.0] * len(MODES), wanted.outline.layers
    again = math.ceil(layers / mode[1])  # every `mode[1]`-th layer, from the first
    shares[[*MODES].index(mode[0])] += again / layers  # type: ignore[arg-type]
    shares[0] += (layers - again) / layers
    activations, parameters, state = (OFFLOADS.index(place) for place in places)
    precision: dict[str, int] = {}
    away = wanted.offloaded_precision
    if away is not None and "precision" not in {*wanted.keep, *wanted.vary}:
        chosen = away if parameters or state else wanted.precision
        precision = {"precision": PRECISIONS.index(chosen)}
    return {
        **precision,
        "modes": shares,
        "offload_activations": activations,
        "offload_parameters": parameters,
        "offload_optimizer": state,
        "optimizer": OPTIMIZERS.index(optimizer),
        "chunked_loss": chunked,
        "in_backward": in_backward,
    }


def _layout_rows(wanted: SearchRequest) -> Iterator[_Row]:
    for tp, cp, pp in meshes(wanted):
        replicas = wanted.world // (tp * cp * pp)
        if wanted.global_batch % replicas:
            continue
        share = wanted.global_batch // replicas
        sizes = _micro_batch_sizes(share, wanted.keep)
        for rep, shard, zero in _data_parallel_axes(replicas, tp, cp, wanted):
            strategy = _strategy_of_axes(rep, shard, zero, tp, cp, pp)
            if wanted.trained and strategy == "3d" and zero in (1, 2):
                continue
            for ep, micro in product(expert_axes(shard * cp * tp, wanted), sizes):
                axes = (rep, shard, zero, tp, cp, pp, ep)
                name = "3d" if ep > 1 else strategy
                if name in wanted.without:
                    continue
                yield from _schedule_rows(name, axes, micro, share // micro, wanted)
    if wanted.naive:
        yield from _baseline_rows(wanted)


def _data_parallel_axes(
    replicas: int, tp: int, cp: int, wanted: SearchRequest
) -> Iterator[tuple[int, int, int]]:
    """Yield (dp_replicate, dp_shard, ZeRO stage) with replicas alone, shards alone, or both."""
    yield replicas, 1, 0
    if replicas == 1:
        return
    for zero in (1, 2, 3):
        yield 1, replicas, zero
    between = divisors(replicas)[1:-1]
    inside = wanted.per_node // (tp * cp)
    sizes = {inside, inside * 2, inside * 4, inside * 8}.intersection(between)
    if not sizes and wanted.keep.get("strategy") == "hsdp":  # on a single node
        sizes = set(between)
    asked = {wanted.keep.get("dp_shard"), replicas / wanted.keep.get("dp_replicate", replicas)}
    for size in between:
        if size in sizes or size in asked:
            yield replicas // size, size, 3


def _strategy_of_axes(rep: int, shard: int, zero: int, tp: int, cp: int, pp: int) -> Strategy:
    """Return the strategy that splits these axes; a pipeline gets its schedule's name later."""
    alone: dict[str, Strategy] = {"tp": "tp", "cp": "cp", "pp": "1f1b"}
    axes = [name for name, size in (("tp", tp), ("cp", cp), ("pp", pp)) if size > 1]
    if axes:
        return "3d" if rep > 1 or shard > 1 or len(axes) > 1 else alone[axes[0]]
    if rep > 1:
        return "hsdp" if shard > 1 else "ddp"
    names: tuple[Strategy, ...] = ("single", "zero1", "zero2", "zero3")
    return names[zero]


def _micro_batch_sizes(share: int, keep: Mapping[str, Any]) -> list[int]:
    """Return micro-batch sizes for a rank's samples: divisors, or powers of two if there are many.

    A required micro-batch is the only one, and must divide the samples.
    """
    if "micro_batch" in keep:
        return [keep["micro_batch"]] if share % keep["micro_batch"] == 0 else []
    if "pp_microbatches" in keep:
        return divisors(share)
    found = [n for n in divisors(share) if n <= _MOST_MICRO_BATCH]
    powers = [n for n in found if n & (n - 1) == 0]
    return found if len(found) <= 6 else sorted({*powers, found[-1]})


def _schedule_rows(
    strategy: Strategy, axes: tuple[int, ...], micro: int, parts: int, wanted: SearchRequest
) -> Iterator[_Row]:
    layers, pp = wanted.outline.layers, axes[5]
    if pp == 1:
        yield (STRATEGIES.index(strategy), *axes, 0, 1, micro, 1, parts, 0)
        return
    for schedule in SCHEDULE_NAMES[2:]:
        if wanted.trained and strategy == "3d" and SCHEDULES[schedule].splits_backward:
            continue
        own = SCHEDULES[schedule].stages_per_rank
        many = range(own, own + 1)
        if schedule in _LOOPS and not wanted.trained:
            many = range(own, max(_MOST_VIRTUAL, wanted.keep.get("virtual_stages", 0)) + 1)
        name: Strategy = schedule if strategy == "1f1b" else strategy  # type: ignore[assignment]
        for count in many:
            even = layers % (pp * count) == 0 or count == own
            if even and pp * count <= layers and _schedule_allows(schedule, pp, count, parts):
                place = SCHEDULE_NAMES.index(schedule)
                yield (STRATEGIES.index(name), *axes, place, count, micro, parts, 1, 0)


def _schedule_allows(schedule: str, pp: int, count: int, parts: int) -> bool:
    """Return whether a schedule allows that many micro-batches (`records.pipelines.refusal`)."""
    if schedule == "1f1b":
        return parts >= pp
    if schedule == "dualpipev":
        return parts >= pp * count
    if schedule in ("interleaved", "zb"):
        return parts % max(1, parts // pp) == 0 and parts % pp == 0
    return True


def _baseline_rows(wanted: SearchRequest) -> Iterator[_Row]:
    world, batch = wanted.world, wanted.global_batch
    if 1 < world <= wanted.outline.layers:
        for micro in _micro_batch_sizes(batch, wanted.keep):
            axes = (1, 1, 0, 1, 1, world, 1)
            yield (STRATEGIES.index("mp"), *axes, 1, 1, micro, 1, batch // micro, 0)
    named: tuple[tuple[Strategy, int], ...] = (("dp", 0), ("ring", 0), ("ps", 1))
    for strategy, servers in named:
        ranks = world - servers
        if ranks < 2 or batch % ranks or (strategy == "dp" and world > wanted.per_node):
            continue
        for micro in _micro_batch_sizes(batch // ranks, wanted.keep):
            passes = batch // ranks // micro
            axes = (ranks, 1, 0, 1, 1, 1, 1)
            yield (STRATEGIES.index(strategy), *axes, 0, 1, micro, 1, passes, servers)


def to_plan(c: PlanBatch, place: int) -> Plan:
    """Return the plan at index `place` as a Plan."""
    strategy = STRATEGIES[c.strategy[place]]
    mode, every = _mode_and_interval(c.modes[place])
    schedule = SCHEDULE_NAMES[c.schedule[place]]
    count = int(c.stages_per_rank[place])
    values: dict[str, Any] = {
        "strategy": strategy,
        **{name: int(getattr(c, name)[place])
           for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "micro_batch",
                        "servers")},
        "pp_microbatches": int(c.microbatches[place]),
        "sequence_parallel": bool(c.sequence_parallel[place]),
        "async_tp": bool(c.async_tp[place]),
        "precision": PRECISIONS[c.precision[place]],
        "optimizer": OPTIMIZERS[c.optimizer[place]],
        "checkpointing": mode,
        "checkpoint_every": every,
        "loss": "chunked" if c.chunked_loss[place] else "auto",
        "compile": bool(c.compile[place]),
        "optimizer_in_backward": bool(c.in_backward[place]),
        "bucket_mib": int(c.bucket_bytes[place]) // 2**20,
        "stage_split": "even" if c.even_stages[place] else "cost",
        **{name: OFFLOADS[getattr(c, name)[place]] for name in OFFLOADED},
    }  # fmt: skip
    if c.adapters[place] is not None:
        values |= c.adapters[place].values
    if schedule not in ("none", "mp") and count != SCHEDULES[schedule].stages_per_rank:
        values["virtual_stages"] = count
    if strategy == "3d":
        values["zero"] = int(c.zero[place]) or 3
        if schedule != "none":
            values["pp_schedule"] = schedule
    return Plan.parse(values, "plan")


def _mode_and_interval(shares: Any) -> tuple[str, int]:
    for place in range(len(MODES) - 1, 0, -1):
        if shares[place]:
            return MODES[place], round(1 / float(shares[place]))
    return "none", 1
