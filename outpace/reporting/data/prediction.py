"""The planner's estimate for a finished run, from the run's record."""

from dataclasses import dataclass, replace

from outpace.planner.calibration.cluster import Cluster, of_host, of_probe
from outpace.planner.model.outline import outline
from outpace.planner.plan_columns import of_plans
from outpace.planner.plan_estimate import estimate_plan
from outpace.planner.problem import PlanningProblem
from outpace.planner.search.search_request import SearchRequest
from outpace.planner.step_time.estimate import stages_of
from outpace.planner.step_time.pipeline import Stages
from outpace.records.errors import BadInputError
from outpace.records.estimate import RankedPlan
from outpace.records.machine import Machine
from outpace.records.run import RunRecord


@dataclass(frozen=True)
class Prediction:
    """The planner's estimate for the plan of a run.

    `basis` is a sentence on where the hardware's speeds come from. `stages` has the times of
    pipeline stages.
    """

    planned: RankedPlan
    basis: str
    stages: Stages | None


def predict(record: RunRecord, hosts: int, probe: Machine | None) -> Prediction | str:
    """Return the planner's estimate for a run on `hosts` hosts, or the reason why there is none.

    `probe` is the record that `outpace probe` wrote on this machine. Without it, the hardware's
    speeds come from the catalog; those of a CPU are then guessed.
    """
    why_not = _explain_missing(record, hosts, probe)
    if why_not is not None:
        return why_not
    assert record.model is not None and record.seq_len is not None
    batch, plan = record.settings.global_batch, record.plan
    try:
        cluster = _cluster_of_run(record, hosts, probe)
        model = outline(record.model, record.settings.model)
        job = PlanningProblem(
            outline=model,
            cluster=cluster,
            wanted=SearchRequest(
                outline=model,
                seq_len=record.seq_len,
                global_batch=batch,
                world=plan.world_size,
                per_node=cluster.fabric.per_node,
                precision=plan.precision,
                on_host=cluster.device.kind == "cpu",
            ),
        )
        planned = estimate_plan(job, plan)
        stages = None
        if plan.pp > 1:
            stages = stages_of(job.question, of_plans([plan], batch, model.layers))
    except BadInputError as error:
        return str(error)
    return Prediction(planned, _describe_rates(cluster), stages)


def _explain_missing(record: RunRecord, hosts: int, probe: Machine | None) -> str | None:
    if record.model is None or record.seq_len is None:
        return "The dimensions of a custom model are not in the run's record."
    if record.settings.task == "classify":
        return "The planner does not estimate classifiers yet."
    other = [] if probe is None else record.machine.differences(probe)
    if probe is not None and other:
        return (
            f"The probe is from another machine: {other[0]} is {getattr(probe, other[0])} there, "
            f"and {getattr(record.machine, other[0])} on the run's machine."
        )
    if hosts > 1 and probe is None:
        return (
            f"The run used {hosts} hosts, whose network is not in its record. Give a "
            "machine.json of outpace probe with the run."
        )
    return None


def _cluster_of_run(record: RunRecord, hosts: int, probe: Machine | None) -> Cluster:
    ranks = -(-record.plan.world_size // hosts)
    known = probe or record.machine
    if record.device == "cpu":
        known = known.model_copy(update={"devices": ()})
    if known.probed is None:
        return of_host(known, ranks)
    return replace(of_probe(known, ranks), nodes=hosts)


def _describe_rates(cluster: Cluster) -> str:
    if cluster.probed:
        return f"The rates are those that outpace probe measured on {cluster.name}."
    if cluster.device.kind == "cpu":
        return (
            f"{cluster.name} was not measured beforehand, so its rates are guessed from its vector "
            "width. For a better prediction, give a machine.json of outpace probe with the run."
        )
    return f"The rates are the catalog's for {cluster.device.name}."
