"""All that is settled before the first step."""

from dataclasses import dataclass

import torch

from outpace.jobs.inputs.inputs import TrainingInputs
from outpace.jobs.ranks.hang_watchdog import RankActivity
from outpace.jobs.ranks.process_groups import Groups
from outpace.records.machine import Machine
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback
from outpace.training.run_dir import RunDir


@dataclass(frozen=True)
class Job:
    """A training job on one rank. `callbacks` is empty on all ranks but 0."""

    settings: TrainSettings
    ranks: Ranks
    groups: Groups
    device: torch.device
    machine: Machine
    plan: Plan
    inputs: TrainingInputs
    total_steps: int
    run_dir: RunDir
    callbacks: list[Callback]
    doing: RankActivity
