"""Step time on this host by the planner's model, whether or not the plan fits."""

from contextlib import suppress
from functools import cache
from typing import Literal

from outpace.catalog.accelerators import find_accelerator
from outpace.jobs.machine_file import find_probe
from outpace.planner.calibration.cluster import Cluster, of_host, of_probe
from outpace.planner.calibration.fit_rates import steps_s
from outpace.planner.model.outline import classifier_outline, outline
from outpace.planner.plan_columns import of_plans
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.probing.hardware.machine import identify
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings


def step_time_s(
    settings: TrainSettings,
    spec: ModelSpec,
    plan: Plan,
    seq_len: int,
    ranks: int,
    device: Literal["cpu", "cuda"],
) -> float:
    """Return a plan's predicted step time on hosts like this one, with `ranks` processes each.

    Raises BadInputError if the plan does not divide the global batch.
    """
    model = outline(spec, settings.model)
    if settings.task == "classify":
        model = classifier_outline(model)
    cluster = _find_cluster(ranks, device)
    question = StepTimeQuestion(model, seq_len, cluster.device, cluster.fabric)
    return float(steps_s(question, of_plans([plan], settings.global_batch, model.layers))[0])


@cache
def _find_cluster(ranks: int, device: Literal["cpu", "cuda"]) -> Cluster:
    """Return this host as probed if a usable machine.json is here, otherwise as detected."""
    machine = identify(find_accelerator)
    host = machine.model_copy(update={"devices": ()})
    used = host if device == "cpu" else machine
    with suppress(BadInputError):  # unreadable, or a figure is missing
        probed = find_probe(used)
        if probed is not None:
            return of_probe(probed, ranks)
    with suppress(BadInputError):  # for an unknown accelerator, use its host
        return of_host(used, ranks)
    return of_host(host, ranks)
