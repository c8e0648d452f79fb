"""A few steps of training under any plan, by the parts that `outpace train` is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from forked import world

from outpace.experiment.parity import Trial
from outpace.jobs.ranks.process_groups import Groups
from outpace.nn.mixed_precision import lower_weights, make_mixed
from outpace.nn.model_options import apply_options
from outpace.nn.scratch_files import Scratch
from outpace.optim.build import make_optimizer
from outpace.optim.master import master_weights
from outpace.parallel import Layout, LayoutRequest, apply
from outpace.parallel.deferred_init import parts_of
from outpace.parallel.offload import place_optimizer
from outpace.parallel.tensors import whole
from outpace.records.axes import fill_axes
from outpace.records.model import ModelSpec
from outpace.records.pipelines import default_microbatches
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings
from outpace.training.guards import seed_step
from outpace.training.step import RawStep, Stepper
from outpace.training.synthetic import rank_micro_batches

CPU = torch.device("cpu")
# What is so much smaller than the largest of its kind may be rounding.
FLOOR = 1e-6
# Tied weights, grouped queries, and a layer more than four stages have.
SPEC = ModelSpec.parse(
    {"family": "llama", "layers": 5, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 96,
     "vocab": 96, "max_positions": 64, "tied": True},
    "test",
)  # fmt: skip


def plan_of(name: str, samples: int = 16, **options: Any) -> Plan:
    """From "zero3@4", with two accumulation steps; "servers" is ps where the servers step."""
    strategy, _, ranks = name.partition("@")
    by_servers = strategy == "servers"
    strategy, world_size = "ps" if by_servers else strategy, int(ranks or 1)
    servers = world_size // 2 if strategy == "ps" else 0
    sizes = fill_axes(strategy, world_size - servers, {})  # type: ignore[arg-type]
    share = samples // (2 * sizes["dp_replicate"] * sizes["dp_shard"])
    schedule = "1f1b" if strategy == "3d" and sizes["pp"] > 1 else strategy
    parts = default_microbatches(schedule, sizes["pp"], share)
    values = {"micro_batch": share // parts, "pp_microbatches": parts, "precision": "fp64",
              "optimizer": "adamw-for-loop"}  # fmt: skip
    own = {"strategy": strategy, "servers": servers, "server_updates": by_servers}
    return Plan.parse({**own, **sizes, **values, **options}, "test")


class Run:
    """Training on this rank of `groups`, begun anew. `spoil` plants a fault in the layout."""

    def __init__(
        self,
        trial: Trial,
        plan: Plan,
        groups: Groups,
        spoil: Callable[[Layout], None] = lambda layout: None,
    ) -> None:
        self.plan, self.ranks, self.trial = plan, groups.ranks, trial
        objective = trial.objective(plan)
        self.mixed = make_mixed(plan.precision, CPU, True, fully_shards=plan.fully_shards)
        whole_values = lower_weights(objective, self.mixed)
        self.scratch = Scratch()
        apply_options(objective.model, plan, scratch=self.scratch)
        self.layout = apply(LayoutRequest(objective, plan, groups.ranks, CPU, scratch=self.scratch))
        settings = TrainSettings(lr=trial.lr)
        place = partial(place_optimizer, self.layout, plan, self.scratch)
        self.optimizer = make_optimizer(
            self.layout.named_parameters(),
            plan.optimizer,
            settings,
            place,
            master_weights=self.mixed.keeps_masters,
            wide_values=parts_of(self.layout, whole_values),
        )
        spoil(self.layout)
        objective.compute_dtype = self.mixed.dtype
        self.stepper = Stepper(
            layout=self.layout,
            optimizer=self.optimizer,
            mixed=self.mixed,
            plan=plan,
            clip=trial.clip,
            device=CPU,
            control=groups.control,
            expected_targets=trial.global_batch * trial.seq_len,
            targets_known=False,
        )

    def step(self, number: int) -> RawStep:
        """Do step `number`, from 1."""
        batch = self.trial.batches()[number - 1]
        self.stepper.begin()
        seed_step(self.trial.seed, number, self.plan.random_rank(self.ranks.rank), CPU)
        mine = rank_micro_batches(batch, self.plan, self.ranks.rank)
        return self.stepper.run(number, self.trial.lr, mine, lambda: False)

    def held(self) -> dict[str, torch.Tensor]:
        """Whole tensors of all that counts on this rank, by their names in a checkpoint."""
        model, optimizer = self.layout.checkpoint_state(self.optimizer)
        found = {}
        masters = master_weights(optimizer)
        for name, parameter in () if model is None else self.layout.named_parameters():
            # Files hold fp32 copies of weights in the place of what is rounded from them.
            kept = masters.get(parameter, parameter.detach())
            found[f"model.{name}"] = whole(kept).clone()
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            for kind, tensor in state.items():
                if kind == "master":
                    continue
                found[f"optimizer.state.{name}.{kind}"] = whole(tensor).clone()
        return found


def loss_of(raw: RawStep) -> float:
    return float(raw.totals[0] / raw.totals[1])


@dataclass(frozen=True)
class Step:
    """What a step left behind in a single process."""

    loss: float
    norm: float
    held: dict[str, torch.Tensor]


def alone(trial: Trial, **options: Any) -> list[Step]:
    """Every step of a single process."""

    def train(groups: Groups) -> list[Step]:
        run, steps = Run(trial, plan_of("single", **options), groups), []
        for number in range(1, trial.steps + 1):
            raw = run.step(number)
            steps.append(Step(loss_of(raw), float(raw.grad_norm), run.held()))
        return steps

    (steps,) = world(1, train)
    return steps


def apart(held: dict[str, Any], known: dict[str, torch.Tensor]) -> float:
    """The worst difference from what one process holds, relative to each tensor's largest value.

    At least FLOOR of the largest of its kind: what is smaller may be rounding.
    """
    largest: dict[str, float] = {}
    for name, tensor in known.items():
        kind = kind_of(name)
        largest[kind] = max(largest.get(kind, 0.0), float(tensor.abs().max()))
    worst = 0.0
    for name in held.keys() & known.keys():
        scale = max(float(known[name].abs().max()), FLOOR * largest[kind_of(name)])
        difference = float((held[name].to(known[name].dtype) - known[name]).abs().max()) / scale
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def kind_of(name: str) -> str:
    return "model" if name.startswith("model.") else name.rpartition(".")[2]
