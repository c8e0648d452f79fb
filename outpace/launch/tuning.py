"""The planner's proposals for a training on this machine, sharper with every trial."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outpace.catalog.accelerators import find_accelerator
from outpace.launch import auto
from outpace.launch.resolve import resolve_device, resolve_plan
from outpace.planner.calibrate import UNKNOWN, Rates, SeenStep, calibrated
from outpace.planner.columns import of_plans
from outpace.planner.interval import interval
from outpace.planner.job import Job
from outpace.planner.plans import alike, one
from outpace.planner.titles import title
from outpace.probe.machine import identify
from outpace.records.errors import BadInputError
from outpace.records.machine import Machine
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.records.tuning import Trial

_COUNT = 64  # plans of a number of processes that are looked at
# How far rates may still be off where a probe's steps put them right, a deviation of logarithms.
_CALIBRATED = math.log(1.2)


@dataclass(frozen=True)
class Proposal:
    """A plan, and seconds of a step as they are predicted now: not below `low_s`, rather surely."""

    plan: Plan
    title: str
    step_time_s: float
    low_s: float
    memory_bytes: float


class Proposer:
    """What the planner knows of a training on this machine."""

    def __init__(self, settings: TrainSettings, origins: Mapping[str, str]) -> None:
        self.machine = identify(find_accelerator)
        own = _ranks(settings)
        self.default = resolve_plan(settings, own, resolve_device(settings, Ranks()), self.machine)
        self._jobs: dict[int, Job] = {}
        refused: list[BadInputError] = []
        for world in _worlds(settings, self.machine):
            try:
                self._jobs[world] = auto.question(settings, origins, self.machine, world)
            except BadInputError as error:
                refused.append(error)
        if own.world_size not in self._jobs:
            raise refused[0]
        self.considered = sum(alike(job, 1)[1] for job in self._jobs.values())

    def proposals(self, trials: Sequence[Trial]) -> list[Proposal]:
        """The fastest that fit, the fastest first, with rates that predict `trials` best."""
        found = []
        for job in self._after(trials).values():
            low, _ = interval(job.cluster.calibrated)
            plans, _ = alike(job, _COUNT)
            columns = of_plans([p for p, _ in plans], job.wanted.global_batch, job.outline.layers)
            needs = job.needs(columns)
            found += [
                Proposal(plan, title(plan), seconds, seconds * low, float(need))
                for (plan, seconds), need in zip(plans, needs, strict=True)
            ]
        return sorted(found, key=lambda proposal: proposal.step_time_s)

    def proposal(self, plan: Plan, trials: Sequence[Trial] = ()) -> Proposal:
        """Of one plan, whether it fits or not."""
        job = self._after(trials)[plan.world_size]
        said = one(job, plan).estimate
        bytes_ = float(said.peak_memory_bytes)
        return Proposal(plan, title(plan), said.step_time_s, said.low_s, bytes_)

    def _after(self, trials: Sequence[Trial]) -> dict[int, Job]:
        """The questions with the rates that trials tell of; all share one machine."""
        first = next(iter(self._jobs.values()))
        seen = [
            SeenStep(first.outline, first.wanted.seq_len, first.wanted.global_batch, trial.plan,
                     trial.step_time_s)
            for trial in trials if trial.step_time_s is not None
        ]  # fmt: skip
        if not seen:
            return self._jobs
        rates = {
            world: Rates(job.cluster.device, job.cluster.fabric)
            for world, job in self._jobs.items()
        }
        known = all(job.cluster.calibrated for job in self._jobs.values())
        found, _ = calibrated(rates, seen, _CALIBRATED if known else UNKNOWN)
        return {
            world: replace(
                job,
                cluster=replace(
                    job.cluster, device=found[world].device, fabric=found[world].fabric
                ),
            )
            for world, job in self._jobs.items()
        }


def _ranks(settings: TrainSettings) -> Ranks:
    """Of what `outpace train` starts where nobody says how."""
    count = settings.nproc or 1
    return Ranks(world_size=count, local_world_size=count)


def _worlds(settings: TrainSettings, machine: Machine) -> list[int]:
    """Numbers of processes to try: as asked, else one, all devices, and what divides the cores."""
    if settings.nproc is not None:
        return [settings.nproc]
    if machine.devices:
        return sorted({1, len(machine.devices)})
    return [n for n in range(1, min(machine.host_cores, auto.MOST_RANKS) + 1)
            if machine.host_cores % n == 0]  # fmt: skip
