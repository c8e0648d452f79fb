"""Plans that the planner proposes for tuning, refined after every trial."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from outpace.catalog.accelerators import find_accelerator
from outpace.jobs.defaults import resolve_device, resolve_plan
from outpace.jobs.machine_file import find_probe, used_machine
from outpace.jobs.planning import auto_plan
from outpace.planner.calibration.fit_rates import (
    UNKNOWN,
    Calibration,
    RateFit,
    SeenStep,
    calibrate,
    steps_s,
)
from outpace.planner.calibration.strategy_residuals import Deviations
from outpace.planner.explain.titles import title
from outpace.planner.plan_columns import MODES, Floats, of_plans
from outpace.planner.plan_search import fastest_plans
from outpace.planner.problem import PlanningProblem
from outpace.probing.hardware.host_rates import measure_host_rates
from outpace.probing.hardware.machine import identify
from outpace.records.errors import OUT_OF_MEMORY_CODES, BadInputError
from outpace.records.host_rates import HostRates
from outpace.records.machine import Machine
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.records.tuning import PlanTrial

_COUNT = 256  # plans considered per number of processes
# Uncertainty of rates corrected by a probe's training steps: standard deviation of their logarithm.
_CALIBRATED = math.log(1.2)


@dataclass(frozen=True)
class TuningProposal:
    """A plan that tuning may try, with its step time as predicted after the trials so far.

    `spread` is the uncertainty of the prediction, as the standard deviation of its logarithm.
    """

    plan: Plan
    title: str
    step_time_s: float
    spread: float
    memory_bytes: float


def rates_to_begin_with(settings: TrainSettings) -> HostRates | None:
    """Measure this host's rates; None if it was probed before, or training uses a GPU."""
    machine = identify(find_accelerator)
    if resolve_device(settings, Ranks()).type != "cpu" or find_probe(machine) is not None:
        return None
    return measure_host_rates(machine.host_cores)


class Proposer:
    """Predictor of plans' step times on this machine, which learns from the trials of tuning."""

    def __init__(
        self,
        settings: TrainSettings,
        origins: Mapping[str, str],
        host_bytes: int | None = None,
        measured: HostRates | None = None,
    ) -> None:
        """Prepare a planning problem for each number of processes.

        `host_bytes`: memory for all processes together, if no limit is set. `measured`: this host's
        rates, if it was not probed.
        """
        self.machine = identify(find_accelerator)
        own, device = _default_ranks(settings), resolve_device(settings, Ranks())
        self.default = resolve_plan(settings, own, device, self.machine)
        used = used_machine(self.machine, device)
        self._jobs: dict[int, PlanningProblem] = {}
        self._learned: dict[tuple[PlanTrial, ...], _Corrections] = {}
        refused: list[BadInputError] = []
        for world in _world_sizes_to_try(settings, used):
            limited = settings
            if host_bytes is not None and settings.memory_limit is None:
                limited = settings.model_copy(update={"memory_limit": host_bytes // world})
            try:
                self._jobs[world] = auto_plan.question(
                    limited, origins, used, world, measured=measured
                )
            except BadInputError as error:
                refused.append(error)
        if own.world_size not in self._jobs:
            raise refused[0]
        self.considered = sum(fastest_plans(job, 1)[1] for job in self._jobs.values())

    def proposals(self, trials: Sequence[PlanTrial]) -> list[TuningProposal]:
        """Return plans worth trying, sorted by step time as predicted after the `trials`."""
        learned = self._corrections(trials)
        too_many, found = self._lowest_oom_bytes(trials), []
        for world, job in self._jobs.items():
            plans, _ = fastest_plans(_with_rates(job, learned.rates.rates[world]), _COUNT)
            fit = _fitting_plans(job, [plan for plan, _ in plans], too_many.get(world, math.inf))
            found += _make_proposals(job, _drop_needless_savings(fit, job.outline.layers), learned)
        return sorted(found, key=lambda proposal: proposal.step_time_s)

    def proposal(self, plan: Plan, trials: Sequence[PlanTrial] = ()) -> TuningProposal:
        """Predict one plan, whether or not it fits in memory."""
        return _make_proposals(self._jobs[plan.world_size], [plan], self._corrections(trials))[0]

    def _lowest_oom_bytes(self, trials: Sequence[PlanTrial]) -> dict[int, float]:
        """Return, by number of processes, the lowest predicted memory of a plan that did not fit.

        Trials that ran concurrently are ignored, since they shared memory.
        """
        found: dict[int, float] = {}
        for trial in trials:
            if trial.exit_code in OUT_OF_MEMORY_CODES and not trial.raced:
                world = trial.plan.world_size
                (needs,) = _required_bytes(self._jobs[world], [trial.plan]).tolist()
                found[world] = min(needs, found.get(world, math.inf))
        return found

    def _corrections(self, trials: Sequence[PlanTrial]) -> "_Corrections":
        if tuple(trials) not in self._learned:
            self._learned[tuple(trials)] = self._fit_corrections(trials)
        return self._learned[tuple(trials)]

    def _fit_corrections(self, trials: Sequence[PlanTrial]) -> "_Corrections":
        first = next(iter(self._jobs.values()))
        seen = [
            SeenStep(first.outline, first.wanted.seq_len, first.wanted.global_batch, trial.plan,
                     trial.compared_s)
            for trial in trials if trial.compared_s is not None
        ]  # fmt: skip
        rates = {
            world: RateFit(job.cluster.device, job.cluster.fabric)
            for world, job in self._jobs.items()
        }
        known = all(job.cluster.calibrated for job in self._jobs.values())
        found = calibrate(rates, seen, _CALIBRATED if known else UNKNOWN)
        # Keep each plan's fastest trial; the fastest plan comes last.
        fastest = {one.plan.model_dump_json(): one
                   for one in sorted(seen, key=lambda one: -one.step_time_s)}  # fmt: skip
        tried = sorted(fastest.values(), key=lambda one: -one.step_time_s)
        missed, slopes = [], np.zeros((len(found.adjustments), 1))
        for one in tried:
            world = one.plan.world_size
            take = partial(_step_times_s, self._jobs[world], [one.plan])
            missed.append(math.log(one.step_time_s / take(found.rates[world])[0]))
        if tried:
            slopes = found.slopes(world, take)
        deviations = Deviations(tuple(one.plan for one in tried), np.array(missed))
        return _Corrections(found, deviations, slopes)


@dataclass(frozen=True)
class _Corrections:
    """Corrections to the predictor that trials have taught it.

    `rates` corrects the machine's rates, and `deviations` the times of individual plans. `slopes`
    has the derivatives of the fastest trial's step time with respect to each corrected rate, as a
    column.
    """

    rates: Calibration
    deviations: Deviations
    slopes: Floats


def _make_proposals(
    job: PlanningProblem, plans: Sequence[Plan], learned: _Corrections
) -> list[TuningProposal]:
    if not plans:
        return []
    world, take = job.wanted.world, partial(_step_times_s, job, plans)
    predicted_s, slopes = take(learned.rates.rates[world]), learned.rates.slopes(world, take)
    longer, own = learned.deviations.predict(plans)
    # Errors in rates that affect the fastest trial equally cancel out.
    spreads = np.hypot(learned.rates.spreads(slopes - learned.slopes), own)
    figures = zip(predicted_s * np.exp(longer), spreads, _required_bytes(job, plans), strict=True)
    return [
        TuningProposal(plan, title(plan), *map(float, three))
        for plan, three in zip(plans, figures, strict=True)
    ]


def _required_bytes(job: PlanningProblem, plans: Sequence[Plan]) -> Floats:
    return job.required_bytes(of_plans(plans, job.wanted.global_batch, job.outline.layers))


def _fitting_plans(job: PlanningProblem, plans: Sequence[Plan], limit_bytes: float) -> list[Plan]:
    if not plans:
        return []
    return [
        plan
        for plan, required in zip(plans, _required_bytes(job, plans), strict=True)
        if required < limit_bytes
    ]


def _drop_needless_savings(plans: Sequence[Plan], layers: int) -> list[Plan]:
    """Drop plans that recompute or chunk the loss if the same plan fits without doing so.

    Such plans cannot be faster, however wrong the predictions are.
    """
    saves = [_savings(plan, layers) for plan in plans]
    beside: dict[str, set[tuple[int, int]]] = {}
    for plan, own in zip(plans, saves, strict=True):
        beside.setdefault(_key_without_savings(plan), set()).add(own)

    def is_needless(plan: Plan, saved: tuple[int, int]) -> bool:
        return any(other != saved and other[0] <= saved[0] and other[1] <= saved[1]
                   for other in beside[_key_without_savings(plan)])  # fmt: skip

    return [plan for plan, own in zip(plans, saves, strict=True) if not is_needless(plan, own)]


def _savings(plan: Plan, layers: int) -> tuple[int, int]:
    """Return how much memory a plan saves at the cost of time, as two numbers to compare.

    The first grows with recomputation: it is the sum, over layers, of the mode's index in MODES.
    The second is 1 if the loss is chunked, otherwise 0.
    """
    return sum(map(MODES.index, plan.modes(layers))), int(plan.loss == "chunked")


def _key_without_savings(plan: Plan) -> str:
    """Return a key shared by plans that differ only in recomputation and chunked loss."""
    nothing = {"checkpointing": "none", "checkpoint_every": 1, "checkpoint_layers": (),
               "loss": "auto"}  # fmt: skip
    return plan.model_copy(update=nothing).model_dump_json()


def _step_times_s(job: PlanningProblem, plans: Sequence[Plan], rates: RateFit) -> Floats:
    columns = of_plans(plans, job.wanted.global_batch, job.outline.layers)
    return steps_s(_with_rates(job, rates).question, columns)


def _with_rates(job: PlanningProblem, rates: RateFit) -> PlanningProblem:
    cluster = replace(job.cluster, device=rates.device, fabric=rates.fabric)
    return replace(job, cluster=cluster)


def _default_ranks(settings: TrainSettings) -> Ranks:
    count = settings.nproc or 1
    return Ranks(world_size=count, local_world_size=count)


def _world_sizes_to_try(settings: TrainSettings, machine: Machine) -> list[int]:
    """Return the numbers of processes to try.

    This is --nproc, if set. Otherwise it is 1 and the number of accelerators or, without any, each
    divisor of the number of cores.
    """
    if settings.nproc is not None:
        return [settings.nproc]
    if machine.devices:
        return sorted({1, len(machine.devices)})
    return auto_plan.candidate_world_sizes(machine)
