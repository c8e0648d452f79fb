"""Published steps similar to a plan, and features of the plan that no published step covers.

The table is generated from benchmarks/data and the recorded predictions
(benchmarks/measured_steps.py).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from outpace.catalog.tables import read_rows, read_table
from outpace.records.errors import join_and
from outpace.records.estimate import MeasuredCase
from outpace.records.plan import Plan
from outpace.records.precisions import PRECISION_TRAITS
from outpace.records.strategies import TRAITS

# Names of the software in the table, by the planned stack.
_PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "torchtitan": ("torchtitan",),
    "megatron": ("Megatron-Core", "Megatron-Bridge", "NeMo"),
    "megatron-lm": ("Megatron-LM", "Megatron-DeepSpeed"),
    "deepspeed": ("DeepSpeed", "Megatron-DeepSpeed"),
    "deepspeed-2021": ("DeepSpeed", "Megatron-DeepSpeed"),
    "nanotron": ("nanotron",),
    "internevo": ("InternEvo",),
    "composer": ("Composer",),
    "trainer": ("Trainer", "TRL", "transformers"),
    "accelerate": ("Trainer", "TRL", "transformers"),
    # outpace shards with FSDP2, as torchtitan does; there is no published step of outpace.
    "outpace": ("torchtitan",),
}
_ON_MORE = " devices"  # suffix of the extrapolations that widen an interval
_BEYOND = 1.1  # times the largest measured value: above this, a plan is extrapolated
# Weights in the distance of a case: per doubling of a number, and per other difference.
_DOUBLINGS = {"parameters": 0.5, "devices": 0.3, "seq_len": 0.3}
_OTHER_CHIP, _OTHER_ARCHITECTURE, _OTHER_MODEL, _OTHER_PROGRAM, _OTHER_AXIS = (
    0.5,
    3.0,
    4.0,
    1.0,
    0.7,
)


@dataclass(frozen=True)
class Likeness:
    """Features by which a plan is compared with measured cases; those that are None are ignored."""

    devices: int
    plan: Plan | None = None
    parameters: float | None = None  # billions
    experts: bool | None = None
    chip: str | None = None
    architecture: str | None = None
    seq_len: int | None = None
    stack: str = "outpace"

    @cached_property  # asked for each row of the table
    def axes(self) -> dict[str, int]:
        """Return the axis sizes and the ZeRO stage, by column of the table of measured steps."""
        plan = self.plan
        if plan is None:
            return {}
        level = plan.zero if plan.strategy == "3d" else TRAITS[plan.strategy].zero
        zero = level if plan.dp_shard > 1 else 0
        return {"zero": zero, "tp": plan.tp, "pp": plan.pp, "cp": plan.cp, "ep": plan.ep}


@lru_cache
def measured_rows() -> tuple[Mapping[str, Any], ...]:
    """Return all rows of the table of measured steps."""
    return tuple(read_rows(read_table("measured_steps")))


def nearest_cases(like: Likeness, count: int = 3) -> tuple[MeasuredCase, ...]:
    """Return the `count` most similar cases, nearest first, at most one per model and source."""
    best: dict[tuple[str, str], tuple[float, Mapping[str, Any]]] = {}
    for row in measured_rows():
        far, key = _distance(like, row), (row["source"], row["model"])
        if key not in best or far < best[key][0]:
            best[key] = far, row
    ranked = sorted(best.values(), key=lambda pair: pair[0])[:count]
    names = set(MeasuredCase.model_fields)
    return tuple(
        MeasuredCase.model_validate({k: v for k, v in row.items() if k in names})
        for _, row in ranked
    )


def _distance(like: Likeness, row: Mapping[str, Any]) -> float:
    far = 0.0
    for name, weight in _DOUBLINGS.items():
        own = getattr(like, name)
        if own is not None:
            far += weight * abs(math.log2(own / row[name]))
    if like.experts is not None:
        far += _OTHER_MODEL * (like.experts != row["experts"])
    if like.architecture is not None:
        far += _OTHER_ARCHITECTURE * (like.architecture != row["architecture"])
    if like.chip is not None:
        far += _OTHER_CHIP * (like.chip != row["chip"])
    far += _OTHER_PROGRAM * (row["stack"] not in _PROGRAMS.get(like.stack, ()))
    for name, size in like.axes.items():
        split = (size >= 2, row[name] >= 2) if name == "zero" else (size > 1, row[name] > 1)
        far += _OTHER_AXIS * (split[0] != split[1])
    return far


def faster_case(
    like: Likeness, cases: Sequence[MeasuredCase], global_batch: int, step_time_s: float
) -> MeasuredCase | None:
    """Return the fastest case with lower-precision matmuls that takes less time than the plan.

    Returns None if there is none. A case counts if it has the plan's model, chip, number of
    devices, sequence length and batch, fewer bits per matmul operand, and a shorter time than
    `step_time_s`, that of the plan.
    """
    if like.plan is None:
        return None
    bits = _BITS[PRECISION_TRAITS[like.plan.precision].matmuls]
    wanted = (like.chip, like.devices, like.seq_len, global_batch)
    found = [
        one for one in cases
        if (one.chip, one.devices, one.seq_len, one.global_batch) == wanted
        and math.isclose(one.parameters or 0.0, like.parameters or 0.0, rel_tol=_SAME_MODEL)
        and _operand_bits(one) < bits and one.measured_s < step_time_s
    ]  # fmt: skip
    return min(found, key=lambda one: one.measured_s, default=None)


_SAME_MODEL = 0.01  # relative difference of parameter counts; the table rounds them to 0.5 %
_BITS: Mapping[str, int] = {"fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8}


def _operand_bits(case: MeasuredCase) -> int:
    precision = case.precision or "fp32"
    return 8 if "fp8" in precision.lower() else 16 if "16" in precision else 32


def extrapolations(like: Likeness) -> tuple[str, ...]:
    """Return the features of a plan that no measured case covers, as phrases for the report."""
    return tuple(_describe_extrapolations(like))


def _describe_extrapolations(like: Likeness) -> Iterator[str]:
    rows = measured_rows()
    programs = _PROGRAMS.get(like.stack, ())
    if like.stack != "outpace" and not any(row["stack"] in programs for row in rows):
        yield f"no measurement of {like.stack}"
    if like.architecture is not None:
        same = [row for row in rows if row["architecture"] == like.architecture]
        experts = " of models with experts" if like.experts else ""
        if not any(row["experts"] == bool(like.experts) for row in same):
            yield f"no measurement{experts} on {like.architecture} chips"
    yield from _describe_unmeasured_axes(like, rows)
    yield from _describe_unmeasured_offloading(like, rows)
    for name, words in (("seq_len", "sequences above {most:,.0f} tokens"),
                        ("parameters", "models above {most:,.0f} billion parameters")):  # fmt: skip
        own, most = getattr(like, name), max(row[name] for row in rows)
        if own is not None and own > _BEYOND * most:
            yield f"no measurement of {words.format(most=most)}"


def _describe_unmeasured_axes(like: Likeness, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a phrase for each axis of the plan that was not measured, or only on fewer devices."""
    names = {"tp": "tensor parallelism", "pp": "pipelines", "cp": "context parallelism",
             "ep": "expert parallelism"}  # fmt: skip
    programs = _PROGRAMS.get(like.stack, ()) if like.stack != "outpace" else ()
    kept = [row for row in rows if not programs or row["stack"] in programs]
    of = f" by {like.stack}" if programs and kept else ""
    for axis, size in like.axes.items():
        if (axis == "zero" and size < 2) or (axis != "zero" and size == 1):
            continue
        named = f"ZeRO-{size}" if axis == "zero" else names[axis]
        measured = [row["devices"] for row in kept
                    if (row[axis] == size if axis == "zero" else row[axis] > 1)]  # fmt: skip
        if not measured:
            yield f"no measurement of {named}{of}"
        elif like.devices > _BEYOND * max(measured):
            yield f"no measurement of {named}{of} above {max(measured):,}{_ON_MORE}"


def _describe_unmeasured_offloading(
    like: Likeness, rows: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield a phrase that names what the plan offloads but no measured case does.

    Measured cases offload activations at most.
    """
    plan = like.plan
    if plan is None:
        return
    names = ("parameters", "optimizer", "activations")
    away = [name for name in names if getattr(plan, f"offload_{name}") != "none"]
    kept = [row for row in rows if row["offloads"] and row["experts"] == bool(like.experts)]
    unmeasured = [name for name in away if name != "activations" or not kept]
    if unmeasured:
        yield f"no measurement of offloading {join_and(unmeasured)}"


def spread_beyond(words: Sequence[str]) -> float:
    """Return the factor by which a prediction interval is wider on more devices than measured.

    The factor multiplies the logarithms of the interval's bounds. Predictions above 64 devices have
    larger errors (root mean square of the log of measured over predicted time) than those up to 64.
    Beyond the largest measured number of devices, errors are assumed to grow by the same factor
    again. `words` are the result of `extrapolations`; the factor is 1 unless it contains the number
    of devices.
    """
    if not any(one.endswith(_ON_MORE) for one in words):
        return 1.0
    return _error_growth_above_64_devices()


@lru_cache
def _error_growth_above_64_devices() -> float:
    few: list[float] = []
    many: list[float] = []
    for row in measured_rows():
        if not row["experts"]:
            log_error = math.log(row["measured_s"] / row["predicted_s"])
            (many if row["devices"] > 64 else few).append(log_error)
    mean = [math.sqrt(sum(x * x for x in each) / len(each)) for each in (few, many)]
    return max(1.0, mean[1] / mean[0])
