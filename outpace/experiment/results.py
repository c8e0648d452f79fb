"""Results by arm: medians, times of the parts of a step, agreement of losses."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from outpace.experiment.arm_facts import Facts, describe_facts, numeric_differences
from outpace.experiment.compare import verdicts
from outpace.experiment.past_runs import result_of
from outpace.records.comparison import ArmResult, Experiment, Outcome
from outpace.records.errors import BadInputError
from outpace.records.line_checksums import ChangedLineError, strip_checksum
from outpace.records.measurement import Measurement, TimeParts
from outpace.records.run import RUN_FILE, RunRecord
from outpace.records.utilisation import device_utilisation
from outpace.training.run_dir import METRICS_FILE

_MILLION = 1e6
# Allowed relative difference of two losses after the same samples. Rounding differences grow with
# the steps, so this is coarse; `outpace verify` proves that gradients are right.
_AGREE: Mapping[str, float] = {"fp32": 0.01, "fp64": 0.01}
_AGREE_LOW = 0.05
_RATES = ("step_time_s", "tokens_per_s", "samples_per_s", "model_flops_per_s", "mfu")
_OF_A_STEP = ("step_time_s", "samples", "loss")  # the fields of a step that are read
T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Curve:
    """A run's losses, by the number of samples on which it had trained, and the run's settings."""

    record: RunRecord
    losses: Mapping[int, float]


def results(
    experiment: Experiment, folder: Path, outcomes: Sequence[Outcome], facts: Facts
) -> list[ArmResult]:
    """Return, for each arm, the medians over its runs and its verdict compared with the first arm.

    An arm is one of the alternatives that an experiment compares.
    """
    found = verdicts(experiment, outcomes)
    rows = []
    for arm in experiment.arms:
        own = [one for one in outcomes if one.arm == arm.name and one.value is not None]
        folders = [folder / run for run in dict.fromkeys(one.run for one in own) if run is not None]
        runs = [result for run in folders if (result := _finished_result(run)) is not None]
        measured = _median_figures(runs, experiment.price)
        if experiment.metric is not None:
            measured["metric"] = _known_median([one.value for one in own])
        rows.append(
            ArmResult(
                arm=arm.name,
                verdict=found.get(arm.name),
                facts=describe_facts(facts.get(arm.name, {})),
                **measured,
            )
        )
    return rows


def _finished_result(run: Path) -> Measurement | None:
    """Return a run's result; None if the folder has no finished run.

    Times and rates are based on `timed_steps_of`.
    """
    path = run / RUN_FILE
    if not path.is_file() or (result := result_of(run, record := RunRecord.load(path))) is None:
        return None
    if record.last_untimed_step(result) == result.start_step or not (steps := timed_steps_of(run)):
        return result
    parts = {name: [float(one.get(name) or 0) for one in steps] for name in TimeParts.model_fields}
    medians = {name: _known_median([one.get(name) for one in steps]) for name in _RATES}
    return result.model_copy(update={**medians, "parts": TimeParts.of_steps(parts)})


def _median_figures(runs: Sequence[Measurement], price: float | None) -> dict[str, Any]:
    if not runs:
        return {}

    def median_of(name: str) -> float | None:
        return _known_median([getattr(run, name) for run in runs])

    tokens_per_s = median_of("tokens_per_s")
    per_million = None
    if price is not None and tokens_per_s:
        paid = 1 if runs[0].device == "cpu" else runs[0].world_size
        per_million = price * paid / 3600 / tokens_per_s * _MILLION
    parts = {name: [getattr(run.parts, name) for run in runs] for name in TimeParts.model_fields}
    return {
        **{name: median_of(name) for name in (*_RATES, "final_loss")},
        **{name: None if (count := median_of(name)) is None else round(count)
           for name in ("peak_memory_bytes", "sent_bytes")},
        "idle_share": _known_median([_idle_share(run) for run in runs]),
        "device_utilisation": _known_median([_device_utilisation(run) for run in runs]),
        "core_utilisation": _known_median([_core_utilisation(run) for run in runs]),
        "other_cores": _known_median([_count_other_cores(run) for run in runs]),
        "peak_memory_by_rank": _medians_by_rank([run.peak_memory_by_rank for run in runs]),
        "parts": TimeParts.of_steps(parts),
        "price_per_million_tokens": per_million,
    }  # fmt: skip


def _medians_by_rank(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return each rank's median over runs; empty if runs have different numbers of ranks."""
    alike = len(set(map(len, runs))) == 1
    return tuple(round(median(ranks)) for ranks in zip(*runs, strict=True)) if alike else ()


def _idle_share(run: Measurement) -> float | None:
    """Return the fraction of time that ranks were idle (on GPUs: that no kernel was running)."""
    busy = _device_utilisation(run)
    return run.idle_share if busy is None else 1 - busy


def _device_utilisation(run: Measurement) -> float | None:
    return None if run.device == "cpu" else device_utilisation(run.utilisation, run.world_size)


def _core_utilisation(run: Measurement) -> float | None:
    shares = [load.host.utilisation for load in run.utilisation]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _count_other_cores(run: Measurement) -> float | None:
    """Return how many cores other processes used on all hosts; None if too few to slow the run."""
    used = [load.host.disturbing_cores for load in run.utilisation]
    known = [cores for cores in used if cores is not None]
    return sum(known) if known else None


def _known_median(values: Iterable[T | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Return the steps in a run's metrics.jsonl, without an incomplete last line.

    Raises BadInputError if a line is not a step.
    """
    path = run / METRICS_FILE
    lines = path.read_bytes().splitlines() if path.is_file() else []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            step = json.loads(strip_checksum(line))
        except ChangedLineError as error:
            raise BadInputError(f"{path}, line {number}: {error}.") from None
        except (ValueError, RecursionError):
            if number < len(lines):
                raise BadInputError(f"{path}, line {number}, is not a JSON object.") from None
            break
        known = step if isinstance(step, dict) else {}
        if not all(_is_number(known.get(name)) for name in _OF_A_STEP):
            raise BadInputError(
                f"{path}, line {number}, is not a step: it needs {', '.join(_OF_A_STEP)}."
            )
        found.append(known)
    return found


def timed_steps_of(run: Path, warm_up: bool = False) -> list[dict[str, Any]]:
    """Return the steps from which a run's times and rates are computed.

    They follow the run's last untimed step. Warm-up steps after the start and after each resume are
    left out, unless `warm_up` is set. Raises BadInputError as `steps_of` does.
    """
    record = RunRecord.load(run / RUN_FILE)
    begin = record.last_untimed_step(result_of(run, record))
    return [
        step
        for number, step in enumerate(steps_of(run), 1)
        if (at := step.get("step", number)) > begin and (warm_up or not record.is_warm_up(at))
    ]


def step_times_of(run: Path, warm_up: bool = False) -> list[float]:
    """Return the duration in seconds of each step in `timed_steps_of`."""
    return [float(step["step_time_s"]) for step in timed_steps_of(run, warm_up)]


def _is_number(value: Any) -> bool:
    """Return whether a value is a float (also NaN or infinity), or an int that fits into one."""
    return isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1024)


def curves(experiment: Experiment, folder: Path, outcomes: Sequence[Outcome]) -> dict[str, Curve]:
    """Return the losses of the first successful run of each arm, by the arm's name.

    An arm is one of the alternatives that an experiment compares.
    """
    found: dict[str, Curve] = {}
    for one in outcomes:
        if one.value is None or one.run is None or one.arm in found:
            continue
        run = folder / one.run
        losses = {int(step["samples"]): float(step["loss"]) for step in steps_of(run)}
        if losses and (run / RUN_FILE).is_file():
            found[one.arm] = Curve(RunRecord.load(run / RUN_FILE), losses)
    return {arm.name: found[arm.name] for arm in experiment.arms if arm.name in found}


def describe_losses(found: Mapping[str, Curve]) -> str | None:
    """Describe how the losses of arms differ from the first arm's.

    Losses must agree if both arms train with the same numerical settings, and may differ otherwise.
    Returns None if there is nothing to compare.
    """
    if len(found) < 2:
        return None
    first, *others = found
    must: dict[str, float] = {}
    may: dict[str, float] = {}
    why: set[str] = set()
    for name in others:
        apart = _largest_loss_difference(found[first].losses, found[name].losses)
        if apart is None:
            continue
        changed = numeric_differences(found[first].record, found[name].record)
        (may if changed else must)[name] = apart
        why.update(changed)
    told = [_describe_equal_losses(first, must, found[first].record.plan.precision)] if must else []
    if may:
        worst = max(may, key=lambda name: may[name])
        told.append(
            f"{', '.join(may)} and {first} train differently ({', '.join(sorted(why))}), so their "
            f"losses may differ. The largest difference at a step is {may[worst]:.2%} ({worst})."
        )
    return " ".join(told) or None


def _describe_equal_losses(first: str, apart: Mapping[str, float], precision: str) -> str:
    worst = max(apart, key=lambda name: apart[name])
    allowed = _AGREE.get(precision, _AGREE_LOW)
    if apart[worst] <= allowed:
        return f"Losses agree in all steps, as they must (within {apart[worst]:.2%})."
    return (
        f"LOSSES DISAGREE although they must not: {worst} and {first} differ by {apart[worst]:.1%} "
        f"at one step ({allowed:.0%} is allowed in {precision}). Use outpace verify to find out "
        "which is wrong."
    )


def _largest_loss_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """Return the largest relative difference of two runs' losses after equal numbers of samples.

    Returns None if the runs have no number of samples in common.
    """
    gaps = [abs(one[at] - other[at]) / max(abs(one[at]), 1e-12) for at in one.keys() & other.keys()]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=None)
