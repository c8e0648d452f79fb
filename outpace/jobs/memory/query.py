"""Queries of `outpace memory`: training to trace, and the rank that needs the most memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outpace.catalog.accelerators import ACCELERATORS, find_accelerator
from outpace.catalog.models import without_weights
from outpace.data.seeding import seed_generators
from outpace.interop.custom_model import CustomModel, build_custom_model, read_positions
from outpace.interop.models import open_model
from outpace.jobs.defaults import keeps_masters, resolve_plan, resolve_seq_len
from outpace.jobs.inputs.custom_batches import batch_of
from outpace.jobs.memory.formula import FindOutline, FormulaQuestion, find_untrained
from outpace.jobs.memory.trace_worker import TraceRequest, account_of, require_traced_kernels
from outpace.parallel.offload import require
from outpace.planner.pipeline.stages import representatives
from outpace.probing.hardware.machine import identify
from outpace.records.base import Record
from outpace.records.errors import BadInputError
from outpace.records.hardware import Accelerator, Node
from outpace.records.memory import MemoryAccount
from outpace.records.outline import Outline
from outpace.records.plan import Plan
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.trace.steps import Trainable, Workload
from outpace.training.precision import default_precision


class MemoryQuery(Record):
    """Request for the memory of ranks in training, found by a trace.

    `ask` describes rank 0; other ranks are traced with the same request under their own number.
    """

    ask: TraceRequest
    global_batch: int

    @property
    def plan(self) -> Plan:
        """Plan of all ranks."""
        return self.ask.plan

    @property
    def seq_len(self) -> int | None:
        """Tokens per sample."""
        return self.ask.seq_len

    @property
    def settings(self) -> TrainSettings:
        """Settings of the training."""
        return self.ask.settings

    @property
    def accelerator(self) -> Accelerator | None:
        """Accelerator whose memory is predicted; None for a CPU."""
        return self.ask.accelerator

    @property
    def workload(self) -> Trainable:
        """The training to trace: model, plan, batch and settings."""
        ask = self.ask
        return Workload(ask.spec, ask.plan, ask.seq_len, ask.accumulation, ask.settings)

    def trace(self, rank: int) -> MemoryAccount:
        """Trace a rank's memory. Raises BadInputError for a plan that cannot be applied."""
        return account_of(self.ask.model_copy(update={"rank": rank}))


@dataclass(frozen=True)
class ModuleQuestion:
    """Request for the memory of ranks that train a custom model.

    It can be used like a `MemoryQuery`. `model` is built once, and `build` builds it again.
    """

    model: CustomModel
    plan: Plan
    settings: TrainSettings
    global_batch: int
    accelerator: Accelerator | None
    ranks_per_host: int
    build: Callable[[], CustomModel]

    @property
    def seq_len(self) -> int | None:
        """Tokens per sample; None for a user's data set."""
        if self.model.dataset is not None:
            return None
        return resolve_seq_len(self.settings, read_positions(self.model.module))

    @property
    def accumulation(self) -> int:
        """Micro-batches per step."""
        return self.plan.accumulation(self.global_batch)

    @property
    def workload(self) -> Trainable:
        """The training to trace, for which the module is built again, as in a real run."""
        from outpace.trace.custom_module import ModuleWorkload

        return ModuleWorkload(
            self.build, self._make_batch, self.plan, self.accumulation, self.settings
        )

    def trace(self, rank: int) -> MemoryAccount:
        """Trace a rank's memory. Raises BadInputError if the plan or module cannot be traced."""
        from outpace.trace.custom_module import account_of_module

        return account_of_module(
            self.model,
            self._make_batch,
            self.plan,
            accumulation=self.accumulation,
            rank=rank,
            settings=self.settings,
            accelerator=self.accelerator,
            ranks_per_host=self.ranks_per_host,
        )

    def _make_batch(self, count: int) -> Any:
        return batch_of(self.model, count, self.seq_len)


AnyQuery = MemoryQuery | ModuleQuestion | FormulaQuestion


def ask_of_module(
    build: Callable[[], Any],
    settings: TrainSettings,
    plan: Plan,
    global_batch: int,
    accelerator: Accelerator | None,
    per_host: int,
) -> ModuleQuestion:
    """Build a custom model and return a query for its memory."""

    def build_module() -> CustomModel:
        seed_generators(settings.seed)
        return build_custom_model(build)

    return ModuleQuestion(
        build_module(), plan, settings, global_batch, accelerator, per_host, build_module
    )


def question(
    settings: TrainSettings,
    origins: Mapping[str, str],
    node: Node | None,
    nodes: int,
    find_outline: FindOutline | None = None,
) -> AnyQuery:
    """Build a query, resolving unset settings as training on these nodes would.

    With `find_outline`, the planner's formula is used for a model that outpace can plan for but not
    train. The default global batch is one micro-batch per data-parallel rank. Raises BadInputError
    for settings that cannot be traced.
    """
    _require_traceable(settings)
    named = None if node is None else node.accelerator
    accelerator = None if named is None else ACCELERATORS[named]
    require_traced_kernels(accelerator)
    if settings.precision == "fp8":
        _require_fp8(accelerator, node)
    world_size = settings.nproc or 1 if node is None else node.processes * nodes
    per_host = world_size if node is None else node.processes_per_host
    changed = {
        "precision": _resolve_traced_precision(settings, node, accelerator),
        "model": without_weights(settings.model),
    }
    settings = settings.model_copy(update=changed)
    given = settings.global_batch if origins.get("global_batch") != "default" else None
    plan = _resolve_traced_plan(settings, world_size, per_host, given)
    require(plan, torch.device("cpu" if accelerator is None else "cuda"))
    try:
        opened = open_model(settings.model)
    except BadInputError:
        outline = find_outline and find_untrained(settings.model, find_outline)
        if outline is None:
            raise
        _require_formula_options(plan, outline)
        batch = given or plan.samples_per_pass * plan.data_parallel
        return FormulaQuestion(outline, plan, settings, batch, accelerator)
    if opened.build is not None:
        batch = given or plan.samples_per_pass * plan.data_parallel
        return ask_of_module(opened.build, settings, plan, batch, accelerator, per_host)
    spec = opened.spec
    assert spec is not None
    if settings.dropout is not None:
        spec = spec.model_copy(update={"dropout": settings.dropout})
    global_batch = given or plan.samples_per_pass * plan.data_parallel
    ask = TraceRequest(
        spec=spec,
        plan=plan,
        seq_len=resolve_seq_len(settings, spec.max_positions),
        accumulation=plan.accumulation(global_batch),
        rank=0,
        settings=settings,
        accelerator=accelerator,
        ranks_per_host=per_host,
    )
    return MemoryQuery(ask=ask, global_batch=global_batch)


def _require_formula_options(plan: Plan, outline: Outline) -> None:
    if plan.lora_rank is not None:
        raise BadInputError(
            f"--lora-rank: {outline.untrained}, and the formula assumes that all weights are "
            "trained. Leave out --lora-rank for an upper bound."
        )


def _require_traceable(settings: TrainSettings) -> None:
    said = "`outpace memory` traces a plan as given"
    if settings.micro_batch == "auto":
        raise BadInputError(f"--micro-batch auto: {said}. Give a number of samples.")
    if settings.memory_budget is not None:
        raise BadInputError(
            f"--memory-budget: {said}. Choose what to recompute with --checkpointing or "
            "--checkpoint-layers."
        )
    if settings.memory_limit is not None:
        raise BadInputError(
            "--memory-limit: `outpace memory` compares a plan with the memory of --machine. Leave "
            "out the option, or use it with outpace train, which reports what would fit."
        )
    if settings.task == "classify":
        raise BadInputError(
            "--task classify: `outpace memory` traces models with a head over the vocabulary, "
            "which a classifier does not have. Leave out --task for an upper bound."
        )


def _resolve_traced_plan(
    settings: TrainSettings, world_size: int, per_host: int, global_batch: int | None
) -> Plan:
    ranks = Ranks(world_size=world_size, local_world_size=min(per_host, world_size))
    machine, cpu = identify(find_accelerator), torch.device("cpu")
    if global_batch is None:
        each = settings.micro_batch or 1
        # With the optimizer in the backward there is only one micro-batch.
        most = 1 if settings.optimizer_in_backward else 4 * world_size
        pipeline = settings.pp_microbatches or most
        settings = settings.model_copy(
            update={"global_batch": world_size * each * pipeline, "micro_batch": each}
        )
    return resolve_plan(settings, ranks, cpu, machine)


def _resolve_traced_precision(
    settings: TrainSettings, node: Node | None, accelerator: Accelerator | None
) -> str | None:
    if settings.precision is not None or node is None:
        return settings.precision
    if accelerator is None:
        features = {"cpu_features": node.cpu_features}
        machine = identify(find_accelerator).model_copy(update=features)
        return default_precision(torch.device("cpu"), machine)
    if "bf16" not in accelerator.peak.flops_per_s:
        return "fp32"
    return "bf16-master" if keeps_masters(settings) else "bf16"


def _require_fp8(accelerator: Accelerator | None, node: Node | None) -> None:
    if accelerator is None or "fp8" not in accelerator.peak.flops_per_s:
        host = "this host" if node is None else node.name
        who = f"{host}'s CPU" if accelerator is None else accelerator.name
        raise BadInputError(
            f"--precision fp8 needs float8 matmuls, which {who} does not have. Choose a --machine "
            "that has them, such as hgx-h100, or use --precision bf16."
        )


def account(asked: AnyQuery, rank: int | None = None) -> MemoryAccount:
    """Return the memory of `rank`, or of the rank that needs the most.

    Raises BadInputError if the plan has no such rank.
    """
    require_rank(asked, rank)
    return account_of_fullest_rank(asked) if rank is None else asked.trace(rank)


def require_rank(asked: AnyQuery, rank: int | None) -> None:
    """Raise BadInputError if the memory of this rank cannot be given.

    The plan may not have the rank. A model that cannot be traced is estimated for the fullest rank
    only.
    """
    if rank is not None and rank >= asked.plan.world_size:
        raise BadInputError(f"--rank {rank}: the plan has ranks 0 to {asked.plan.world_size - 1}.")
    if rank is not None and isinstance(asked, FormulaQuestion):
        raise BadInputError(
            f"--rank {rank}: {asked.outline.untrained}, and the formula only covers the fullest "
            "rank. Leave --rank out."
        )


def account_of_fullest_rank(asked: AnyQuery) -> MemoryAccount:
    """Return the memory of the rank that needs the most, among those that may differ."""
    return max(
        (asked.trace(rank) for rank in representatives(asked.plan)),
        key=lambda found: found.needed_bytes,
    )
