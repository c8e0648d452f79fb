"""The default decision to compile a run: on CUDA, if that saves more time than it takes."""

from dataclasses import dataclass

import torch

from outpace.jobs.machine_file import used_machine
from outpace.jobs.planning.auto_plan import question
from outpace.planner.calibration.fit_rates import steps_s
from outpace.planner.plan_columns import of_plans
from outpace.records.compiled import Region, compiled_region
from outpace.records.errors import BadInputError
from outpace.records.machine import Machine
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.records.units import show_seconds
from outpace.training.run_dir import RunDir

# On one H200 (torch 2.11, 16 cores, empty caches; 2026-11-27), building GPT-2, compiling it block
# by block and training it for 30 steps took 6.8 s, of which compiling took about 4 s. Compiled as a
# whole, Llama-3.2-1B's 16 layers took about 49 s and GPT-2's 12 about 24 s (1.7 s per layer), in
# runs of 58 and 29 s.
_COMPILER_S = 4.0
_LAYER_S = 2.8
# For models unknown to the planner: the number of steps after which compiling pays off if it takes
# 20 s and saves 20 ms per step; GPT-2 (16 x 1,024) saved 29 ms on that H200.
_UNKNOWN_STEPS = 1000
# Smallest share of a step that compiling saves: Llama-3.2-1B by block on that GPU, 177.7 to 155.7
# ms.
_SAVED_SHARE = 0.12


@dataclass(frozen=True)
class Decision:
    """Decision whether to compile a run.

    `sentence`: the reason as a message for the user; None if there is nothing to report.
    """

    compile: bool
    sentence: str | None = None


def expected_compile_s(layers: int, region: Region) -> float:
    """Return an upper bound on the compile time in seconds.

    Equal blocks share code if they are compiled one by one, but not in a whole model.
    """
    return _COMPILER_S + (_LAYER_S * layers if region == "whole" else 0.0)


def decide(
    settings: TrainSettings,
    plan: Plan,
    device: torch.device,
    machine: Machine,
    ranks: Ranks,
    total_steps: int,
    layers: int | None,
) -> Decision:
    """Decide whether to compile a plan: as before for a resumed run, otherwise by the time saved.

    `layers`: None for a model that the planner does not know. A measure-only run is compiled, since
    it represents a longer one. So is fp8, which is slow if not compiled.
    """
    if settings.resume and settings.out is not None:
        earlier = RunDir(settings.out).require_run()
        if earlier.device == device.type:
            return Decision(earlier.plan.compile)
    if settings.measure_only:
        return Decision(True)
    if plan.precision == "fp8":
        return Decision(True, "compile: yes, since float8 is slow without it")
    if layers is None:
        return _decide_for_unknown_model(total_steps)
    times = _predict_step_times_s(settings, plan, device, machine, ranks)
    if times is None:
        return _decide_for_unknown_model(total_steps)
    return by_times(*times, expected_compile_s(layers, compiled_region(plan)), total_steps)


def by_times(eager_s: float, compiled_s: float, once_s: float, total_steps: int) -> Decision:
    """Decide to compile if a run's steps save more time than the single compilation takes.

    `eager_s` and `compiled_s`: time per step. `once_s`: time of the compilation.
    """
    saved_s = max(eager_s - compiled_s, _SAVED_SHARE * eager_s)
    steps = once_s / saved_s
    expected = (
        f"compiling is expected to take {show_seconds(once_s)} once and to save "
        f"{show_seconds(saved_s)} of {show_seconds(eager_s)} per step, so it pays off after "
        f"{steps:,.0f} steps"
    )
    if steps < total_steps:
        return Decision(
            True, f"compile: yes; {expected} of {total_steps:,} (turn it off with --no-compile)"
        )
    return Decision(
        False,
        f"compile: no; {expected}, but the run has {total_steps:,} (turn it on with --compile)",
    )


def _decide_for_unknown_model(total_steps: int) -> Decision:
    compiles = total_steps >= _UNKNOWN_STEPS
    return Decision(
        compiles,
        f"compile: {'yes' if compiles else 'no'}; its benefit for this model is unknown, so "
        f"runs of {_UNKNOWN_STEPS:,} steps or more are compiled (choose with --compile or "
        "--no-compile)",
    )


def _predict_step_times_s(
    settings: TrainSettings, plan: Plan, device: torch.device, machine: Machine, ranks: Ranks
) -> tuple[float, float] | None:
    """Predict the plan's step time, eager and compiled; None if the planner cannot predict it."""
    asked = settings.model_copy(update={"plan": None})
    try:
        job = question(
            asked, {}, used_machine(machine, device), plan.world_size, ranks.local_world_size
        )
        both = [plan.model_copy(update={"compile": value}) for value in (False, True)]
        columns = of_plans(both, settings.global_batch, job.outline.layers)
        eager_s, compiled_s = steps_s(job.question, columns).tolist()
    except BadInputError:
        return None
    return eager_s, compiled_s
