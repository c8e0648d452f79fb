"""The planner's prediction of a step on a machine in the catalog: time, its parts, and memory."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from outpace.catalog.models import preset
from outpace.catalog.node_names import find_node
from outpace.planner.calibration.cluster import of_catalog
from outpace.planner.hardware.networks import read_network
from outpace.planner.memory import peak
from outpace.planner.memory.setup import MemoryQuestion
from outpace.planner.model.outline import outline
from outpace.planner.plan_columns import of_plans
from outpace.planner.search.finalists import simulate_pipelines
from outpace.planner.step_time.estimate import estimate
from outpace.planner.step_time.layer import Kernel
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.records.outline import Outline
from outpace.records.plan import Plan

# The work of the device itself; it waits for everything else.
_BUSY = ("products_s", "attention_s", "memory_s", "optimizer_s")


def model(name: str, dropout: bool = True) -> Outline:
    """Return a preset with dropout, as in transformers' GPT-2."""
    plain = outline(preset(name), name)
    stacks = tuple(stack.model_copy(update={"dropout": dropout}) for stack in plain.stacks)
    return plain.model_copy(update={"stacks": stacks})


def step(
    of: Outline,
    machine: str,
    plan: Mapping[str, Any],
    seq_len: int,
    global_batch: int,
    *,
    nodes: int = 1,
    network: str | None = None,
    kernel: Kernel = "unfused",
) -> dict[str, Any]:
    """Return a step's seconds, their parts, the devices' busy share, and the fullest rank's bytes.

    The documents' trainers write attention's scores, so `kernel` is unfused. A machine has all
    devices that the catalog gives it.
    """
    cluster = of_catalog(find_node(machine), nodes, read_network(network) if network else None)
    question = StepTimeQuestion(
        of, seq_len, cluster.device, cluster.fabric, kernel, other_program=True
    )
    columns = of_plans([Plan.parse(dict(plan), "seeds")], global_batch, of.layers)
    times = simulate_pipelines(question, columns, estimate(question, columns), np.array([0]))
    parts = {f.name: float(getattr(times, f.name)[0]) for f in fields(times)}
    needs = peak.reserved_bytes(
        MemoryQuestion(of, seq_len, fused_attention=kernel != "unfused"), columns
    )
    step_s = sum(parts.values())
    return {
        "machine": machine,
        "plan": dict(plan),
        "global_batch": global_batch,
        "step_s": step_s,
        "tokens_per_s": global_batch * seq_len / step_s,
        "busy_share": sum(parts[name] for name in _BUSY) / step_s,
        "parts_s": {name: seconds for name, seconds in parts.items() if seconds > 0},
        "needs_bytes": round(float(needs[0])),
        "memory_bytes": cluster.device.memory_bytes,
    }
