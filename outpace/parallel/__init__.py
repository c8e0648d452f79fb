"""One file per strategy; `apply(request)` lays an objective out on the ranks of a plan."""

from importlib import import_module

from outpace.nn.loss import LanguageModelObjective
from outpace.parallel.api import Layout, Pass, Request
from outpace.records.pipelines import SCHEDULES
from outpace.records.plan import Strategy
from outpace.records.ranks import Ranks

__all__ = ["Layout", "Pass", "Request", "apply", "why_not"]

# Strategies that share a file; every other has one of its own name.
_FILES = {
    **dict.fromkeys(("zero2", "zero3", "hsdp"), "sharded"),
    **dict.fromkeys(SCHEDULES, "pipeline"),
    "tp": "tensor",
    "cp": "context",
    "3d": "combined",
}
# A person's own model is cut by the names of its parts.
_OWN_FILES = {**dict.fromkeys(SCHEDULES, "own_pipeline"), "tp": "own_tensor"}


def apply(request: Request) -> Layout:
    """Lay the objective (already on its device) out as the plan's strategy says."""
    strategy = request.plan.strategy
    own = not isinstance(request.objective, LanguageModelObjective)
    files = {**_FILES, **_OWN_FILES} if own else _FILES
    module = import_module(f"outpace.parallel.{files.get(strategy, strategy)}")
    layout: Layout = module.apply(request)
    return layout


def why_not(strategy: Strategy, ranks: Ranks) -> str | None:
    """What a strategy lacks on this machine, as a sentence; None where nothing."""
    if strategy != "horovod":
        return None
    reason: str | None = import_module("outpace.parallel.horovod").why_not(ranks)
    return reason
