"""Timing of training steps of the catalog's reference runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from outpace.catalog.references import Kind, Reference, references
from outpace.jobs.ranks.hang_watchdog import RankActivity, hang_watchdog
from outpace.jobs.ranks.process_groups import Groups
from outpace.parallel.rank_objects import gather_objects
from outpace.planner.memory import peak
from outpace.planner.memory.setup import MemoryQuestion
from outpace.planner.model.outline import outline
from outpace.planner.plan_columns import of_plans
from outpace.probing.hardware.machine import usable_cores
from outpace.probing.hardware.process_memory import free_bytes
from outpace.probing.timing.interleave import Turns
from outpace.probing.timing.measure import Case, Effort, measure, rounds_of
from outpace.probing.timing.rank_clock import RanksClock, patient_clock
from outpace.probing.timing.section import ProbeSection
from outpace.records.errors import OutpaceError
from outpace.records.figure import Key
from outpace.training.synthetic import SyntheticSteps, SyntheticTraining


def probe_steps(
    groups: Groups,
    device: torch.device,
    quick: bool,
    budget_s: float,
    progress: Callable[[float], None] = lambda share: None,
) -> Turns[ProbeSection]:
    """Time one step of each reference run that fits in memory, on one rank and on all ranks.

    Call this on every rank. A single rank uses all cores of the host, as single-process training
    does. Raises RankLostError if a rank dies or hangs.
    """
    doing = RankActivity()
    with hang_watchdog(groups, doing):
        everyone = dist.group.WORLD
        assert everyone is not None
        clock = RanksClock(patient_clock(device, everyone), groups.control)
        cases, notes = _prepare_cases(groups, device, quick, doing)
        # Call a step once before timing it, to warm it up (`RanksClock`).
        effort = Effort(
            budget_s, rounds_of(quick), sample_s=0.0, least_rounds=2 if quick else 5,
            most_samples=1, wakes=False,
        )  # fmt: skip
        figures = yield from measure(cases, clock, effort, progress)
    return ProbeSection(figures=tuple(figures), notes=tuple(notes))


def _prepare_cases(
    groups: Groups, device: torch.device, quick: bool, activity: RankActivity
) -> tuple[list[Case], list[str]]:
    """Return the reference runs to time, as cases, and notes on those that are left out.

    Together, the cases fit in half of the free memory.
    """
    cases, notes = [], []
    world, room = groups.ranks.world_size, _available_bytes(groups, device)
    for ranks in sorted({1, world}):
        for name, one in references(ranks, _device_kind(device), quick).items():
            activity.what = f"a step of {name}"
            room -= _required_bytes(one, device)
            if room < 0:
                notes.append(f"no steps of {name}: it would need more than half of the memory")
                room += _required_bytes(one, device)
                continue
            case, refused = _try_case(one, ranks, groups, device, activity)
            if refused is not None:
                notes.append(f"no steps of {name}: {refused}")
            elif case is not None:
                cases.append(case)
    return cases, notes


def _try_case(
    reference: Reference, ranks: int, groups: Groups, device: torch.device, activity: RankActivity
) -> tuple[Case | None, str | None]:
    """Return a reference run as a case, and the reason why a rank cannot run it.

    The reason is None if all ranks can run it. All ranks must call this.
    """
    case, own = None, None
    try:
        case = _build_case(reference, ranks, groups, device, activity)
    except (OutpaceError, torch.OutOfMemoryError) as error:
        own = str(error).splitlines()[0]
    said = gather_objects(own, groups.control)
    return case, next((why for why in said if why is not None), None)


def _required_bytes(reference: Reference, device: torch.device) -> float:
    columns = of_plans([reference.plan], reference.global_batch, reference.spec.layers)
    question = MemoryQuestion(
        outline(reference.spec, reference.name), reference.seq_len, _device_kind(device)
    )
    return float(peak.reserved_bytes(question, columns)[0])


def _available_bytes(groups: Groups, device: torch.device) -> float:
    """Return half of the free memory of the fullest rank, in bytes. Collective."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = free_bytes() // groups.ranks.local_world_size
    least = torch.tensor([free / 2], dtype=torch.float64)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=groups.control)
    return float(least.item())


def _device_kind(device: torch.device) -> Kind:
    return "cuda" if device.type == "cuda" else "cpu"


def _build_case(
    reference: Reference, ranks: int, groups: Groups, device: torch.device, activity: RankActivity
) -> Case:
    course = SyntheticTraining(reference.spec, reference.global_batch, reference.seq_len)

    @contextmanager
    def with_threads() -> Iterator[None]:
        activity.what = f"a step of {reference.name}"
        own = torch.get_num_threads()
        if ranks == 1 and device.type == "cpu":  # the other ranks are idle: use their cores
            torch.set_num_threads(usable_cores())
        try:
            yield
        finally:
            torch.set_num_threads(own)

    with with_threads():
        steps = SyntheticSteps(reference.plan, course, groups.ranks, device, groups.control)
        steps.step()  # some errors appear only in a step
    key = Key(kind="step", what="time",
              of={"reference": reference.name, "ranks": ranks, "device": device.type,
                  "digest": reference.digest})  # fmt: skip
    return Case(key, "s", lambda: steps.step, within=with_threads)
