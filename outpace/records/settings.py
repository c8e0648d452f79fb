"""TrainSettings: all options of `outpace train`.

One field is one flag (`--global-batch`), one TOML key (`global-batch` or `global_batch`) and one
keyword of `outpace.train`. Its description is the flag's help.
"""

import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outpace.records.axes import ProductSchedule
from outpace.records.base import Record
from outpace.records.optimizers import OptimizerName
from outpace.records.plan import (
    AXES,
    POWERSGD_LEAST_START,
    Base,
    Checkpointing,
    Compression,
    LoraTarget,
    Offload,
    Strategy,
)
from outpace.records.precisions import AskedPrecision
from outpace.records.units import read_bytes


def _parse_size(value: object) -> object:
    return read_bytes(value) if isinstance(value, str) else value


# A number of bytes, which may be written "8GiB".
Size = Annotated[PositiveInt, BeforeValidator(_parse_size)]

# Upper limits, above the values of any training and within those of libraries and clocks.
_MOST_TIMEOUT_S = 1e7
_MOST_STEPS = 10**12
_MOST_TOKENS = 10**18
_MOST_SAMPLES = 10**9  # per batch; also tokens per sample
_MOST_RANKS = 2**24
_MOST_PROCESSES = 2**16  # or threads on one host
_MOST_WIDTH = 2**24  # such as that of a model
MOST_SEED = 2**63 - 1  # of torch's generators
# Smallest positive and largest value of each setting; 0 has a meaning of its own or is refused. A
# smaller learning rate would change no weight.
_RANGES: dict[str, tuple[float, float]] = {
    "data_weights": (1e-18, 1e18),
    "workers": (1, _MOST_PROCESSES),
    "seq_len": (1, _MOST_SAMPLES),
    "global_batch": (1, _MOST_SAMPLES),
    "micro_batch": (1, _MOST_SAMPLES),
    "steps": (1, _MOST_STEPS),
    "tokens": (1, _MOST_TOKENS),
    "epochs": (1e-9, 1e9),
    "lr": (1e-15, 1e4),
    "warmup": (1, _MOST_STEPS),
    "weight_decay": (1e-15, 1e4),
    "clip": (1e-15, 1e38),
    "lora_rank": (1, _MOST_WIDTH),
    "lora_alpha": (1e-9, 1e9),
    "checkpoint_every": (1, 100_000),
    **dict.fromkeys((*AXES, "servers", "pp_microbatches"), (1, _MOST_RANKS)),
    "worker_devices": (1, _MOST_PROCESSES),
    "powersgd_rank": (1, _MOST_WIDTH),
    "powersgd_start": (1, _MOST_STEPS),
    "bucket_mib": (1, 2**20),
    "nproc": (1, _MOST_PROCESSES),
    "threads": (1, _MOST_PROCESSES),
    "eval_every": (1, _MOST_STEPS),
    "eval_batches": (1, _MOST_STEPS),
    "expect_step_time_s": (1e-9, _MOST_TIMEOUT_S),
    "save_every": (1, _MOST_STEPS),
    "keep": (1, _MOST_STEPS),
    "seed": (1, MOST_SEED),
    "sample_tokens": (1, _MOST_SAMPLES),
}

Task = Literal["pretrain", "chat", "classify"]
DEFAULT_SEQ_LEN = 256  # or the model's positions, if fewer


def _field(group: str, help_text: str, default: Any = None, **bounds: Any) -> Any:
    extra: Any = {"group": group}
    return Field(default=default, description=help_text, json_schema_extra=extra, **bounds)


# Functions that declare a field in each group of options.
_model, _data, _batch, _length, _optimization, _adapters, _computation, _run = (
    partial(_field, group)
    for group in ("model", "data", "batch", "length", "optimization", "adapters", "computation",
                  "run")
)  # fmt: skip


def _axis(help_text: str) -> Any:
    return _computation(f"{help_text}; -1: all remaining ranks", ge=-1)


def _list_types(annotation: Any) -> set[Any]:
    inner = get_args(annotation)
    return {annotation}.union(*(_list_types(one) for one in inner)) if inner else {annotation}


class TrainSettings(Record):
    """Model, data, length and output of a run. None lets outpace choose."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str = _model(
        "preset, Hugging Face directory, TOML/JSON spec, run directory or file.py:build",
        "outpace-small",
    )
    init: Literal["pretrained", "random"] | None = _model(
        "weights to start from (default: pretrained if the model has weights)"
    )
    dropout: float | None = _model("dropout probability (default: the model's)", ge=0, lt=1)

    data: tuple[str, ...] = _data(
        "file, directory, glob, .txt/.jsonl/.parquet, nanoGPT .bin, Megatron .bin/.idx, "
        "hf:NAME[:CONFIG[:SPLIT]] or 'stdlib' (Python's own source); may be repeated for a "
        "mixture",
        ("stdlib",),
    )
    data_weights: tuple[PositiveFloat, ...] | None = _data(
        "weight of each --data in a mixture, comma-separated (default: by size)"
    )
    eval_data: tuple[str, ...] | None = _data(
        "validation data, in any form that --data accepts (default: held-out documents)"
    )
    eval_fraction: float = _data(
        "fraction of documents to hold out for validation, chosen by content hash",
        0.05,
        gt=0,
        lt=1,
    )
    task: Task = _data(
        "what to train on: text (pretrain), the assistant's messages in conversations (chat), or "
        "labels of texts (classify)",
        "pretrain",
    )
    text_fields: tuple[str, ...] | None = _data(
        "one or two columns with the texts to classify (default: detected by name)"
    )
    label_field: str | None = _data("column with the label (default: detected by name)")
    text_field: str = _data("key of the text in .jsonl, .parquet and datasets", "text")
    tokenizer: str | None = _data(
        "Hugging Face tokenizer directory, tokenizer.json, a folder with encoder.json and "
        "vocab.bpe, or vocab.txt (default: the model's, else a BPE trained on the data)"
    )
    document_attention: bool = _data(
        "mask attention between documents that are packed into one sample", False
    )
    cache_dir: Path | None = _data("token cache (default: ~/.cache/outpace)")
    workers: NonNegativeInt = _data("background processes for loading data", 0)
    pin_memory: bool | None = _data("use pinned host memory (default: on CUDA)")

    seq_len: PositiveInt | None = _batch(
        "tokens per sample (default: 256, or the model's positions if fewer)"
    )
    padding: Literal["dynamic", "fixed"] | None = _batch(
        "pad samples of chat and classify to the longest of the micro-batch (dynamic) or to "
        "--seq-len (fixed), rounded up to a multiple of 8 (default: dynamic if the strategy allows "
        "batches of different shapes)"
    )
    global_batch: PositiveInt = _batch("samples per optimizer step, over all ranks", 16)
    micro_batch: PositiveInt | Literal["auto"] | None = _batch(
        "samples per rank and forward pass, or auto: as many as fit (default: all samples of the "
        "rank, without accumulation)"
    )
    steps: PositiveInt | None = _length(
        "optimizer steps (default: 70; 3 epochs for chat and classify)"
    )
    tokens: PositiveInt | None = _length("train on this many tokens, instead of --steps")
    epochs: PositiveFloat | None = _length("pass over the data this many times, instead of --steps")

    lr: PositiveFloat | None = _optimization(
        "peak learning rate (default with AdamW: 1e-3; 5e-5 from pretrained weights; 2e-4 with "
        "LoRA)"
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = _optimization(
        "learning rate schedule after warm-up", "cosine"
    )
    warmup: NonNegativeInt | None = _optimization(
        "steps of linear warm-up (default: 5 % of the steps)"
    )
    min_lr_ratio: float = _optimization(
        "final learning rate as a fraction of the peak", 0.1, ge=0, le=1
    )
    optimizer: OptimizerName | None = _optimization(
        "AdamW in three implementations, or with moments in 16, 8 or 4 bits; Adafactor; Muon "
        "for hidden matrices with AdamW for the rest; SGD with momentum (default: "
        "adamw-fused; adamw-bf16 for bf16-pure and fp16-pure)"
    )
    optimizer_in_backward: bool = _optimization(
        "update each parameter during the backward and free its gradient; requires --clip 0 "
        "(single, zero2, zero3, hsdp)",
        False,
    )
    weight_decay: NonNegativeFloat = _optimization(
        "weight decay, decoupled except for sgd; not applied to one-dimensional parameters, "
        "such as biases and norms",
        0.1,
    )
    beta1: float = _optimization("decay of AdamW's first moment; momentum of SGD", 0.9, ge=0, lt=1)
    beta2: float = _optimization("decay of AdamW's second moment", 0.95, ge=0, lt=1)
    clip: NonNegativeFloat = _optimization("maximum gradient norm; 0 = no clipping", 1.0)

    lora_rank: PositiveInt | None = _adapters(
        "freeze the weights and train adapters of this rank (LoRA)"
    )
    lora_alpha: PositiveFloat | None = _adapters(
        "LoRA's alpha: adapters are scaled by alpha / rank (default: the rank)"
    )
    lora_targets: tuple[LoraTarget, ...] = _adapters(
        "matrices of each block that get an adapter", ("all",)
    )
    lora_dropout: float = _adapters("dropout probability of adapters' inputs", 0.0, ge=0, lt=1)
    base: Base = _adapters(
        "format of the frozen weights; nf4: the blocks' matrices in 4 bits (QLoRA)", "fp32"
    )

    precision: AskedPrecision | None = _computation(
        "precision of training (default: bf16-master on a GPU, bf16 on a CPU that is faster with "
        "it, else fp32); tf32: fp32 rounded for tensor cores; bf16 and fp16: autocast of fp32 "
        "weights; *-pure: 16-bit weights; *-master: 16-bit weights, and fp32 master weights in "
        "the optimizer; fp8: matmuls of blocks, on hardware that supports it; O0 to O3: Apex's "
        "levels"
    )
    autocast_cache: bool | None = _computation(
        "cache the casts of weights during the forward pass (default: for custom models, which "
        "may use a weight twice)"
    )
    checkpointing: Checkpointing = _computation(
        "recompute activations in the backward: full keeps only each block's input, attention "
        "also the output of its attention, selective also the outputs of its matmuls",
        "none",
    )
    checkpoint_every: PositiveInt = _computation(
        "checkpoint every K-th block, starting with the first", 1
    )
    checkpoint_layers: tuple[Checkpointing, ...] = _computation(
        "checkpointing mode of each block, comma-separated, instead of --checkpointing", ()
    )
    memory_budget: Size | None = _computation(
        "recompute only as much as each rank needs to stay within this memory, such as 8GiB"
    )
    memory_limit: Size | None = _computation(
        "end the run if a rank needs more memory than this, such as 8GiB, and say what would fit "
        "(default on a CPU: the control group's limit)"
    )
    offload: Literal["none", "cpu", "disk"] | None = _computation(
        "set both --offload-parameters and --offload-optimizer"
    )
    offload_activations: Offload = _computation(
        "keep activations that blocks save for the backward in host memory (CUDA) or on disk",
        "none",
    )
    offload_parameters: Offload | None = _computation(
        "keep parameters and gradients in host memory (single, zero2, zero3, hsdp, 3d), or "
        "parameters on disk (default: none)"
    )
    offload_optimizer: Offload | None = _computation(
        "keep optimizer state in host memory or on disk, and update on the CPU (default: none)"
    )
    offload_dir: Path | None = _computation("directory for offloading to disk (default: the run's)")
    empty_cache: bool = _computation("free cached memory between the phases of a step", False)
    compile: bool | None = _computation(
        "compile the forward pass with torch.compile (default: on CUDA, if that saves time over "
        "the run)"
    )
    cuda_graphs: bool | None = _computation(
        "replay forward and backward on a single CUDA device as CUDA graphs, which saves the host "
        "kernel launches (default: with compile, if memory suffices)"
    )
    loss: Literal["auto", "plain", "chunked"] = _computation(
        "compute the cross-entropy over the vocabulary at once or in chunks", "auto"
    )
    plan: str | None = _computation(
        "auto (the fastest plan that fits this machine; uses machine.json in the current "
        "directory, if there is one), or a plan.json"
    )
    strategy: Strategy | None = _computation(
        "parallel strategy (default: single, or ddp on several processes)"
    )
    dp_replicate: int | None = _axis("number of model replicas")
    dp_shard: int | None = _axis("number of ranks to shard parameters and optimizer state over")
    cp: int | None = _axis("number of ranks to split sequences over")
    tp: int | None = _axis("number of ranks to split each layer's matrices over")
    pp: int | None = _axis("number of ranks to split the layers over")
    pp_microbatches: PositiveInt | None = _computation(
        "micro-batches per pass through the pipeline (default: one per stage)"
    )
    pp_schedule: ProductSchedule | None = _computation(
        "pipeline schedule of strategy 3d (default: 1f1b)"
    )
    sequence_parallel: bool = _computation(
        "with tp, also shard activations along the sequence between the layers that tp splits",
        True,
    )
    servers: PositiveInt | None = _computation(
        "number of parameter servers of strategy ps; they are the last ranks (default: 1)"
    )
    server_updates: bool = _computation(
        "run the optimizer on the parameter servers instead of the workers", False
    )
    worker_devices: PositiveInt = _computation("processes per worker of strategy ps", 1)
    compress_gradients: Compression = _computation(
        "reduce gradients in bf16 (ddp, zero1, cp, ring) or as low-rank matrices (powersgd; not "
        "ring)",
        "none",
    )
    powersgd_rank: PositiveInt = _computation("rank of PowerSGD's matrices", 1)
    powersgd_start: int | None = _computation(
        "steps before PowerSGD starts (default: a tenth of the steps or the warm-up, whichever is "
        "longer)",
        ge=POWERSGD_LEAST_START,
    )
    bucket_mib: PositiveInt = _computation(
        "size in MiB of the gradient buckets of ddp, zero1 and ring", 25
    )
    nproc: PositiveInt | None = _computation("number of processes to start on this host")
    device: Literal["auto", "cpu", "cuda", "mps"] = _computation("device to compute on", "auto")
    backend: Literal["auto", "gloo", "nccl", "mpi"] = _computation(
        "communication backend (auto: nccl on CUDA, else gloo; mpi: if torch was built with it)",
        "auto",
    )
    threads: PositiveInt | None = _computation(
        "CPU threads per process (default: OMP_NUM_THREADS, else cores / processes)"
    )
    comm_timeout_s: Annotated[PositiveFloat, Field(le=_MOST_TIMEOUT_S)] = _computation(
        "seconds to wait for a collective, or for a lost rank, before ending the run", 300.0
    )

    eval_every: NonNegativeInt = _run("steps between evaluations; 0 = only at the start and end", 0)
    eval_batches: NonNegativeInt | None = _run(
        "global batches per evaluation; 0 = no evaluation (default: 128 samples; all for classify)"
    )
    measure_only: bool = _run("write neither checkpoints nor the model", False)
    expect_step_time_s: PositiveFloat | None = _run(
        "expected step time in seconds; warn if the first 100 steps differ by more than 3 %"
    )
    save_every: NonNegativeInt = _run("steps between checkpoints; 0 = only at the end", 0)
    keep: PositiveInt = _run("number of newest checkpoints to keep", 2)
    out: Path | None = _run("directory of the run (default: runs/<time>-<model>)")
    resume: bool = _run(
        "resume from the newest complete checkpoint in --out; --resume DIR also sets --out", False
    )
    seed: NonNegativeInt = _run("random seed for weights, data order and dropout", 0)
    check: Literal["on", "model", "off"] = _run(
        "before step 1, check a custom model on several processes: model compares a batch with "
        "the plain module and refuses the strategy if results differ; on also compares a few "
        "samples of the ranks' data sets",
        "on",
    )
    deterministic: bool = _run(
        "use only deterministic kernels on a GPU, so that repeated and resumed runs are equal bit "
        "for bit; slower (CPU kernels are always deterministic)",
        False,
    )
    log: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = _run(
        "additional loggers, comma-separated", ()
    )
    profile: bool = _run("write a Chrome trace of a few steps", False)
    memory: bool = _run(
        "show memory by kind: traced before the first step, measured at the end", False
    )
    memory_snapshot: bool = _run("write torch's memory snapshot (CUDA)", False)
    sample_tokens: NonNegativeInt = _run("tokens to generate as a sample at the end; 0 = none", 80)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse booleans as numbers: `lr = true` would mean a learning rate of 1."""
        name = info.field_name
        if not isinstance(value, bool) or name is None:
            return value
        if bool not in _list_types(cls.model_fields[name].annotation):
            raise ValueError(f"{str(value).lower()} is neither a number nor a name")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _require_range(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse numbers that are impossibly small or large; 0 and less are checked elsewhere."""
        low, high = _RANGES.get(info.field_name or "", (0, math.inf))
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, (int, float)) or number <= 0:
                continue
            if number > high:
                raise PydanticCustomError("range", f"must be at most {high:,}")
            if number < low:
                raise PydanticCustomError("range", f"must be at least {low:,}")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        lengths = [name for name in ("steps", "tokens", "epochs") if getattr(self, name)]
        if len(lengths) > 1:
            raise ValueError(f"give one of steps, tokens, epochs, not {' and '.join(lengths)}")
        for axis in AXES:
            if getattr(self, axis) == 0:
                raise ValueError(f"{axis} is 0. Use 1 or more, or -1 for the remaining ranks")
        if self.memory_budget is not None and self.micro_batch == "auto":
            raise ValueError(
                "memory_budget and micro_batch auto would each use the memory that the other "
                "leaves free. Give the micro-batch as a number"
            )
        if self.optimizer_in_backward and self.micro_batch == "auto":
            raise ValueError(
                "micro_batch auto may accumulate several smaller micro-batches per step, but "
                "optimizer_in_backward supports only one. Give the micro-batch as a number"
            )
        recomputing = {"checkpointing": "none", "checkpoint_every": 1, "checkpoint_layers": ()}
        for name, default in recomputing.items():
            if self.memory_budget is not None and getattr(self, name) != default:
                raise ValueError(
                    f"memory_budget and {name} both choose what is recomputed. Leave one out"
                )
        if self.optimizer_in_backward and self.clip > 0:
            raise ValueError(
                f"clip is {self.clip}, but optimizer_in_backward updates parameters before the "
                "norm of all gradients is known. Use --clip 0, or leave out "
                "--optimizer-in-backward"
            )
        if self.data_weights is not None and len(self.data_weights) != len(self.data):
            raise ValueError(
                f"data_weights has {len(self.data_weights)} values for {len(self.data)} sources. "
                "Give one weight per source"
            )
        self._check_task()
        return self

    def _check_task(self) -> None:
        if self.task != "classify" and (self.text_fields or self.label_field):
            raise ValueError(
                "text_fields and label_field apply to task classify. Use task classify, or leave "
                "out both"
            )
        if self.task == "pretrain":
            if self.padding is not None:
                raise ValueError(
                    f"padding {self.padding}: samples of task pretrain all have seq_len tokens and "
                    "need no padding. Leave out padding"
                )
            return
        for name in ("tokens", "document_attention", "data_weights"):
            if getattr(self, name):
                raise ValueError(f"task {self.task} does not support {name}. Leave out {name}")
        if self.task == "classify" and self.loss == "chunked":
            raise ValueError(
                "loss chunked needs a vocabulary, which task classify does not predict. Leave out "
                "loss, or use another task"
            )


# Settings of a run's other work and its output. They do not affect training, so they may differ
# when the same training is repeated.
OF_A_RUN = frozenset(
    name
    for name, field in TrainSettings.model_fields.items()
    if field.json_schema_extra == {"group": "run"} and name != "seed"
)
