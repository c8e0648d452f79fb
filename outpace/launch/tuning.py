"""The planner's proposals for a training on this machine, sharper with every trial."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import numpy as np

from outpace.catalog.accelerators import find_accelerator
from outpace.launch import auto
from outpace.launch.resolve import resolve_device, resolve_plan
from outpace.planner.calibrate import (
    UNKNOWN,
    Calibration,
    Rates,
    SeenStep,
    calibrated,
    steps_s,
)
from outpace.planner.columns import MODES, Floats, of_plans
from outpace.planner.job import Job
from outpace.planner.plans import alike
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
# Of what the planner is off by where rates are right, as deviations of logarithms: what plans of a
# kind have in common; and each plan's own, with a trial's noise (benchmarks/planner_measured.py).
_KIND, _OWN = 0.08, 0.04
_BEFORE = 2  # trials' worth of these, beside which what is seen counts
# Strategy, number of processes and precision: of these the planner is off by much the same.
_Kind = tuple[str, int, str]


@dataclass(frozen=True)
class Proposal:
    """A plan, and seconds of a step as they are predicted now.

    `spread`: how far off that may be, as the standard deviation of its logarithm. `saves`: how much
    is computed again, and whether the loss is taken in chunks, to save memory; `otherwise`: the
    plan without that.
    """

    plan: Plan
    title: str
    step_time_s: float
    spread: float
    memory_bytes: float
    saves: tuple[int, ...]
    otherwise: Plan


class Proposer:
    """What the planner knows of a training on this machine."""

    def __init__(
        self,
        settings: TrainSettings,
        origins: Mapping[str, str],
        host_bytes: int | None = None,
    ) -> None:
        """`host_bytes`: what processes may have together where no limit is given to each."""
        self.machine = identify(find_accelerator)
        own, device = _ranks(settings), resolve_device(settings, Ranks())
        self.default = resolve_plan(settings, own, device, self.machine)
        used = auto.used_of(self.machine, device)
        self._jobs: dict[int, Job] = {}
        refused: list[BadInputError] = []
        for world in _worlds(settings, used):
            limited = settings
            if host_bytes is not None and settings.memory_limit is None:
                limited = settings.model_copy(update={"memory_limit": host_bytes // world})
            try:
                self._jobs[world] = auto.question(limited, origins, used, world)
            except BadInputError as error:
                refused.append(error)
        if own.world_size not in self._jobs:
            raise refused[0]
        self.considered = sum(alike(job, 1)[1] for job in self._jobs.values())

    def proposals(self, trials: Sequence[Trial]) -> list[Proposal]:
        """The fastest that fit, the fastest first, as they are predicted after `trials`."""
        learned, found = self._learned(trials), []
        for world, job in self._jobs.items():
            plans, _ = alike(_by(job, learned.rates.rates[world]), _COUNT)
            found += _proposed(job, [plan for plan, _ in plans], learned)
        return sorted(found, key=lambda proposal: proposal.step_time_s)

    def proposal(self, plan: Plan, trials: Sequence[Trial] = ()) -> Proposal:
        """Of one plan, whether it fits or not."""
        return _proposed(self._jobs[plan.world_size], [plan], self._learned(trials))[0]

    def _learned(self, trials: Sequence[Trial]) -> "_Learned":
        first = next(iter(self._jobs.values()))
        seen = [
            SeenStep(first.outline, first.wanted.seq_len, first.wanted.global_batch, trial.plan,
                     trial.step_time_s)
            for trial in trials if trial.step_time_s is not None
        ]  # fmt: skip
        rates = {
            world: Rates(job.cluster.device, job.cluster.fabric)
            for world, job in self._jobs.items()
        }
        known = all(job.cluster.calibrated for job in self._jobs.values())
        found = calibrated(rates, seen, _CALIBRATED if known else UNKNOWN)
        missed: dict[_Kind, list[float]] = {}
        first_of: dict[_Kind | None, SeenStep] = {}
        # Of a plan that was tried again the faster trial.
        fastest = {one.plan.model_dump_json(): one
                   for one in sorted(seen, key=lambda one: -one.step_time_s)}  # fmt: skip
        for one in sorted(fastest.values(), key=lambda one: -one.step_time_s):
            world, kind = one.plan.world_size, _kind(one.plan)
            (said_s,) = _steps_s(self._jobs[world], [one.plan], found.rates[world])
            missed.setdefault(kind, []).append(math.log(one.step_time_s / said_s))
            first_of[kind] = first_of[None] = one
        slopes: dict[_Kind | None, Floats] = {None: np.zeros((len(found.knobs), 1))}
        for of, one in first_of.items():
            world = one.plan.world_size
            take = partial(_steps_s, self._jobs[world], [one.plan])
            slopes[of] = found.slopes(world, take)
        return _Learned(found, missed, slopes)


@dataclass(frozen=True)
class _Learned:
    """What trials tell: rates, which all numbers of processes share, and what kinds take longer.

    `missed`: of a kind's trials, logarithms of what they took by what the rates predict. `slopes`:
    how the time of its fastest trial depends on the rates, (knobs, 1); None: of the fastest of all.
    """

    rates: Calibration
    missed: Mapping[_Kind, Sequence[float]]
    slopes: Mapping[_Kind | None, Floats]

    @property
    def common(self) -> float:
        """What plans of a kind have in common, a deviation of logarithms: more, where it is seen.

        The mean of squares over the kinds that were tried, and over _BEFORE that were not.
        """
        squares = [fmean(missed) ** 2 for missed in self.missed.values()]
        return math.sqrt((_BEFORE * _KIND**2 + sum(squares)) / (_BEFORE + len(squares)))

    @property
    def own(self) -> float:
        """What is a plan's own beside its kind's, in the same way."""
        several = [missed for missed in self.missed.values() if len(missed) > 1]
        squares = [(one - fmean(missed)) ** 2 for missed in several for one in missed]
        free = len(squares) - len(several)
        return math.sqrt((_BEFORE * _OWN**2 + sum(squares)) / (_BEFORE + free))

    def longer(self, kind: _Kind) -> float:
        """What plans of this kind take longer than the rates predict, as a logarithm."""
        missed, common = self.missed.get(kind, ()), self.common**2
        return sum(missed) * common / (len(missed) * common + self.own**2)

    def spreads(self, kind: _Kind, slopes: Floats) -> Floats:
        """How far off that may be for plans of these slopes: as deviations of logarithms.

        A plan of a kind that was tried is known by what it does otherwise than the kind's fastest.
        """
        by_rates = self.rates.spreads(slopes - self.slopes.get(kind, self.slopes[None]))
        by_kind = 0.0 if kind in self.missed else self.common
        found: Floats = np.sqrt(by_rates**2 + by_kind**2 + self.own**2)
        return found


def _proposed(job: Job, plans: Sequence[Plan], learned: _Learned) -> list[Proposal]:
    if not plans:
        return []
    world, take = job.wanted.world, partial(_steps_s, job, plans)
    said_s, slopes = take(learned.rates.rates[world]), learned.rates.slopes(world, take)
    needs = job.needs(of_plans(plans, job.wanted.global_batch, job.outline.layers))
    found = []
    for place, plan in enumerate(plans):
        kind = _kind(plan)
        seconds = float(said_s[place]) * math.exp(learned.longer(kind))
        (spread,) = learned.spreads(kind, slopes[:, [place]])
        found.append(Proposal(plan, title(plan), seconds, float(spread), float(needs[place]),
                              _saves(plan, job.outline.layers), _otherwise(plan)))  # fmt: skip
    return found


def _saves(plan: Plan, layers: int) -> tuple[int, ...]:
    """By what a plan trades time for memory, and never gains any."""
    return sum(map(MODES.index, plan.modes(layers))), int(plan.loss == "chunked")


def _otherwise(plan: Plan) -> Plan:
    nothing = {"checkpointing": "none", "checkpoint_every": 1, "checkpoint_layers": (),
               "loss": "auto"}  # fmt: skip
    return plan.model_copy(update=nothing)


def _steps_s(job: Job, plans: Sequence[Plan], rates: Rates) -> Floats:
    columns = of_plans(plans, job.wanted.global_batch, job.outline.layers)
    return steps_s(_by(job, rates).question, columns)


def _by(job: Job, rates: Rates) -> Job:
    """The question to a machine of these rates."""
    cluster = replace(job.cluster, device=rates.device, fabric=rates.fabric)
    return replace(job, cluster=cluster)


def _kind(plan: Plan) -> _Kind:
    return plan.strategy, plan.world_size, plan.precision


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
