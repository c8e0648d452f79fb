"""Measurement of collectives: times by size on every axis, links, stragglers, overlap."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from outpace.jobs.ranks.hang_watchdog import RankActivity, hang_watchdog
from outpace.jobs.ranks.process_groups import Groups
from outpace.parallel.rank_objects import gather_objects
from outpace.probing.collectives.advice import (
    network_advice,
    pair_advice,
    rank_advice,
    wander_notes,
    world_notes,
)
from outpace.probing.collectives.buffers import Buffers
from outpace.probing.collectives.cases import (
    FULL_BYTES,
    QUICK_BYTES,
    AxisPlace,
    SizeLimits,
    cases_by_size,
    check_again,
)
from outpace.probing.collectives.groups import Axis, Nodes, axes_of, nodes_of
from outpace.probing.collectives.overlap import OVERLAPPED, probe_overlap
from outpace.probing.collectives.pairwise import pair_figures, pair_fits, ranks_figures, work_of
from outpace.probing.hardware.process_memory import free_bytes
from outpace.probing.timing.interleave import Turns, interleave_turns, wrap_turns
from outpace.probing.timing.link_model import COLLECTIVES, fit_link
from outpace.probing.timing.measure import Case, Effort, measure, rounds_of
from outpace.probing.timing.rank_clock import RanksClock, patient_clock
from outpace.probing.timing.section import ProbeSection
from outpace.records.errors import BadInputError
from outpace.records.figure import Figure

# Samples per case within the time budget.
_QUICK_SAMPLES, _SAMPLES = 16, 60
# Shares of the time budget; the rest is overhead.
_CASES, _PAIRS, _RANKS, _OVERLAP = 0.55, 0.10, 0.08, 0.12
_TIMED = 0.9  # share of the budget spent on timing; the rest is for verifying results
_ALL_PAIRS = 64
_TOP_BYTES = 4 << 30

T = TypeVar("T")


@dataclass(frozen=True)
class _CollectivesRun:
    """Ranks, clock, time budget and callbacks that all measurements of collectives share.

    `doing`: this rank's activity, which error messages name.
    """

    groups: Groups
    place: AxisPlace  # position among all ranks
    clock: RanksClock
    nodes: Nodes
    quick: bool
    budget_s: float
    doing: RankActivity
    progress: Callable[[float], None]

    @property
    def rounds(self) -> int:
        return rounds_of(self.quick)

    @property
    def samples(self) -> int:
        return _QUICK_SAMPLES if self.quick else _SAMPLES

    def separate_place(self) -> AxisPlace:
        """Return this rank's place among all ranks, with new buffers.

        Measurements that are interleaved with others need buffers of their own.
        """
        buffers = self.place.buffers
        return replace(self.place, buffers=Buffers(buffers.device, buffers.rank))

    def note_turns(self, what: str, turns: Turns[T]) -> Turns[T]:
        """Record `what` as this rank's activity while any of the turns runs.

        A turn is a part of a measurement, after which another measurement may have its turn.
        """

        @contextmanager
        def note() -> Iterator[None]:
            self.doing.what = what
            yield

        return wrap_turns(turns, note)


def probe_collectives(
    groups: Groups,
    device: torch.device,
    quick: bool,
    budget_s: float,
    progress: Callable[[float], None] = lambda share: None,
    only: str | None = None,
) -> Turns[ProbeSection]:
    """Measure communication between ranks. Call this on every rank; rank 0 gets the result.

    `only`: measure only this collective, at several array sizes over each axis of ranks, and fit
    models of the links. Array sizes are limited by memory and time, and results are verified.
    Raises RankLostError on the remaining ranks if a rank dies or hangs, naming the rank and the
    collective, and WrongResultError if a collective computes a wrong result.
    """
    if only is not None and only not in COLLECTIVES:
        raise BadInputError(f"there is no collective {only!r}: {', '.join(COLLECTIVES)}")
    if groups.ranks.world_size < 2:
        return ProbeSection(
            notes=(
                ("one rank: no collectives were measured, since there is nothing to communicate"),
            )
        )
    doing = RankActivity()
    with hang_watchdog(groups, doing):
        run = _prepare_run(groups, device, quick, budget_s, doing, progress)
        found = ProbeSection(notes=tuple(world_notes(run.nodes)))
        if only is not None:
            parts = {only: _measure_by_size(run, (only,), 1.0)}
        else:
            parts = {
                "collectives": _measure_by_size(run, COLLECTIVES, _CASES),
                "each rank's own speed": _measure_rank_speeds(run),
                "send/recv between pairs": _measure_pairs(run),
                "collectives while computing": _measure_overlap(run),
            }
        turns = interleave_turns(*(run.note_turns(what, part) for what, part in parts.items()))
        found = sum((yield from turns), found)
        doing.what = "the end"
        dist.barrier(groups.control)
    progress(1.0)
    return found


def _prepare_run(
    groups: Groups, device: torch.device, quick: bool, budget_s: float, activity: RankActivity,
    progress: Callable[[float], None],
) -> _CollectivesRun:  # fmt: skip
    """Create this rank's clock and buffers, and find out which ranks share a node.

    All ranks must call this.
    """
    ranks = groups.ranks
    nodes = nodes_of(gather_objects((ranks.local_rank, ranks.local_world_size), groups.control))
    everyone = dist.group.WORLD
    assert everyone is not None
    place = AxisPlace(
        axes_of(nodes)[0], everyone, groups.control, ranks.rank, backend_of(device),
        Buffers(device, ranks.rank),
    )  # fmt: skip
    clock = RanksClock(patient_clock(device, everyone), groups.control)
    return _CollectivesRun(groups, place, clock, nodes, quick, budget_s, activity, progress)


def backend_of(device: torch.device) -> str:
    """Return the default group's backend for this device's tensors: 'gloo' or 'nccl'."""
    return str(dist.group.WORLD._get_backend(device).name())  # type: ignore[union-attr]


def _measure_by_size(
    run: _CollectivesRun, collectives: Sequence[str], share: float
) -> Turns[ProbeSection]:
    """Measure each collective at several array sizes, over each axis of ranks.

    All of these measurements take turns in the same rounds. `share`: their share of the run's time
    budget.
    """
    axes = axes_of(run.nodes)
    budget_s = share * run.budget_s
    # Half of the budget limits the largest array. Each sample takes two calls, one of them the
    # clock's, and all smaller sizes together take a third of the largest one's time.
    calls = 2 * run.samples * 4 / 3 * len(axes) * len(collectives)
    limits = SizeLimits(_largest_array_bytes(run), budget_s / 2 / calls)
    sizes = QUICK_BYTES if run.quick else FULL_BYTES
    cases: list[Case] = []
    for place in (_create_axis_groups(run, axis) for axis in axes):
        for name in collectives:
            run.doing.what = f"{name} over the axis {place.axis.name}"
            cases += cases_by_size(name, place, sizes, limits, run.clock)
    run.place.buffers.release_dependents()
    sample_s = budget_s / 2 / (run.samples * max(1, len(cases)))
    effort = Effort(budget_s * _TIMED, run.rounds, min(0.04, max(0.001, sample_s)), wakes=False)
    said = [_note_case(run.doing, one) for one in cases]
    figures = yield from measure(said, run.clock, effort, run.progress)
    check_again(said, run.place.buffers)
    series = [
        [f for f in figures if f.key.kind == name and f.key.has(axis=axis.name)]
        for axis in axes
        for name in collectives
    ]
    fits = [fit for of in series if (fit := fit_link(of)) is not None]
    return ProbeSection(
        tuple(figures), tuple(network_advice(fits, run.nodes)), fits=tuple(fits),
        said=tuple(wander_notes(figures)),
    )  # fmt: skip


def _create_axis_groups(run: _CollectivesRun, axis: Axis) -> AxisPlace:
    """Create the process groups of an axis; return this rank's place with its own group.

    All ranks must call this, since each of them creates all groups.
    """
    if axis.name == "all":
        return run.place
    timeout = run.place.group._get_backend(run.place.buffers.device).options._timeout
    own = run.place.group
    for members in axis.groups:  # every rank creates all groups, in the same order
        made = dist.new_group(list(members), timeout=timeout)
        if made is not None and run.groups.ranks.rank in members:
            own = made
    return replace(run.place, axis=axis, group=own)


def _largest_array_bytes(run: _CollectivesRun) -> int:
    """Return the size of the largest array to measure, in bytes, the same on all ranks.

    It is an eighth of the free memory of the rank that has the least, and at most 4 GiB. All ranks
    must call this.
    """
    device = run.place.buffers.device
    if device.type == "cuda":
        share = torch.cuda.mem_get_info(device)[0] // 8
    else:
        share = free_bytes() // 8 // run.groups.ranks.local_world_size
    least = torch.tensor([min(share, _TOP_BYTES)])
    dist.all_reduce(least, dist.ReduceOp.MIN, group=run.groups.control)
    return int(least.item())


def _note_case(activity: RankActivity, case: Case) -> Case:
    """Return a copy of the case that becomes this rank's recorded activity when it starts."""

    def make() -> Callable[[], object]:
        of = case.key.of
        activity.what = f"{case.key.kind} of {of['bytes']} bytes over the axis {of['axis']}"
        return case.make()

    return replace(case, make=make)


def _measure_rank_speeds(run: _CollectivesRun) -> Turns[ProbeSection]:
    """Measure the speed of each rank while all ranks compute."""
    work, budget_s = work_of(run.place.buffers.device), _RANKS * run.budget_s
    figures = yield from ranks_figures(work, run.place, run.clock, run.rounds, budget_s)
    return ProbeSection(tuple(figures), advice=tuple(rank_advice(figures)))


def _measure_pairs(run: _CollectivesRun) -> Turns[ProbeSection]:
    if run.groups.ranks.world_size == 2:
        return ProbeSection()  # the only pair is all ranks
    sizes = (4, 1 << 20) if run.quick else (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
    budget_s = _PAIRS * run.budget_s
    here = run.separate_place()
    pairs = yield from pair_figures(run.nodes, here, sizes, run.clock, run.rounds, budget_s)
    advice, notes = tuple(pair_advice(pairs, run.nodes)), []
    if len(pairs) > _ALL_PAIRS:
        named = {key for one in advice for key in one.of}
        kept = {pair: of for pair, of in pairs.items() if any(f.key in named for f in of)}
        notes = [f"{len(pairs)} pairs were measured; only slow ones are listed"]
        pairs = kept
    figures = [figure for of in pairs.values() for figure in of]
    return ProbeSection(tuple(figures), advice, tuple(notes), tuple(pair_fits(pairs)))


def _measure_overlap(run: _CollectivesRun) -> Turns[ProbeSection]:
    size = min(
        (4 << 20) if run.place.buffers.device.type == "cpu" else (256 << 20),
        _largest_array_bytes(run),
    )
    sizes = (size,) if run.quick else (size // 16, size)
    budget_s = _OVERLAP * run.budget_s
    sample_s = budget_s / (6 * len(OVERLAPPED) * len(sizes) * run.samples)
    effort = Effort(budget_s, run.rounds, sample_s, wakes=False)
    found = yield from probe_overlap(run.separate_place(), sizes, run.clock, effort)
    said = [note for figures in found for note in overlap_notes(figures)]
    return ProbeSection(tuple(figure for figures in found for figure in figures), said=tuple(said))


def overlap_notes(figures: Sequence[Figure]) -> list[str]:
    """Describe how much time of the shorter of computation and collective the longer hides.

    Returns one note, which has the times only if they were steady.
    """
    hidden, name = figures[-1], figures[1].key.what
    compute, alone, both = (figure.value for figure in figures[:3])
    times = ""
    if compute and alone and both:
        times = (
            f"{1000.0 * compute:.3g} ms of computation and {1000.0 * alone:.3g} ms of {name} "
            f"take {1000.0 * both:.3g} ms together: "
        )
    if hidden.value is None:
        return [f"overlap: {times}the hidden share was not stable enough: {hidden.unstable}"]
    return [f"overlap: {times}{hidden.value:.0%} of the shorter is hidden by the longer"]
