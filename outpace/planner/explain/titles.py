"""Titles and descriptions of plans, and names of the parts of their time."""

from collections.abc import Mapping
from typing import Any

from outpace.planner.model.adapters import AdapterSettings
from outpace.records.plan import Plan
from outpace.records.strategies import TRAITS

# Names of the parts of a step's time.
PARTS: Mapping[str, str] = {
    "products_s": "matmuls",
    "attention_s": "attention",
    "memory_s": "memory-bound operations",
    "host_s": "waiting for host and slowest stage",
    "bubble_s": "pipeline bubble",
    "tensor_s": "tensor-parallel communication",
    "context_s": "context-parallel communication",
    "pipeline_s": "sends between stages",
    "expert_s": "all-to-all of tokens among experts",
    "data_s": "gradients and parameters",
    "optimizer_s": "optimizer",
    "offload_s": "offloading",
    "loading_s": "waiting for data",
}


def title(plan: Plan) -> str:
    """Return a plan's title: its axes, micro-batch and memory options."""
    name = TRAITS[plan.strategy].title
    if name is None:
        mesh = _format_axes(plan)
    else:
        mesh = name if plan.world_size == 1 else f"{name} {plan.world_size}"
        if plan.strategy == "hsdp":
            mesh = f"HSDP {plan.dp_replicate} × {plan.dp_shard}"
    return ", ".join([mesh, f"micro-batch {plan.micro_batch}", *plan_options(plan)])


def _format_axes(plan: Plan) -> str:
    words = [f"TP {plan.tp}"] if plan.tp > 1 else []
    words += [f"CP {plan.cp}"] if plan.cp > 1 else []
    if plan.pp > 1:
        loops = f" × {plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""
        words.append(f"PP {plan.pp}{loops} {plan.schedule}")
    words += [f"replicas {plan.dp_replicate}"] if plan.dp_replicate > 1 else []
    words += [f"ZeRO-{plan.zero} {plan.dp_shard}"] if plan.dp_shard > 1 else []
    return " × ".join(words + ([f"EP {plan.ep}"] if plan.ep > 1 else []))


def plan_options(plan: Plan) -> list[str]:
    """Describe a plan's adapters and its memory options."""
    adapters = AdapterSettings.from_plan(plan)
    found = [] if adapters is None else [adapters.title]
    if plan.checkpointing != "none":
        half = ", half of the blocks" if plan.checkpoint_every > 1 else ""
        what = f"{plan.checkpointing} recomputation"
        if plan.checkpointing == "attention":  # everything else is recomputed
            what = "recomputation except attention"
        found.append(f"{what}{half}")
    if plan.loss == "chunked":
        found.append("chunked loss")
    for what in ("activations", "parameters", "optimizer"):
        place = getattr(plan, f"offload_{what}")
        if place != "none":
            found.append(f"{what} on {'disk' if place == 'disk' else 'the host'}")
    return found


def varied_options(plan: Plan, vary: Mapping[str, Any]) -> list[str]:
    """Describe the varied settings in which a plan differs from the default."""
    words = {
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "compile": "compiled" if plan.compile else "",
        "stage_split": "even stages" if plan.stage_split == "even" else "",
        "sequence_parallel": "" if plan.sequence_parallel else "no sequence parallelism",
        "async_tp": "async TP" if plan.async_tp else "",
        "optimizer_in_backward": "steps in the backward" if plan.optimizer_in_backward else "",
    }
    return [words[name] for name in vary if words[name]]


_SHOWN_IF_SET = (
    "optimizer", "compile", "stage_split", "sequence_parallel", "async_tp", "optimizer_in_backward",
)  # fmt: skip


def given_title(plan: Plan, precision: str, vary: Mapping[str, Any]) -> str:
    """Return the title of a user's plan, with all settings that were varied or are not the default.

    `precision` is the default precision.
    """
    default = Plan()
    set_here = [one for one in _SHOWN_IF_SET if getattr(plan, one) != getattr(default, one)]
    set_here += [] if plan.precision == precision else ["precision"]
    told = varied_options(plan, dict.fromkeys([*vary, *set_here]))
    return ", ".join([title(plan), *told])


def choices(plan: Plan) -> str:
    """Describe a plan's micro-batch and options."""
    return ", ".join([f"micro-batch {plan.micro_batch}", *plan_options(plan)])
