"""Training steps on random tokens, to measure a plan without data."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.nn.loss import LanguageModelObjective
from outpace.nn.mixed_precision import keeps_casts, lower_weights, make_mixed
from outpace.nn.model_options import apply_options
from outpace.nn.scratch_files import Scratch
from outpace.nn.transformer import drawn_transformer
from outpace.optim.build import make_optimizer
from outpace.parallel import LayoutRequest, apply
from outpace.parallel.deferred_init import parts_of
from outpace.parallel.offload import place_optimizer
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.training.step import Stepper

Batch = dict[str, Tensor]
_LR = 1e-3


@dataclass(frozen=True)
class SyntheticTraining:
    """Training of a model on one random global batch, which every step repeats."""

    spec: ModelSpec
    global_batch: int
    seq_len: int
    seed: int = 0

    def batch(self, device: torch.device | None = None) -> Batch:
        """Return the global batch."""
        drawn = torch.Generator().manual_seed(self.seed)
        shape = (self.global_batch, self.seq_len + 1)
        tokens = torch.randint(0, self.spec.vocab, shape, generator=drawn).to(device)
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    @property
    def targets(self) -> int:
        """Number of targets in the global batch."""
        return self.global_batch * self.seq_len


def rank_micro_batches(batch: Batch, plan: Plan, rank: int) -> list[Batch | None]:
    """Return the micro-batches that a rank reads of a global batch, as the data loader splits it.

    They are None on ranks that read no data.
    """
    size, degree = plan.samples_read, plan.readers
    first = plan.data_rank(rank)
    samples = len(batch["tokens"])
    if first is None:
        return [None] * plan.accumulation(samples)
    begins = range(first * size, samples, degree * size)
    return [{name: part[begin : begin + size] for name, part in batch.items()} for begin in begins]


class SyntheticSteps:
    """Runner of synthetic training steps under a plan.

    Every rank of the job must construct and call it; ranks beyond the plan's world size do nothing.
    `control` is a process group for tensors on the host.
    """

    def __init__(
        self, plan: Plan, course: SyntheticTraining, ranks: Ranks, device: torch.device,
        control: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self._stepper: Stepper | None = None
        self._batches: Sequence[Batch | None] = ()
        self._step = 0
        if ranks.rank >= plan.world_size:
            return
        own = Ranks() if plan.world_size == 1 else ranks
        settings = TrainSettings(lr=_LR)
        mixed = make_mixed(
            plan.precision,
            device,
            keeps_casts(settings.autocast_cache, False),
            fully_shards=plan.fully_shards,
        )
        model = drawn_transformer(course.spec, course.seed, device, torch.float32)
        objective = LanguageModelObjective(model, plan.loss, mixed.dtype, plan.compile)
        whole_values = lower_weights(objective, mixed)
        scratch = Scratch()
        apply_options(objective.model, plan, scratch=scratch, device=device)
        layout = apply(LayoutRequest(objective, plan, own, device, scratch=scratch))
        place = partial(place_optimizer, layout, plan, scratch)
        optimizer = make_optimizer(
            layout.named_parameters(),
            plan.optimizer,
            settings,
            place,
            mixed.keeps_masters,
            parts_of(layout, whole_values),
        )
        del whole_values
        self._batches = rank_micro_batches(course.batch(device), plan, own.rank)
        self._stepper = Stepper(
            layout=layout,
            optimizer=optimizer,
            mixed=mixed,
            plan=plan,
            clip=settings.clip,
            device=device,
            control=control,
            expected_targets=course.targets,
            targets_known=True,
        )

    def step(self) -> None:
        """Run a step, including the optimizer."""
        if self._stepper is None:
            return
        self._step += 1
        self._stepper.begin()
        self._stepper.run(self._step, _LR, list(self._batches), lambda: False)
