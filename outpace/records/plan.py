"""Plan: the strategy, axes, precision and options with which a model is trained."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    field_validator,
    model_validator,
)

from outpace.records.axes import SPLITS, ProductSchedule, layout_words, schedule_of
from outpace.records.base import Record, entry
from outpace.records.errors import BadInputError, join_or
from outpace.records.optimizers import LOW, PLAIN_ADAMW, OptimizerName
from outpace.records.pipelines import SCHEDULES, refusal
from outpace.records.precisions import COMPUTES_IN_FP16, MASTERS, PURE, SCALED, Precision
from outpace.records.strategies import AXES as AXES
from outpace.records.strategies import FULLY_SHARDED, strategies_that
from outpace.records.strategies import Axis as Axis
from outpace.records.strategies import Compression as Compression
from outpace.records.strategies import Strategy as Strategy

# Modes, from the one that keeps the most activations to the one that keeps the fewest.
Checkpointing = Literal["none", "selective", "attention", "full"]


def _split_modes(value: object) -> object:
    """Split checkpointing modes if they are given as one word, such as "full+none+none"."""
    return tuple(value.split("+")) if isinstance(value, str) else value


LayerModes = Annotated[tuple[Checkpointing, ...], BeforeValidator(_split_modes)]
Offload = Literal["none", "cpu", "disk"]
# Far above what any run has.
Count = Annotated[int, Field(gt=0, le=2**24)]
LargeCount = Annotated[int, Field(gt=0, le=2**32)]
# Matrices of a block, named as in `nn.block`.
LoraTarget = Literal["q", "k", "v", "out", "gate", "up", "down", "all"]
Base = Literal["fp32", "nf4"]
GATHERS = strategies_that(lambda traits: traits.gathers)
IN_BACKWARD = strategies_that(lambda traits: traits.steps_in_backward)
# DDP rebuilds its buckets after the first reduction, and PowerSGD keeps its errors by bucket.
POWERSGD_LEAST_START = 2
_OFFLOAD_FROM_COMPILED = strategies_that(lambda traits: traits.offloads_compiled)


class Plan(Record):
    """Strategy, mesh, batch and options of a training.

    Batch: each data-parallel rank passes `micro_batch` samples through the model together; a
    pipeline divides its work into `pp_microbatches` of them. Accumulation is derived from the
    global batch. Checkpointing: `checkpointing` applies to every `checkpoint_every`-th block,
    starting with the first, unless `checkpoint_layers` sets the mode of each block.

    Parallelism: `sequence_parallel` belongs to tp; with `async_tp`, its collectives are split and
    overlap the matmuls before or after them. Parameter servers are ranks outside of the axes; with
    `server_updates`, they run the optimizer, else the workers do. Each worker has `worker_devices`
    ranks. `virtual_stages` is the number of pipeline stages per rank (None: the schedule's
    default), balanced by cost, or with equal numbers of blocks (`stage_split`). Under 3d, the
    pipeline's schedule is `pp_schedule`, and a layer's experts are divided over `ep` ranks of
    dp_shard × cp, each expert split by tp; if ep does not divide dp_shard × cp, it also spans ranks
    of tp, with whole experts. `zero` is the ZeRO stage of dp_shard.

    Precision fp64 is for verification. With a `lora_rank`, the weights are frozen in the format
    `base`, and only the adapters of the `lora_targets` are trained.

    `offload_activations`: where blocks keep the tensors saved for the backward.
    `offload_parameters`: with cpu, parameters, gradients and optimizer state are in host memory;
    with disk, parameters are in mapped files. `offload_optimizer`: where the optimizer state (and,
    on an accelerator, the master weights) is kept while the CPU computes the update; with none, it
    is kept with the parameters. `empty_cache` frees cached memory between the phases of a step.
    """

    strategy: Strategy = "single"
    dp_replicate: Count = 1
    dp_shard: Count = 1
    cp: Count = 1
    tp: Count = 1
    pp: Count = 1
    sequence_parallel: bool = True
    async_tp: bool = False
    servers: Annotated[int, Field(ge=0, le=2**24)] = 0
    server_updates: bool = False
    worker_devices: Count = 1
    micro_batch: LargeCount = 1
    pp_microbatches: Count = 1
    pp_schedule: ProductSchedule = "1f1b"
    virtual_stages: Count | None = None
    stage_split: Literal["cost", "even"] = "cost"
    ep: Count = 1
    zero: Literal[1, 2, 3] = 3
    precision: Precision = "fp32"
    checkpointing: Checkpointing = "none"
    checkpoint_every: Count = 1
    checkpoint_layers: LayerModes = ()
    offload_activations: Offload = "none"
    offload_parameters: Offload = "none"
    offload_optimizer: Offload = "none"
    empty_cache: bool = False
    compile: bool = False
    optimizer: OptimizerName = "adamw-fused"
    optimizer_in_backward: bool = False
    loss: Literal["auto", "plain", "chunked"] = "auto"
    compress_gradients: Compression = "none"
    powersgd_rank: Count = 1
    powersgd_start: int | None = Field(default=None, ge=POWERSGD_LEAST_START)
    bucket_mib: Count = 25
    lora_rank: Count | None = None
    lora_alpha: PositiveFloat | None = None
    lora_targets: tuple[LoraTarget, ...] = ("all",)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    base: Base = "fp32"

    @model_validator(mode="after")
    def _check(self) -> Self:
        why_not = refusal(
            self.schedule,
            pp=self.pp,
            microbatches=self.pp_microbatches,
            replicas=self.dp_replicate,
            checkpointing=self.recomputes,
            compiled=self.compile,
            chunked=self.loss == "chunked",
        )
        if why_not is not None:
            raise ValueError(why_not)
        self._check_compression()
        self._check_checkpointing()
        self._check_offload()
        self._check_lora()
        self._check_optimizer()
        if self.strategy == "ps" and self.servers == 0:
            raise ValueError(
                "strategy ps needs parameter servers, but servers is 0. Set it to 1 or more"
            )
        asked = self.servers or self.server_updates or self.worker_devices > 1
        if self.strategy != "ps" and asked:
            raise ValueError(
                f"servers is {self.servers}, server_updates {self.server_updates} and "
                f"worker_devices {self.worker_devices}, but strategy {self.strategy} has neither "
                "servers nor workers. Use strategy ps, or leave out all three"
            )
        if self.dp_replicate % self.worker_devices:
            raise ValueError(
                f"{self.dp_replicate} worker ranks do not divide into workers of "
                f"{self.worker_devices} devices. Use a divisor of {self.dp_replicate}"
            )
        self._check_3d()
        for axis in AXES:
            size = getattr(self, axis)
            if size > 1 and axis not in SPLITS[self.strategy]:
                own = " and ".join(SPLITS[self.strategy])
                raise ValueError(
                    f"strategy {self.strategy} {f'splits {own}' if own else 'is one process'}, but "
                    f"{axis} is {size}. Set {axis} to 1, or use strategy 3d, which splits any axis"
                )
        return self

    def _check_3d(self) -> None:
        if self.strategy != "3d" and (self.ep > 1 or self.zero != 3):
            raise ValueError(
                f"ep {self.ep} and zero {self.zero} belong to strategy 3d, but strategy is "
                f"{self.strategy}. Use strategy 3d with these, or zero{self.zero} to shard only"
            )
        if self.dp_shard * self.cp * self.tp % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide dp_shard {self.dp_shard} × cp {self.cp} × tp "
                f"{self.tp}, over whose ranks the experts are divided. Use a divisor"
            )
        schedule = SCHEDULES.get(self.schedule)
        own = 1 if schedule is None else schedule.stages_per_rank
        asked = self.virtual_stages
        loops = self.schedule in ("interleaved", "loopedbfs", "zb")
        if asked is not None and asked != own and (not loops or asked < own):
            raise ValueError(
                f"virtual_stages is {asked}, but {self.schedule} has {own} on each rank. Use "
                f"{own}, or interleaved, loopedbfs or zb, which take 2 or more"
            )

    @property
    def expert_tp(self) -> int:
        """Return the number of tp ranks that split an expert; 1 if `ep` spans tp ranks."""
        return self.tp if self.dp_shard * self.cp % self.ep == 0 else 1

    @property
    def training_obstacle(self) -> str | None:
        """Return why outpace can estimate this plan, but not train with it; None if it can."""
        if self.async_tp and self.tp > 1:
            return "async_tp: outpace does not overlap the collectives of tensor parallelism"
        if self.ep > 1:
            return f"ep {self.ep}: outpace does not divide experts over ranks"
        if self.strategy == "3d" and self.dp_shard > 1 and self.zero != 3:
            return f"zero {self.zero} with other axes: outpace always shards parameters there"
        schedule = SCHEDULES.get(self.schedule)
        if schedule is None:
            return None
        if self.stage_split != "cost":
            return "stages of equal numbers of blocks: outpace balances the stages by time"
        if self.stages_per_rank != schedule.stages_per_rank:
            return f"{self.stages_per_rank} virtual stages: outpace has {schedule.stages_per_rank}"
        if self.strategy == "3d" and schedule.splits_backward:
            return f"schedule {self.pp_schedule} with other axes"
        return None

    def _check_offload(self) -> None:
        if self.offload_parameters == "cpu" and self.strategy not in GATHERS:
            raise ValueError(
                f"offload_parameters cpu: strategy {self.strategy} computes with parameters in "
                f"place and does not gather them before use. Use strategy {join_or(GATHERS)}, or "
                "offload_optimizer, which works here too"
            )
        elsewhere = self.offload_optimizer != "none" or self.offload_parameters != "none"
        if elsewhere and (self.optimizer_in_backward or self.precision in MASTERS):
            what = "optimizer_in_backward" if self.optimizer_in_backward else self.precision
            raise ValueError(
                f"{what} cannot be combined with offloading, in which the optimizer keeps the "
                "weights itself and updates them unit by unit. Leave out one of the two"
            )
        if elsewhere and self.optimizer not in PLAIN_ADAMW:
            raise ValueError(
                f"optimizer {self.optimizer} cannot be offloaded: only AdamW with fp32 state can. "
                f"Use optimizer {join_or(PLAIN_ADAMW)}, or leave out offloading"
            )
        known = self.strategy in _OFFLOAD_FROM_COMPILED
        if self.offload_activations != "none" and self.compile and not known:
            raise ValueError(
                f"offload_activations {self.offload_activations} with compiled blocks has been "
                f"verified only for the strategies {', '.join(_OFFLOAD_FROM_COMPILED)}, not for "
                f"{self.strategy}. Use one of these, or leave out offload_activations or compile"
            )
        if self.offload_parameters == "disk" and self.compile:
            raise ValueError(
                "offload_parameters disk prefetches in hooks, which compile would trace. "
                "Use one of the two, or offload_optimizer disk"
            )

    def _check_compression(self) -> None:
        kind = self.compress_gradients
        if kind == "none":
            return
        able = strategies_that(lambda traits: kind in traits.compresses)
        if self.strategy != "single" and self.strategy not in able:
            raise ValueError(
                f"compress_gradients {kind}: strategy {self.strategy} does not support it. Use "
                f"strategy {join_or(able)}, or leave out compress_gradients"
            )
        if kind == "powersgd" and self.precision in COMPUTES_IN_FP16:
            raise ValueError(
                "compress_gradients powersgd carries its error over to the next step, so an fp16 "
                "overflow would persist. Use precision bf16 or fp32"
            )

    def _check_checkpointing(self) -> None:
        every, layers = self.checkpoint_every, self.checkpoint_layers
        if every > 1 and self.checkpointing == "none":
            raise ValueError(
                f"checkpoint_every is {every}, but checkpointing is none, so no block would be "
                "recomputed. Use checkpointing full or selective, or leave out checkpoint_every"
            )
        if layers and (every > 1 or self.checkpointing != "none"):
            raise ValueError(
                f"checkpoint_layers and checkpointing {self.checkpointing} with checkpoint_every "
                f"{every} both set what each block recomputes. Use one of the two"
            )

    @property
    def recomputes(self) -> bool:
        """Return whether any block recomputes activations."""
        return self.checkpointing != "none" or any(m != "none" for m in self.checkpoint_layers)

    def modes(self, layers: int) -> tuple[Checkpointing, ...]:
        """Return the checkpointing mode of each of a model's `layers` blocks.

        Raises BadInputError if `checkpoint_layers` has another number of modes.
        """
        if not self.checkpoint_layers:
            every = self.checkpoint_every
            return tuple("none" if i % every else self.checkpointing for i in range(layers))
        if len(self.checkpoint_layers) != layers:
            raise BadInputError(
                f"checkpoint_layers has {len(self.checkpoint_layers)} modes, but the model has "
                f"{layers} blocks. Give one for each block."
            )
        return self.checkpoint_layers

    @field_validator("lora_targets", mode="before")
    @classmethod
    def _split_targets(cls, value: Any) -> Any:
        """Split LoRA's targets if they are given as one word, such as "q+v"."""
        return tuple(value.split("+")) if isinstance(value, str) else value

    def _check_lora(self) -> None:
        if self.lora_rank is None:
            for name in ("lora_alpha", "lora_targets", "lora_dropout", "base"):
                if getattr(self, name) != Plan.model_fields[name].default:
                    why = " and 4-bit weights cannot be trained" if name == "base" else ""
                    raise ValueError(
                        f"{name} {getattr(self, name)} belongs to LoRA{why}. Give a lora_rank, "
                        f"such as 16, or leave {name} out"
                    )
            return
        if not self.lora_targets:
            raise ValueError("lora_targets names no matrix. Use any of q, k, v, …, or all")
        if self.tp > 1 and self.base == "nf4":
            raise ValueError(
                "base nf4 cannot be combined with tp: blocks of 64 values with a common scale "
                "would cross the boundary between two ranks' shards of a matrix. Use zero3 "
                "instead of tp, or base fp32"
            )
        if self.tp > 1 and self.lora_dropout:
            raise ValueError(
                f"lora_dropout {self.lora_dropout} cannot be combined with tp: ranks would drop "
                "different inputs of one matrix. Set lora_dropout to 0, or use zero3"
            )

    @property
    def lora_scale(self) -> float:
        """Return the factor α/r of an adapter's output; α is r by default.

        Hu et al., arXiv 2106.09685, §4.1, set α to the first rank r that they try, and then leave
        it unchanged.
        """
        if self.lora_rank is None or self.lora_alpha is None:
            return 1.0
        return self.lora_alpha / self.lora_rank

    def _check_optimizer(self) -> None:
        if self.precision in PURE and self.optimizer not in LOW:
            raise ValueError(
                f"precision {self.precision} keeps weights in 16 bits only, so optimizer "
                f"{self.optimizer} would lose updates and moments. Use optimizer "
                f"{join_or(LOW)}"
            )
        if self.precision == "fp8" and (self.tp > 1 or self.strategy == "tp"):
            raise ValueError(
                "precision fp8 scales each matrix by its largest value, which a tp rank does not "
                "know from its shard. Use precision bf16, or zero3 instead of tp"
            )
        if self.precision == "fp8" and self.lora_rank is not None:
            raise ValueError(
                "precision fp8 replaces the blocks' linear layers, including adapters. Use "
                "precision bf16 with a lora_rank"
            )
        if not self.optimizer_in_backward:
            return
        if self.strategy not in IN_BACKWARD:
            raise ValueError(
                "optimizer_in_backward updates a parameter as soon as its gradient is complete, "
                f"but strategy {self.strategy} keeps all gradients until the end of backward "
                "(in buckets to reduce, or to accumulate micro-batches). Use strategy "
                f"{join_or(IN_BACKWARD)}, or leave out optimizer_in_backward"
            )
        if self.precision in SCALED:
            raise ValueError(
                "optimizer_in_backward would update some parameters before precision "
                f"{self.precision} detects an overflow in others. Use precision bf16, or leave "
                "it out"
            )

    @property
    def schedule(self) -> str:
        """Return the pipeline's schedule; for a plan without a pipeline, the strategy."""
        return schedule_of(self.strategy, self.pp, self.pp_schedule)

    @property
    def world_size(self) -> int:
        """Return the number of processes that this plan needs."""
        on_axes: int = math.prod(getattr(self, axis) for axis in AXES)
        return on_axes + self.servers

    @property
    def data_parallel(self) -> int:
        """Return the data-parallel degree, into which the global batch is divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def fully_shards(self) -> bool:
        """Return whether ranks keep shards of parameters and gather them before use."""
        product = self.strategy == "3d" and self.data_parallel * self.cp > 1
        split = product or self.strategy in FULLY_SHARDED
        return split or self.offload_parameters == "cpu"

    @property
    def samples_per_pass(self) -> int:
        """Return the number of samples that a data-parallel rank processes in one pass.

        With a pipeline, a pass has all of its micro-batches.
        """
        return self.micro_batch * self.pp_microbatches

    @property
    def stages_per_rank(self) -> int:
        """Return the number of pipeline stages per rank; 1 without a pipeline."""
        schedule = SCHEDULES.get(self.schedule)
        if schedule is None:
            return 1
        return self.virtual_stages or schedule.stages_per_rank

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages."""
        return self.pp * self.stages_per_rank

    @property
    def readers(self) -> int:
        """Return the number of ranks that read different samples."""
        return 1 if self.strategy == "dp" else self.data_parallel

    @property
    def samples_read(self) -> int:
        """Return the number of samples that each rank with a data loader reads per pass.

        Under the strategy dp, only one rank reads, for all ranks.
        """
        return self.samples_per_pass * self.data_parallel // self.readers

    def data_rank(self, rank: int) -> int | None:
        """Return the data-parallel index of the samples that `rank` reads; None if it reads none.

        Ranks are laid out in the order of AXES, followed by parameter servers.
        """
        if rank >= self.world_size - self.servers:
            return None
        if self.strategy == "dp":
            return 0 if rank == 0 else None
        return rank // (self.cp * self.tp) % self.data_parallel

    def random_rank(self, rank: int) -> int:
        """Return the index of `rank`'s random stream, which a tensor-parallel group shares."""
        return rank // self.tp

    @property
    def mesh(self) -> str:
        """Return the axes that are split: "dp_replicate 2 × dp_shard 2"."""
        split = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        if self.servers:
            updates = " (update)" if self.server_updates else ""
            each = self.worker_devices
            workers = f"{self.dp_replicate // each}{f' of {each} devices' if each > 1 else ''}"
            return f"workers {workers}, servers {self.servers}{updates}"
        return " × ".join(split) or "one process"

    @property
    def layout(self) -> str:
        """Return the strategy with its ranks: "ddp 2", "hsdp (dp_replicate 2 × dp_shard 2)"."""
        return layout_words(self.strategy, self.mesh, self.world_size)

    def accumulation(self, global_batch: int) -> int:
        """Return the number of passes of a step, over which gradients are accumulated.

        Together, they process the global batch. Raises BadInputError if it is not divisible.
        """
        per_pass = self.samples_per_pass * self.data_parallel
        if global_batch % per_pass:
            lower = global_batch // per_pass * per_pass
            nearest = join_or(n for n in (lower, lower + per_pass) if n)
            raise BadInputError(
                "global batch = micro-batch × accumulation × data-parallel degree, but "
                f"{global_batch} is not a multiple of {self._factors()} = {per_pass}. Use a "
                f"global batch of {nearest}, or "
                f"{self._suggest_divisible(global_batch // self.data_parallel)}."
            )
        return global_batch // per_pass

    def _suggest_divisible(self, share: int) -> str:
        """Suggest what to change so that a rank's `share` of the batch (samples) is divisible."""
        if share % self.pp_microbatches == 0:
            return "another micro-batch"
        fitting = [str(n) for n in range(self.stages, share + 1) if share % n == 0][:3]
        if not fitting:
            return "fewer stages"
        return f"pipeline micro-batches that divide {share}, such as {', '.join(fitting)}"

    def _factors(self, accumulation: int | None = None) -> str:
        parts = [f"micro-batch {self.micro_batch}"]
        if self.pp_microbatches > 1:
            parts.append(f"pipeline micro-batches {self.pp_microbatches}")
        if accumulation is not None:
            parts.append(f"accumulation {accumulation}")
        return " × ".join([*parts, f"data-parallel {self.data_parallel}"])

    def identity(self, global_batch: int) -> str:
        """Return the batch equation with its numbers: "global batch 16 = micro-batch 8 × …"."""
        return f"global batch {global_batch} = {self._factors(self.accumulation(global_batch))}"


class PlanFile(Plan):
    """Content of plan.json: a plan, and the sequence length and global batch it was made for.

    Length and batch are None in files of older versions.
    """

    seq_len: LargeCount | None = entry("tokens per sample")
    global_batch: LargeCount | None = entry("samples per step")

    @classmethod
    def from_plan(cls, plan: Plan, seq_len: int | None, global_batch: int | None) -> Self:
        """Combine a plan with the sequence length and global batch that it was made for."""
        return cls(**plan.model_dump(), seq_len=seq_len, global_batch=global_batch)

    @property
    def plan(self) -> Plan:
        """Return the plan without its sequence length and global batch."""
        return Plan(**self.model_dump(include=set(Plan.model_fields)))
