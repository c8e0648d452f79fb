"""What runs came to, arm by arm: medians, parts of a step, losses."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from outpace.experiment.compare import verdicts
from outpace.experiment.facts import read_facts, same_numbers
from outpace.records.comparison import ArmResult, Experiment, Outcome
from outpace.records.measurement import PARTS, Measurement, TimeParts
from outpace.records.utilisation import device_utilisation
from outpace.train.run_dir import METRICS_FILE, RESULT_FILE

_MILLION = 1e6
# Of two losses of the same step and samples, relative: sums in another order, in each precision,
# grow with the steps. A wrong gradient shows at once, and `outpace verify` proves there is none.
_AGREE: Mapping[str, float] = {"fp32": 0.01, "fp64": 0.01}
_AGREE_LOW = 0.05
T = TypeVar("T", int, float)


def results(experiment: Experiment, folder: Path, outcomes: Sequence[Outcome]) -> list[ArmResult]:
    """Medians over each arm's runs, and its verdict against the first."""
    found, facts = verdicts(experiment, outcomes), read_facts(folder, outcomes)
    rows = []
    for arm in experiment.arms:
        own = [one for one in outcomes if one.arm == arm.name and one.value is not None]
        runs = [Measurement.load(path) for one in own if (path := _result(folder, one)) is not None]
        measured = _measured(runs, experiment.price)
        if experiment.metric is not None:
            measured["metric"] = _median([one.value for one in own])
        rows.append(
            ArmResult(
                arm=arm.name,
                verdict=found.get(arm.name),
                facts=facts.get(arm.name, {}),
                **measured,
            )
        )
    return rows


def _result(folder: Path, one: Outcome) -> Path | None:
    path = folder / (one.run or "") / RESULT_FILE
    return path if path.is_file() else None


def _measured(runs: Sequence[Measurement], price: float | None) -> dict[str, Any]:
    if not runs:
        return {}

    def of(name: str) -> float | None:
        return _median([getattr(run, name) for run in runs])

    tokens_per_s = of("tokens_per_s")
    per_million = None
    if price is not None and tokens_per_s:
        per_million = price * runs[0].world_size / 3600 / tokens_per_s * _MILLION
    parts = {f"{part}_s": _median([getattr(run.parts, f"{part}_s") for run in runs]) or 0.0
             for part in PARTS}  # fmt: skip
    return {
        **{name: of(name) for name in ("step_time_s", "tokens_per_s", "samples_per_s",
                                       "model_flops_per_s", "mfu", "final_loss")},
        **{name: None if (count := of(name)) is None else round(count)
           for name in ("peak_memory_bytes", "sent_bytes")},
        "idle_share": _median([_idle_share(run) for run in runs]),
        "device_utilisation": _median([_on_devices(run) for run in runs]),
        "core_utilisation": _median([_on_cores(run) for run in runs]),
        "parts": TimeParts(**parts),
        "price_per_million_tokens": per_million,
    }  # fmt: skip


def _idle_share(run: Measurement) -> float | None:
    """As the run's ranks saw it; on devices the time in which they computed nothing."""
    busy = _on_devices(run)
    return run.idle_share if busy is None else 1 - busy


def _on_devices(run: Measurement) -> float | None:
    return None if run.device == "cpu" else device_utilisation(run.utilisation, run.world_size)


def _on_cores(run: Measurement) -> float | None:
    shares = [load.host.utilisation for load in run.utilisation]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _median(values: Iterable[T | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, in order; a last one that is cut short is left out."""
    path = run / METRICS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def curves(
    experiment: Experiment, folder: Path, outcomes: Sequence[Outcome]
) -> dict[str, list[float]]:
    """Of each arm the losses of its first run that was finished, step by step."""
    found: dict[str, list[float]] = {}
    for one in outcomes:
        if one.value is not None and one.run is not None and one.arm not in found:
            found[one.arm] = [float(step["loss"]) for step in steps_of(folder / one.run)]
    return {arm.name: found[arm.name] for arm in experiment.arms if found.get(arm.name)}


def losses_in_words(experiment: Experiment, losses: Mapping[str, Sequence[float]]) -> str | None:
    """Whether curves agree as they must, or differ as they may."""
    if len(losses) < 2:
        return None
    first, *others = losses
    apart = {name: _apart(losses[first], losses[name]) for name in others}
    worst = max(apart, key=lambda name: apart[name])
    if not same_numbers(experiment.arms):
        return (
            "The arms train other numbers (data, batch, precision or optimizer), so losses may "
            f"differ: by {apart[worst]:.2%} at most on one step ({worst})."
        )
    precision = str(experiment.common.get("precision", "fp32"))
    allowed = _AGREE.get(precision, _AGREE_LOW)
    if apart[worst] <= allowed:
        return f"Losses agree on all steps, as they must (within {apart[worst]:.2%})."
    return (
        f"LOSSES DISAGREE where they must not: {worst} and {first} are {apart[worst]:.1%} apart on "
        f"one step ({allowed:.0%} is allowed). See which is wrong: outpace verify."
    )


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    shared = list(zip(one, other, strict=False))
    gaps = [abs(a - b) / max(abs(a), 1e-12) for a, b in shared]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)
