"""Names that other tools have for outpace's options, keys and values.

They come from transformers' TrainingArguments (4 and 5), accelerate's launcher and configuration,
torchtitan, Megatron-LM, DeepSpeed, axolotl, nanoGPT, Lightning's Trainer, torchrun, and from the
names that nvidia-smi and cloud providers give to machines. An alias is only suggested; it sets
nothing.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_ACCUMULATION = "accumulation is derived: global batch / (micro-batch × replicas)"
_BATCHES = (
    "micro-batch: samples per rank and forward pass; global batch: samples per optimizer step "
    "on all ranks"
)
_SHARE = "a number of steps, not a share of them"


class _Meaning(NamedTuple):
    """Possible names in outpace, of which a command suggests only those that it has, and a remark.

    A name may be followed by a space and a value.
    """

    names: tuple[str, ...]
    remark: str = ""


def _table(rows: Mapping[str, str | _Meaning]) -> dict[str, _Meaning]:
    """Build a table from rows of aliases that share a meaning; | separates outpace's names."""
    table: dict[str, _Meaning] = {}
    for aliases, meant in rows.items():
        meaning = meant if isinstance(meant, _Meaning) else _Meaning(tuple(meant.split("|")))
        table |= dict.fromkeys(map(_plain, aliases.split()), meaning)
    return table


def _plain(name: str) -> str:
    """Normalise a name: convert it to lower case, and keep only letters and digits."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


_SETTINGS = _table({
    # Models and data.
    "model_name_or_path model_name base_model pretrained_model_name_or_path model_path hf_path "
    "pretrained model_id checkpoint ckpt": "model|run",
    "model": "run",
    "tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_model": "tokenizer",
    "dataset datasets dataset_name dataset_path train_file train_data train_data_path "
    "train_dataset data_path data_dir dataset_dir train_files": "data",
    "validation_file eval_file val_data valid_data eval_dataset test_datasets valid_data_path":
        "eval-data",
    "val_set_size validation_split validation_split_percentage val_split eval_split test_size":
        "eval-fraction",
    "dataset_text_field text_column text_column_name": "text-field",
    "label_column_name label_column": "label-field",
    "attention_dropout hidden_dropout dropout_rate": "dropout",
    # Batches and lengths.
    "block_size max_seq_length max_seq_len sequence_len sequence_length seq_length "
    "context_length model_max_length cutoff_len seqlen ctx_len": "seq-len",
    "max_length": "seq-len|max-new-tokens",
    "batch_size train_batch_size": _Meaning(("micro-batch", "global-batch"), _BATCHES),
    "per_device_train_batch_size micro_batch_size local_batch_size device_batch_size "
    "train_micro_batch_size_per_gpu per_gpu_train_batch_size mbs": "micro-batch",
    "global_batch_size total_batch_size gbs": "global-batch",
    "gradient_accumulation_steps gradient_accumulation grad_accum accumulate_grad_batches "
    "accumulation_steps grad_accum_steps": _Meaning(("global-batch", "micro-batch"), _ACCUMULATION),
    "per_device_eval_batch_size eval_batch_size": "batch-size",
    "max_steps max_iters train_iters training_steps num_steps total_steps iters iterations "
    "num_training_steps max_train_steps train_steps": "steps",
    "num_train_epochs num_epochs max_epochs epoch": "epochs",
    "max_tokens": "max-new-tokens|tokens",
    "train_tokens total_tokens token_budget": "tokens",
    "num_new_tokens new_tokens max_gen_len": "max-new-tokens",
    # Optimization.
    "learning_rate max_lr peak_lr": "lr",
    "lr_scheduler_type lr_scheduler scheduler lr_schedule decay_type lr_decay_style": "schedule",
    "warmup_steps warmup_iters num_warmup_steps lr_warmup_iters lr_warmup_steps": "warmup",
    "warmup_ratio warmup_fraction lr_warmup_fraction": _Meaning(("warmup",), _SHARE),
    "min_lr lr_min eta_min min_lr_factor":
        _Meaning(("min-lr-ratio",), "as a share of the peak learning rate"),
    "optim optimizer_type optimizer_name": "optimizer",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "betas": "beta1|beta2",
    "wd adam_weight_decay": "weight-decay",
    "max_grad_norm grad_clip clip_grad gradient_clip_val gradient_clipping max_norm clip_norm "
    "grad_norm_clip": "clip",
    "lora_r lora_dim r rank": "lora-rank",
    "lora": "lora-rank 8",
    "lora_target_modules target_modules": "lora-targets",
    "load_in_4bit qlora use_4bit": "base nf4",
    # Computation.
    "mixed_precision dtype torch_dtype amp mixed_precision_param": "precision",
    "bf16 bfloat16": "precision bf16",
    "fp16 half float16": "precision fp16",
    "fp32 float32": "precision fp32",
    "tf32": "precision tf32",
    "fp8": "precision fp8",
    "torch_compile": "compile",
    "gradient_checkpointing activation_checkpointing activation_checkpoint recompute_activations "
    "recompute enable_activation_checkpointing ac": "checkpointing full",
    "cpu_offload offload_to_cpu fsdp_offload_params": "offload cpu",
    "fsdp fsdp2 fully_shard use_fsdp zero3": "strategy zero3",
    "zero2": "strategy zero2",
    "zero1 use_distributed_optimizer": "strategy zero1",
    "ddp": "strategy ddp",
    "hsdp": "strategy hsdp",
    "deepspeed zero zero_stage distributed_strategy parallelism sharding_strategy "
    "fsdp_sharding_strategy": "strategy",
    "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size tp_size tp_degree "
    "tensor_parallel tp": "tp|max-tp",
    "pipeline_model_parallel_size pipeline_parallel_degree pipeline_parallel_size pp_size": "pp",
    "context_parallel_size context_parallel_degree cp_size": "cp",
    "data_parallel_shard_degree dp_shard_size": "dp-shard",
    "data_parallel_replicate_degree dp_replicate_size": "dp-replicate",
    "gpus num_gpus n_gpus ngpus gpus_per_node n_gpus_per_node num_processes nproc_per_node "
    "nprocs world_size num_devices devices ranks": "nproc|devices-per-node",
    "nproc": "devices-per-node",
    "devices_per_node": "nproc",
    "num_nodes nnodes num_machines n_nodes": "nodes|hosts",
    "use_cpu no_cuda cpu": "device cpu",
    "accelerator device_type": "device",
    "gpu hardware gpu_type": "machine|device",
    "ddp_bucket_cap_mb bucket_cap_mb": "bucket-mib",
    "ddp_backend dist_backend distributed_backend": "backend",
    "ddp_timeout timeout": "comm-timeout",
    "num_workers dataloader_num_workers preprocessing_num_workers": "workers",
    "dataloader_pin_memory": "pin-memory",
    # The run.
    "output_dir out_dir output save_dir output_path default_root_dir logdir dump_folder": "out",
    "report_to logger log_with loggers": "log",
    "wandb use_wandb wandb_log wandb_project": "log wandb",
    "tensorboard tensorboard_dir enable_tensorboard": "log tensorboard",
    "mlflow": "log mlflow",
    "logging_steps log_interval log_every log_freq log_every_n_steps":
        _Meaning(("log",), "every step is already in the run's metrics.jsonl"),
    "eval_steps eval_interval evaluation_steps val_check_interval eval_freq": "eval-every",
    "eval_iters limit_val_batches max_eval_batches": "eval-batches",
    "save_steps save_interval checkpoint_interval save_freq ckpt_interval every_n_train_steps":
        "save-every",
    "save_total_limit keep_latest_k max_checkpoints": "keep",
    "resume_from_checkpoint resume_from ckpt_path load continue": "resume",
    "random_seed manual_seed data_seed": "seed",
    "full_determinism use_deterministic_algorithms": "deterministic",
    "enable_profiling profiler": "profile",
})  # fmt: skip

_VALUES = _table({
    # Strategies, and formats of --emit with the same name.
    "fsdp fsdp2 full_shard fully_shard deepspeed_stage_3 stage3": "zero3|fsdp",
    "shard_grad_op deepspeed_stage_2 stage2 sdp": "zero2",
    "deepspeed_stage_1 stage1 zero_redundancy_optimizer": "zero1",
    "hybrid_shard hybrid_fsdp fsdp_hybrid": "hsdp",
    "no_shard distributed_data_parallel": "ddp",
    "data_parallel": "ddp|dp",
    "deepspeed zero": "zero1|zero2|zero3",
    "tensor_parallel": "tp",
    "context_parallel sequence_parallel ring_attention": "cp",
    "pipeline_parallel pipeline pp": "1f1b|gpipe",
    "parameter_server": "ps",
    "zero_bubble": "zb",
    "none no": "single|fp32",
    "trainer transformers huggingface hf": "fsdp|accelerate",
    "trl": "accelerate",
    "megatron_lm megatron_core mcore nemo": "megatron",
    "titan": "torchtitan",
    "axolotl ds": "deepspeed",
    # Optimizers.
    "adam adamw adamw_torch_fused adamw_torch adamw_hf fused_adam fused": "adamw-fused",
    "adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit adam8bit 8bit": "adamw-8bit",
    "adamw_torch_4bit 4bit": "adamw-4bit|nf4",
    "adamw_anyprecision": "adamw-bf16",
    "paged_adamw_32bit paged_adamw": "adamw-fused",
    "foreach": "adamw-foreach",
    # Precisions.
    "bfloat16 bf16_mixed amp_bf16 mixed": "bf16",
    "bf16_true pure_bf16": "bf16-pure",
    "float16 half 16 fp16_mixed 16_mixed amp_fp16 amp": "fp16",
    "16_true": "fp16-pure",
    "float32 32 32_true single full": "fp32",
    "float8 fp8_e4m3 fp8_mixed": "fp8",
    # Schedules and loggers.
    "cosine_with_min_lr cosine_annealing": "cosine",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "tb": "tensorboard",
    "wb weights_and_biases": "wandb",
    # The matrices that have adapters, as PEFT's target_modules names them.
    "q_proj query wq": "q",
    "k_proj key wk": "k",
    "v_proj value wv": "v",
    "c_attn qkv_proj query_key_value": "q|k|v",
    "o_proj out_proj wo": "out",
    "gate_proj w1": "gate",
    "up_proj w3 c_fc fc1": "up",
    "down_proj w2 fc2": "down",
    "all_linear": "all",
    # Devices and machines, as clouds and nvidia-smi name them.
    "gpu": "cuda",
    "metal": "mps",
    "p3dn.24xlarge": "aws-p3dn",
    "p4d.24xlarge": "aws-p4d",
    "p4de.24xlarge": "aws-p4de",
    "p5.48xlarge": "aws-p5",
    "p5en.48xlarge": "aws-p5en",
    "g5.48xlarge": "aws-g5-48xlarge",
    "nvidia-h100-80gb-hbm3": "h100-sxm",
    "nvidia-h200": "h200-sxm",
    "nvidia-a100-sxm4-80gb": "a100-sxm-80-gb",
    "nvidia-a100-sxm4-40gb": "a100-sxm-40-gb",
    "nvidia-a100-80gb-pcie": "a100-pcie-80-gb",
    "nvidia-a100-pcie-40gb": "a100-pcie-40-gb",
})  # fmt: skip


def translate_alias(word: str, choices: Iterable[str]) -> tuple[list[str], str]:
    """Return outpace's names (some with a value) for another tool's word, and a remark."""
    known = {_plain(choice): choice for choice in choices}
    if _plain(word) in known:  # apart from dashes and capitals
        return [known[_plain(word)]], ""
    for table in (_SETTINGS, _VALUES):
        meaning = table.get(_plain(word))
        if meaning is None:
            continue
        pairs = [name.partition(" ") for name in meaning.names]
        names = [_format_setting(known[_plain(name)], value) for name, _, value in pairs
                 if _plain(name) in known]  # fmt: skip
        if names:
            return names, meaning.remark
    return [], ""


def _format_setting(name: str, value: str) -> str:
    """Format a setting with its value, for a command line, or for a file and Python."""
    if not value:
        return name
    if name.startswith("--"):
        return f"{name} {value}"
    return f"{name} = {value}" if value.isdigit() else f'{name} = "{value}"'
