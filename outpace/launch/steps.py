"""Steps of the catalog's small trainings: what a probe needs beside products and links."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from outpace.catalog.references import Kind, Reference, references
from outpace.launch.alive import Doing, watched
from outpace.launch.group import Groups
from outpace.probe.machine import usable_cores
from outpace.probe.measure import Case, Effort, measure, rounds_of
from outpace.probe.ranks_clock import RanksClock, patient_clock
from outpace.probe.section import Section
from outpace.probe.turns import Turns
from outpace.records.errors import OutpaceError
from outpace.records.figure import Key
from outpace.train.synthetic import Course, SyntheticSteps


def probe_steps(
    groups: Groups,
    device: torch.device,
    quick: bool,
    budget_s: float,
    progress: Callable[[float], None] = lambda share: None,
) -> Turns[Section]:
    """Time a step of every reference, of one rank and of all; every rank calls it.

    One rank has all cores of the host, as a training of one process has. Raises RankLostError
    where a rank dies or hangs.
    """
    doing = Doing()
    with watched(groups, doing):
        everyone = dist.group.WORLD
        assert everyone is not None
        clock = RanksClock(patient_clock(device, everyone), groups.control)
        cases, notes = _cases(groups, device, quick, doing)
        # A step is called once before it is timed, which wakes what it needs (`RanksClock`).
        effort = Effort(
            budget_s, rounds_of(quick), sample_s=0.0, least_rounds=2 if quick else 5,
            most_samples=1, wakes=False,
        )  # fmt: skip
        figures = yield from measure(cases, clock, effort, progress)
    return Section(figures=tuple(figures), notes=tuple(notes))


def _cases(
    groups: Groups, device: torch.device, quick: bool, doing: Doing
) -> tuple[list[Case], list[str]]:
    cases, notes = [], []
    world = groups.ranks.world_size
    for ranks in sorted({1, world}):
        for name, one in references(ranks, _kind(device), quick).items():
            doing.what = f"a step of {name}"
            try:
                case = _case(one, ranks, groups, device, doing)
            except OutpaceError as error:  # alike on all ranks: what this torch or device cannot
                notes.append(f"no steps of {name}: {error}")
            else:
                cases.append(case)
    return cases, notes


def _kind(device: torch.device) -> Kind:
    return "cuda" if device.type == "cuda" else "cpu"


def _case(one: Reference, ranks: int, groups: Groups, device: torch.device, doing: Doing) -> Case:
    course = Course(one.spec, one.global_batch, one.seq_len)

    @contextmanager
    def threads() -> Iterator[None]:
        doing.what = f"a step of {one.name}"
        own = torch.get_num_threads()
        torch.set_num_threads(max(1, usable_cores() // ranks) if _alone(ranks, device) else own)
        try:
            yield
        finally:
            torch.set_num_threads(own)

    with threads():
        steps = SyntheticSteps(one.plan, course, groups.ranks, device, groups.control)
        steps.step()  # what is refused only then, is refused here
    key = Key(kind="step", what="time",
              of={"reference": one.name, "ranks": ranks, "device": device.type})  # fmt: skip
    return Case(key, "s", lambda: steps.step, within=threads)


def _alone(ranks: int, device: torch.device) -> bool:
    """Whether a process has the cores of the others, too."""
    return ranks == 1 and device.type == "cpu"
