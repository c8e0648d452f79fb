"""One file per strategy; `apply(objective, plan, ranks, device)` lays an objective out.

A strategy is a module of this package with the strategy's name and a function `apply`.
"""

from importlib import import_module

import torch
from torch import nn

from outpace.parallel.api import Applied
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks

__all__ = ["Applied", "apply"]


def apply(objective: nn.Module, plan: Plan, ranks: Ranks, device: torch.device) -> Applied:
    """Lay `objective` (already on `device`) out as the plan's strategy says."""
    module = import_module(f"outpace.parallel.{plan.strategy}")
    applied: Applied = module.apply(objective, plan, ranks, device)
    return applied
