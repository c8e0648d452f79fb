"""Comparison of logged runs with predictions, and correction of the machine's rates."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outpace.catalog.node_names import find_node
from outpace.interop.training_logs import read_log
from outpace.jobs.planning.given_settings import split_settings
from outpace.jobs.planning.logged_run_checks import (
    Answers,
    check_clock,
    check_contradictions,
    check_micro_batch,
    check_model,
    check_possible,
    list_assumed,
)
from outpace.jobs.planning.request import PlanQuestion, check_network, job
from outpace.planner.calibration.observed_runs import correct_cluster
from outpace.planner.memory.peak import library_bytes
from outpace.planner.plan_columns import of_plans
from outpace.planner.plan_estimate import estimate_plan
from outpace.planner.problem import PlanningProblem
from outpace.records.errors import BadInputError
from outpace.records.estimate import Estimate
from outpace.records.machine import Machine
from outpace.records.plan import Plan, PlanFile
from outpace.records.training_log import CorrectedMachine, LoggedRun, ObservedRun, is_corrected

_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
# Fields of a plan that a log may state.
_STATED = (
    *_AXES, "micro_batch", "sequence_parallel", "pp_microbatches", "pp_schedule", "virtual_stages",
    "precision", "checkpointing", "offload_parameters", "offload_optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class CalibratedRun:
    """A logged run, and its predicted step time before and after correcting the machine's rates.

    `planned_memory_bytes` is the predicted peak memory. It counts allocated, reserved or resident
    bytes, whichever the log reports. `assumed` has the plan's settings that neither the log nor a
    flag gives.
    """

    observed: ObservedRun
    before_s: float
    after_s: float
    planned_memory_bytes: int
    notes: tuple[str, ...] = ()
    assumed: Mapping[str, str] = field(default_factory=dict)

    @property
    def error_before(self) -> float:
        """Relative error of the prediction before correcting rates."""
        return self.before_s / self.observed.step_time_s - 1

    @property
    def error_after(self) -> float:
        """Relative error of the prediction after correcting rates."""
        return self.after_s / self.observed.step_time_s - 1


@dataclass(frozen=True)
class CalibrationRequest:
    """Training logs to calibrate from.

    `plan` (complete) or `layout` (partial) gives settings that the logs lack.
    """

    logs: tuple[Path, ...]
    asked: PlanQuestion
    plan: Path | None = None
    layout: str | None = None


def calibrate_machine(
    request: CalibrationRequest,
) -> tuple[tuple[CalibratedRun, ...], CorrectedMachine]:
    """Predict each logged run, and correct the machine's rates to match all runs.

    Runs from an earlier calibration in the machine's file are included. Raises BadInputError if a
    log cannot be read or lacks something that no flag provides.
    """
    logged = [read_log(path) for path in request.logs]
    base, kept = _uncorrected_question(request.asked)
    questions = [_build_problem(one, request, base) for one in logged]
    before = [estimate_plan(one, plan).estimate for one, plan in questions]
    runs = tuple(
        _observe(one, question, plan)
        for one, (question, plan) in zip(logged, questions, strict=True)
    )
    for one, run, planned, (question, _) in zip(logged, runs, before, questions, strict=True):
        check_clock(one, run)
        check_possible(question, run, planned)
    every = (*(run for run in kept if not any(map(run.same_run, runs))), *runs)
    after = [
        estimate_plan(replace(one, cluster=correct_cluster(one.cluster, every)), plan).estimate
        for one, plan in questions
    ]
    compared = tuple(
        CalibratedRun(
            run,
            was.step_time_s,
            now.step_time_s,
            _predicted_log_bytes(question, run, was),
            one.notes,
            list_assumed(one, run.plan, _read_flags(request)),
        )
        for run, was, now, one, (question, _) in zip(
            runs, before, after, logged, questions, strict=True
        )
    )
    return compared, _correct_machine(base, every)


def _uncorrected_question(question: PlanQuestion) -> tuple[PlanQuestion, tuple[ObservedRun, ...]]:
    """Return the question for the uncorrected machine, and the runs used to correct it earlier."""
    if question.machine is None:
        raise BadInputError(
            "which machine are the logs from? Pass it as --machine, such as --machine hgx-h100, "
            "or pass the machine.json of outpace probe."
        )
    path = Path(question.machine).expanduser()
    if not is_corrected(path):
        return question, ()
    file = CorrectedMachine.load(path, option="--machine ")
    if file.node is None:
        raise BadInputError(
            f"{path} is a probe that was already corrected, and cannot be corrected again. "
            "Pass the machine.json of outpace probe, with all logs."
        )
    check_network(question, file, path)
    devices = file.devices_per_node
    used = devices or find_node(file.node).processes
    if question.devices_per_node not in (None, used):
        raise BadInputError(
            f"--devices-per-node {question.devices_per_node}: the runs that corrected {path} had "
            f"{used}. Leave out --devices-per-node, or start another file with --machine "
            f"{file.node}."
        )
    base = replace(question, machine=file.node, network=file.network, devices_per_node=devices)
    return base, file.runs


def _predicted_log_bytes(question: PlanningProblem, run: ObservedRun, planned: Estimate) -> int:
    """Return the predicted peak memory of the kind that the log reports.

    This is allocated, reserved or resident memory.
    """
    if run.memory_kind == "allocated":
        return planned.peak_memory_bytes - planned.memory.get("allocator and libraries", 0)
    if run.memory_kind == "reserved" and question.cluster.device.kind == "cuda":
        columns = of_plans([run.plan], run.global_batch, run.outline.layers)
        return planned.peak_memory_bytes - round(float(library_bytes(columns)[0]))
    return planned.peak_memory_bytes


def _correct_machine(question: PlanQuestion, runs: tuple[ObservedRun, ...]) -> CorrectedMachine:
    path = Path(str(question.machine)).expanduser()
    probed = path.suffix == ".json" or path.is_file()
    return CorrectedMachine(
        node=None if probed else question.machine,
        network=question.network,
        devices_per_node=question.devices_per_node,
        machine=Machine.load(path, option="--machine ") if probed else None,
        runs=runs,
    )


def _build_problem(
    logged: LoggedRun, request: CalibrationRequest, base: PlanQuestion
) -> tuple[PlanningProblem, Plan]:
    answers = _read_flags(request)
    check_contradictions(logged, answers)
    plan = _build_plan(logged, request)
    seq_len = request.asked.seq_len or logged.seq_len
    batch = request.asked.global_batch or logged.global_batch
    for value, flag, what in (
        (seq_len, "--seq-len", "tokens per sequence"),
        (batch, "--global-batch", "sequences per step"),
    ):
        if value is None:
            raise BadInputError(f"{logged.log} does not state the number of {what}. Pass {flag}.")
    check_micro_batch(logged, plan, answers, batch or 1)
    question = job(replace(base, seq_len=seq_len, global_batch=batch, precision=plan.precision))
    check_model(logged, question, plan, str(base.model))
    if question.wanted.world != plan.world_size:
        raise BadInputError(
            f"{logged.log}: its layout has {plan.world_size} devices, but {question.cluster.nodes} "
            f"× {question.cluster.fabric.per_node} = {question.wanted.world} devices are "
            "requested. Correct --nodes and --devices-per-node, or give the layout with --layout, "
            "such as strategy=zero3,dp_shard=8."
        )
    return question, plan


def _read_flags(request: CalibrationRequest) -> Answers:
    asked = request.asked
    layout = _read_layout(request.layout)
    if request.plan is not None:
        whole = PlanFile.load(request.plan, option="--plan ").plan.model_dump()
        layout = {name: whole[name] for name in (*_AXES, "micro_batch", "lora_rank")}
    source = "--layout" if request.plan is None else "--plan"
    return Answers(source, layout, asked.seq_len, asked.global_batch, asked.precision)


def _observe(logged: LoggedRun, question: PlanningProblem, plan: Plan) -> ObservedRun:
    """Convert a log to an observed run, deriving the step time from throughput if necessary."""
    wanted = question.wanted
    step_time_s = logged.step_time_s
    if step_time_s is None and logged.samples_per_s is not None:
        step_time_s = wanted.global_batch / logged.samples_per_s
    if step_time_s is None and logged.tokens_per_s_per_device is not None:
        tokens = wanted.global_batch * wanted.seq_len
        step_time_s = tokens / (logged.tokens_per_s_per_device * plan.world_size)
    if step_time_s is None:
        raise BadInputError(f"{logged.log} has neither a step time nor a throughput.")
    return ObservedRun(
        trainer=logged.trainer, log=logged.log, outline=question.outline,
        seq_len=wanted.seq_len, global_batch=wanted.global_batch, plan=plan,
        step_time_s=step_time_s, peak_memory_bytes=logged.peak_memory_bytes,
        memory_kind=logged.memory_kind,
    )  # fmt: skip


def _build_plan(logged: LoggedRun, request: CalibrationRequest) -> Plan:
    """Return the run's plan: from --plan, from the log, or from the log's settings and --layout."""
    if request.plan is not None:
        return PlanFile.load(request.plan, option="--plan ").plan
    if logged.plan is not None and request.layout is None:
        return logged.plan
    found = {name: getattr(logged, name) for name in _STATED}
    values: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    if logged.plan is not None:
        values = logged.plan.model_dump()
    values |= _read_layout(request.layout)
    precision = request.asked.precision
    if precision is not None:
        values["precision"] = precision
    else:
        values.setdefault("precision", "bf16")
    if logged.plan is None:
        values = _add_data_parallel(values, logged)
    if "strategy" not in values:
        values["strategy"] = _infer_strategy(values, logged)
    if logged.plan is None:
        values = _add_pipeline_fields(values, logged, request)
    return Plan.parse(values, f"{logged.log}, with --layout {request.layout or '(not given)'}")


def _read_layout(text: str | None) -> dict[str, Any]:
    """Parse a layout such as "strategy=zero3,tp=2" into fields of `Plan`.

    Raises BadInputError for a setting that a plan does not have.
    """
    found: dict[str, Any] = {}
    for part, name, value in split_settings(text):
        if value is None or name not in Plan.model_fields:
            raise BadInputError(
                f"--layout {part}: write settings of a plan as name=value, such as "
                "strategy=zero3,dp_shard=8,checkpointing=full."
            )
        whole = value.removeprefix("-").isdigit()
        found[name] = int(value) if whole else {"true": True, "false": False}.get(value, value)
    return found


def _add_data_parallel(values: dict[str, Any], logged: LoggedRun) -> dict[str, Any]:
    rest = logged.world_size
    if rest is None or {"dp_replicate", "dp_shard"} & values.keys():
        return values
    for axis in ("cp", "tp", "pp"):
        rest //= values.get(axis, 1)
    # With expert parallelism, ranks shard at least the optimizer state.
    shards = bool(logged.zero) or values.get("ep", 1) > 1
    strategy = values.get("strategy")
    replicated = strategy in ("ddp", "ring", "ps") or (strategy is None and not shards)
    return {**values, "dp_replicate" if replicated else "dp_shard": max(1, rest)}


def _add_pipeline_fields(
    values: dict[str, Any], logged: LoggedRun, request: CalibrationRequest
) -> dict[str, Any]:
    """Add the ZeRO level of `3d` plans, and the number of pipeline micro-batches."""
    found = dict(values)
    if found["strategy"] == "3d" and logged.zero is not None:
        found.setdefault("zero", max(1, logged.zero))
    batch = request.asked.global_batch or logged.global_batch
    if logged.pp_schedules_all and found.get("pp", 1) > 1 and batch is not None:
        each = found.get("dp_replicate", 1) * found.get("dp_shard", 1) * found.get("micro_batch", 1)
        found.setdefault("pp_microbatches", max(1, batch // each))
    return found


def _infer_strategy(values: dict[str, Any], logged: LoggedRun) -> str:
    axes = {axis for axis in _AXES if values.get(axis, 1) > 1}
    if not axes:
        return "single"
    if axes == {"dp_replicate"}:
        return "ddp"
    if axes == {"dp_shard"}:
        return f"zero{logged.zero or 3}"
    if axes == {"dp_replicate", "dp_shard"}:
        return "hsdp"
    if axes == {"tp"}:
        return "tp"
    if axes == {"pp"}:
        return str(values.get("pp_schedule", "1f1b"))
    return "3d"
