"""A run's context and job: everything that is decided before its first step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outpace.jobs.inputs.inputs import TrainingInputs
from outpace.jobs.ranks.hang_watchdog import RankActivity
from outpace.jobs.ranks.oom_guard import End
from outpace.jobs.ranks.process_groups import Groups
from outpace.jobs.train.auto_micro_batch import Try
from outpace.records.machine import Machine
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback
from outpace.training.heap import PagePrefaulter
from outpace.training.run_dir import RunDir


@dataclass(frozen=True)
class RunContext:
    """A process's inputs to a run, besides the settings.

    `origins`: where settings come from; `command`: what started the run. Both are recorded.
    `callbacks`: called on rank 0. `model`: a live module or a function that builds one, used
    instead of `settings.model`. `end`: function that ends this process when it cannot end by
    itself. `attempt`: function that tries a micro-batch size in another process. `explain`:
    function that writes a hang report into the run's folder. `page_prefaulter`: touches memory in
    advance that training will use. `foresee`: whether to predict if the run fits in memory.
    """

    ranks: Ranks = field(default_factory=Ranks)
    origins: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    callbacks: Sequence[Callback] = ()
    model: nn.Module | Callable[[], Any] | None = None
    end: End | None = None
    attempt: Try | None = None
    explain: Callable[[Path], None] | None = None
    page_prefaulter: PagePrefaulter | None = None
    foresee: bool = True


@dataclass(frozen=True)
class Job:
    """A training job on one rank. `callbacks` is empty on all ranks but 0."""

    settings: TrainSettings
    context: RunContext
    groups: Groups
    device: torch.device
    machine: Machine
    plan: Plan
    inputs: TrainingInputs
    total_steps: int
    run_dir: RunDir
    callbacks: list[Callback]
    doing: RankActivity

    @property
    def ranks(self) -> Ranks:
        """The job's ranks, and this rank's index among them."""
        return self.context.ranks
