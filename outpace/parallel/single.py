"""The baseline: one process, nothing exchanged."""

import torch
from torch import nn

from outpace.parallel.api import Applied
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks


def apply(objective: nn.Module, plan: Plan, ranks: Ranks, device: torch.device) -> Applied:
    """Use the objective as it is."""
    return Applied(objective)
