"""Plans for `outpace train --plan`: read from a file, or chosen by the planner and traced."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from outpace.catalog.accelerators import find_accelerator
from outpace.interop.custom_model import build_custom_model
from outpace.interop.models import names_code, open_model
from outpace.jobs.defaults import (
    resolve_device,
    resolve_offload,
    resolve_precision,
    resolve_seq_len,
)
from outpace.jobs.inputs.tasks import NOT_CLASSIFY
from outpace.jobs.machine_file import find_probe, has_probe_file, used_machine
from outpace.jobs.memory.traced_plan import fullest
from outpace.jobs.planning.given_settings import KEPT
from outpace.jobs.planning.model_outline import find_outline
from outpace.jobs.planning.request import check_adapters, default_vary
from outpace.planner.calibration.cluster import Cluster, of_host, of_probe
from outpace.planner.model.adapters import ADAPTER_NAMES
from outpace.planner.model.outline import classifier_outline
from outpace.planner.plan import plans
from outpace.planner.problem import PlanningProblem
from outpace.planner.search.search_request import SearchRequest
from outpace.probing.hardware.machine import identify
from outpace.probing.hardware.process_memory import anonymous_bytes
from outpace.records.errors import BadInputError
from outpace.records.estimate import Plans, RankedPlan
from outpace.records.host_rates import HostRates
from outpace.records.machine import Machine
from outpace.records.plan import AXES, Plan, PlanFile, Strategy
from outpace.records.precisions import LEVELS, WHERE_OFFLOADED
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.records.tuning import TUNING_FILE, Tuning
from outpace.records.units import show_bytes, show_seconds

DEFAULT = "default"
# Settings outside the plan that affect a step's time.
_OF_A_STEP = (
    "model", "task", "seq_len", "global_batch", "threads", "document_attention", "device",
)  # fmt: skip
_COUNT = 8  # plans to try, the recommended one first
_MOST_RANKS = 8  # most processes on one CPU host

Settings = tuple[TrainSettings, dict[str, str]]


def apply_settings_plan(
    settings: TrainSettings,
    origins: Mapping[str, str],
    ranks: Ranks | None,
    say: Callable[[str], None],
) -> Settings:
    """Resolve --plan into settings. Return all settings and the origin of each.

    Raises BadInputError if no plan fits, or if settings contradict the plan.
    """
    if settings.plan is None:
        return settings, dict(origins)
    workload: dict[str, int] = {}
    given = settings.plan
    if given == "auto":
        chosen = _choose_plan(settings, origins, ranks, say)
    else:
        file = PlanFile.load(Path(given).expanduser(), option="--plan ")
        chosen, workload = file.plan, _workload_of_file(file, origins)
        _check_plan_file(chosen, settings, origins, ranks)
    if chosen.training_obstacle is not None:
        raise BadInputError(
            f"--plan {settings.plan}: outpace cannot train it: {chosen.training_obstacle}."
        )
    values = _plan_to_settings(chosen, settings)
    if given == "auto" and settings.compile is None and chosen.compile:
        del values["compile"]  # decided later, by the length of the run
    if ranks is not None:
        values["nproc"] = None  # the ranks are already running
    if given != "auto" and settings.expect_step_time_s is None:
        path = Path(given).expanduser()
        values["expect_step_time_s"] = _read_tuned_step_time_s(
            path, chosen, settings.model_copy(update=workload), say
        )
    where = f"plan {settings.plan}"
    told = {name: where for name in {**values, **workload} if origins.get(name) in (None, DEFAULT)}
    return (
        settings.model_copy(update={**values, **workload, "plan": None}),
        {**origins, **told, "plan": DEFAULT},
    )


def _workload_of_file(file: PlanFile, origins: Mapping[str, str]) -> dict[str, int]:
    """Return the sequence length and global batch of a plan file, except what the user set."""
    known = {"seq_len": file.seq_len, "global_batch": file.global_batch}
    return {
        name: value
        for name, value in known.items()
        if value is not None and origins.get(name, DEFAULT) == DEFAULT
    }


def _plan_to_settings(plan: Plan, settings: TrainSettings) -> dict[str, Any]:
    """Convert a plan to settings, leaving unset those that its strategy does not use."""
    both = set(Plan.model_fields) & set(TrainSettings.model_fields)
    values = {name: getattr(plan, name) for name in both}
    for axis in AXES:
        values[axis] = getattr(plan, axis) if plan.world_size > 1 else None
    if plan.loss == "auto":
        del values["loss"]  # left to the user
    if plan.pp == 1 or plan.strategy == "mp":
        values["pp_microbatches"] = None
    values["pp_schedule"] = plan.pp_schedule if plan.strategy == "3d" and plan.pp > 1 else None
    values["servers"] = plan.servers or None
    for name in ("offload_parameters", "offload_optimizer"):
        values[name] = getattr(plan, name) if getattr(plan, name) != "none" else None
    if plan.lora_rank is None and settings.lora_rank is None:
        for name in ADAPTER_NAMES:
            values.pop(name, None)
    values["nproc"] = None if plan.world_size == 1 else plan.world_size
    return values


def _read_tuned_step_time_s(
    path: Path, plan: Plan, settings: TrainSettings, say: Callable[[str], None]
) -> float | None:
    """Return the step time in seconds that tuning measured for the plan in a file.

    Returns None if there is no such measurement, or if it is of another plan, other settings or
    another machine, which `say` reports.
    """
    beside = path.parent / TUNING_FILE
    if not beside.is_file():
        return None
    try:
        tuning = Tuning.load(beside)
        then = TrainSettings.parse(tuning.settings, str(beside))
    except BadInputError as error:
        say(f"the step time is not checked: {error}")
        return None
    other = [name for name in _OF_A_STEP if getattr(then, name) != getattr(settings, name)]
    if identify(find_accelerator).differences(tuning.machine):
        other.append("machine")
    if tuning.fastest is None or tuning.fastest.plan != plan:
        other.append("plan")
    if other:
        say(f"the step time is not checked: {', '.join(other)} differ from {beside}")
        return None
    return tuning.step_time_s


def _check_plan_file(
    plan: Plan, settings: TrainSettings, origins: Mapping[str, str], ranks: Ranks | None
) -> None:
    world = ranks.world_size if ranks is not None else settings.nproc or plan.world_size
    if plan.world_size != world:
        raise BadInputError(
            f"--plan {settings.plan} is for {plan.world_size} processes, but there are {world}."
        )
    for name, value in _plan_to_settings(plan, settings).items():
        asked = getattr(settings, name)
        # −1 stands for all remaining ranks; the precision may be an Apex level.
        if asked == -1 or LEVELS.get(asked, asked) == value:
            continue
        if origins.get(name) not in (None, DEFAULT) and asked != value and name != "nproc":
            raise BadInputError(
                f"--{name.replace('_', '-')} {asked}, but --plan {settings.plan} has {value}. "
                "Leave one of them out."
            )


def _choose_plan(
    settings: TrainSettings,
    origins: Mapping[str, str],
    ranks: Ranks | None,
    say: Callable[[str], None],
) -> Plan:
    """Trace the planner's plans, best first, and return the first that fits in memory."""
    machine = used_machine(identify(find_accelerator), resolve_device(settings, Ranks()))
    answers = []
    failed: BadInputError | None = None
    per_node = None if ranks is None else ranks.local_world_size
    for world in _world_sizes(settings, ranks, machine):
        try:
            job = question(settings, origins, machine, world, per_node)
            answers.append((plans(job), job))
        except BadInputError as error:
            failed = failed or error
    if not answers:
        assert failed is not None
        raise failed
    if any(job.cluster.calibrated for _, job in answers):
        # Without corrections from measured steps, rates are too high, and their plans would always
        # look fastest (docs/development/log.md).
        answers = [(answer, job) for answer, job in answers if job.cluster.calibrated]
    answers.sort(key=lambda pair: pair[0].plans[0].estimate.step_time_s)
    for answer, job in answers:
        for planned in answer.plans:
            if _fits_when_traced(planned, settings, job, say):
                _report_plan(answer, planned, say)
                return planned.plan
    raise BadInputError(
        "--plan auto: none of the planner's choices fits when traced. Use a shorter "
        "--seq-len, a smaller --global-batch or a smaller --model."
    )


def _world_sizes(settings: TrainSettings, ranks: Ranks | None, machine: Machine) -> list[int]:
    """Return the numbers of processes to plan for.

    This is the number of running or requested ranks, if any. Otherwise it is one per accelerator,
    or every divisor of the number of cores; without a probe, a CPU runs one process, since the
    speed of communication is unknown.
    """
    if ranks is not None:
        return [ranks.world_size]
    if settings.nproc is not None:
        return [settings.nproc]
    if machine.devices:
        return [len(machine.devices)]
    return candidate_world_sizes(machine) if has_probe_file() else [1]


def candidate_world_sizes(machine: Machine) -> list[int]:
    """Return the numbers of processes, at most 8, that divide the host's cores evenly."""
    most = min(machine.host_cores, _MOST_RANKS)
    return [n for n in range(1, most + 1) if machine.host_cores % n == 0]


def _require_plannable(settings: TrainSettings, origins: Mapping[str, str]) -> None:
    what = None
    for name in Plan.model_fields:
        field = TrainSettings.model_fields.get(name)
        if field is None or name in KEPT or origins.get(name, DEFAULT) == DEFAULT:
            continue
        if getattr(settings, name) != field.default:
            what = f"--{name.replace('_', '-')}"
    if what is not None:
        raise BadInputError(
            f"the planner does not support {what} yet. Leave out {what}, or choose --strategy, "
            "--micro-batch and --checkpointing yourself; `outpace memory` shows whether your "
            "choice fits."
        )


def question(
    settings: TrainSettings,
    origins: Mapping[str, str],
    machine: Machine,
    world: int,
    per_node: int | None = None,
    measured: HostRates | None = None,
) -> PlanningProblem:
    """Build the planning problem for the unset settings, on `world` processes.

    `per_node`: processes per host, on hosts like this one; None: all processes on this host.
    `measured`: this host's rates, if it was not probed.
    """
    _require_plannable(settings, origins)
    _, outline, _ = find_outline(settings.model)
    classifies = settings.task == "classify"
    outline = classifier_outline(outline) if classifies else outline
    cluster = _build_cluster(settings, machine, world, per_node or world, measured)
    keep: dict[str, Any] = {}
    if settings.compile is not None:
        keep["compile"] = settings.compile
    for name in KEPT:
        if name in TrainSettings.model_fields and origins.get(name, DEFAULT) != DEFAULT:
            keep[name] = getattr(settings, name)
    if keep.get("micro_batch") == "auto":
        del keep["micro_batch"]
    keep = {name: value for name, value in keep.items() if name not in AXES or value != -1}
    if settings.offload is not None:  # short for two settings
        keep |= resolve_offload(settings)
    # The planner does not choose the precision, except where offloading requires another one.
    precision = resolve_precision(settings, resolve_device(settings, Ranks()), machine)
    check_adapters({"precision": precision, **keep}, outline)
    away = None if settings.precision is not None else WHERE_OFFLOADED.get(precision)
    if away is None:
        keep["precision"] = precision
    return PlanningProblem(
        outline=outline,
        cluster=cluster,
        wanted=SearchRequest(
            outline=outline,
            seq_len=resolve_seq_len(settings, outline.max_positions),
            global_batch=settings.global_batch,
            world=world,
            per_node=cluster.fabric.per_node,
            precision=precision,
            offloaded_precision=away,
            optimizer=settings.optimizer,
            keep={name: value for name, value in keep.items() if value is not None},
            vary=default_vary(cluster, keep),
            trained=True,
            naive=False,
            without=NOT_CLASSIFY if classifies else _find_excluded_strategies(settings, world),
            on_host=not machine.devices,
        ),
        count=_COUNT,
    )


def _find_excluded_strategies(settings: TrainSettings, world: int) -> Collection[Strategy]:
    """Return the strategies that cannot be applied to a custom model; none for other models."""
    if not names_code(settings.model):
        return ()
    from outpace.parallel.custom.module_shape import find_refused_strategies

    build = open_model(settings.model).build
    assert build is not None
    return find_refused_strategies(build_custom_model(build), world).keys()


def _build_cluster(
    settings: TrainSettings, machine: Machine, world: int, per_node: int, measured: HostRates | None
) -> Cluster:
    """Return the cluster as probed if machine.json describes this machine, else as detected.

    The memory of its devices is limited to --memory-limit, if set. On a CPU, what this process
    already holds is subtracted.
    """
    if world % per_node:
        raise BadInputError(
            f"--plan auto: {per_node} of {world} ranks are on this host, and other hosts have a "
            "different number, but plans are for equal hosts. Start the same number on each, or "
            "choose --strategy and its axes yourself."
        )
    probed = find_probe(machine)
    if probed is not None:
        cluster = of_probe(probed, per_node)
    else:
        cluster = of_host(machine, per_node, measured)
    if cluster.nodes != world // per_node:
        cluster = replace(cluster, nodes=world // per_node)
    allowed = settings.memory_limit or cluster.device.memory_bytes
    if allowed is None:
        return cluster
    if cluster.device.kind == "cpu":
        # On a CPU, the process's own memory counts too, including its libraries.
        own = anonymous_bytes()
        if own >= allowed:
            raise BadInputError(
                f"a process already uses {show_bytes(own)} of the {show_bytes(allowed)} that it "
                "may use. Raise --memory-limit, or start fewer processes."
            )
        allowed -= own
    return replace(cluster, device=replace(cluster.device, memory_bytes=allowed))


def _fits_when_traced(
    planned: RankedPlan, settings: TrainSettings, job: PlanningProblem, say: Callable[[str], None]
) -> bool:
    """Return whether the plan fits in memory when traced; True if it cannot be traced."""
    limit = job.cluster.device.memory_bytes
    # The trace has a language model's head, so classifiers are not traced.
    if planned.untrained is not None or limit is None or settings.task == "classify":
        return planned.untrained is None
    try:
        needed = fullest(planned.plan, settings.model, job, settings.dropout).device_bytes
    except BadInputError as error:
        say(f"{planned.title} was not traced ({error}), so its memory is the formula's estimate")
        return True
    if needed <= limit:
        return True
    say(
        f"skipped: {planned.title} needs {show_bytes(needed)} of {show_bytes(limit)} when traced "
        f"(the formula gives {show_bytes(planned.estimate.peak_memory_bytes)})"
    )
    return False


def _report_plan(answer: Plans, planned: RankedPlan, say: Callable[[str], None]) -> None:
    one = planned.estimate
    say(
        f"plan: {planned.title} (of {answer.considered:,} considered; step time about "
        f"{show_seconds(one.step_time_s)}, {one.level * 100:.0f} % between "
        f"{show_seconds(one.low_s)} and {show_seconds(one.high_s)}; {answer.source} rates)"
    )
    for note in answer.notes:
        say(f"note: {note}")
    for other in answer.plans:
        if other.roles and other is not planned:
            say(
                f"alternative: {other.listed_title} "
                f"({show_seconds(other.estimate.step_time_s)} a step, "
                f"{show_bytes(other.estimate.peak_memory_bytes)})"
            )
