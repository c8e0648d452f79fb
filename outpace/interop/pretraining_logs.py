"""Readers for the console output of torchtitan, Megatron-LM, DeepSpeed and nanotron.

The formats are defined by: torchtitan, `torchtitan/components/metrics.py` (`log`),
`distributed/parallel_dims.py`, `pipeline_parallel.py` and `trainer.py`; Megatron-LM,
`megatron/training/training.py` (`training_log`) and `arguments.py` (`_print_args`), also used by
Megatron-Bridge and Megatron-DeepSpeed; DeepSpeed, `deepspeed/utils/timer.py`
(`ThroughputTimer.stop`) and `runtime/config.py` (`print`); nanotron, `src/nanotron/trainer.py`
(`train_step_logs`, `pre_training`) and `logging/base.py` (`human_format`).
"""

import re
from ast import literal_eval
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outpace.interop.log_lines import (
    NUMBER,
    clock_step_s,
    find_numbers,
    find_settings,
    last_number,
    parse_number,
    steady_median,
    whole_settings,
)
from outpace.interop.rounded_numbers import Range, abbreviation_range

_GIB, _MIB = 2**30, 2**20


def read_torchtitan(lines: Sequence[str]) -> dict[str, Any] | None:
    """Return what torchtitan logged; None if it logged no steps."""
    # Lines with "validate step" give the speed of evaluations. Before 2025, tps was called wps.
    step = re.compile(
        rf"(?<!validate )step:\s*(\d{{1,15}})\s+loss:\s*\S+.*memory:\s*{NUMBER}GiB\([^)]*\)"
        rf"\s+[tw]ps:\s*{NUMBER}"
    )
    matches = [match for line in lines if (match := step.search(line))]
    told = [(int(match[1]), parse_number(match[2]), parse_number(match[3])) for match in matches]
    found = [(at, gib, rate) for at, gib, rate in told if gib is not None and rate]
    if not found:
        return None
    text = "\n".join(lines)
    most = max(gib for _, gib, _ in found)
    return {
        "trainer": "torchtitan",
        "steps": max(1, len({at for at, _, _ in found}) - 1),
        "tokens_per_s_per_device": steady_median([rate for _, _, rate in found]),
        "clock_step_s": clock_step_s(re.compile(r"(?<!validate )step:\s*(\d{1,15})\s"), lines),
        "peak_memory_bytes": int(most * _GIB) or None,
        "memory_kind": "reserved",
        **_read_torchtitan_batch(text),
        **_read_torchtitan_mesh(text),
        **_read_torchtitan_options(text),
    }


def _read_torchtitan_batch(text: str) -> dict[str, Any]:
    """Read the batch size, which torchtitan logs in tokens since August 2026."""
    found = re.search(
        r"local batch size (\d+), global batch size (\d+), "
        r"(?:gradient accumulation steps \d+, )?sequence length (\d+)", text
    )  # fmt: skip
    if found is not None:
        local, total, length = map(int, found.groups())
        told = {"micro_batch": local, "global_batch": total, "seq_len": length}
        return told | _read_torchtitan_pipeline(text, local)
    found = re.search(
        r"(\d+) tokens per DP rank, (\d+) tokens per train step, gradient accumulation steps "
        r"\d+, maximum context length (\d+)", text
    )  # fmt: skip
    if found is None:
        return _read_torchtitan_pipeline(text, None)
    local, total, length = map(int, found.groups())
    batch = {"seq_len": length}
    if not total % length and not local % length:
        batch |= {"micro_batch": local // length, "global_batch": total // length}
    return batch | _read_torchtitan_pipeline(text, batch.get("micro_batch"))


# torchtitan's and torch's names for schedules.
_TORCH_SCHEDULES = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "loopedbfs",
    "InterleavedZeroBubble": "zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}


def _read_torchtitan_pipeline(text: str, local_batch: int | None) -> dict[str, Any]:
    """Read how a pipeline splits a rank's batch; micro_batch is None if the log does not say."""
    pp = re.search(r"parallelism: .*?\bpp=(\d+)", text)
    found = re.search(
        r"Using pipeline schedule (\w+) with (\d+) microbatches and (\d+) stages", text
    )
    if found is None:
        return {"micro_batch": None} if pp is not None and int(pp[1]) > 1 else {}
    schedule, count = _TORCH_SCHEDULES.get(found[1]), int(found[2])
    told: dict[str, Any] = {"pp_microbatches": count, "micro_batch": None}
    if schedule is not None:
        told["pp_schedule"] = schedule
    if pp is not None and schedule in ("interleaved", "loopedbfs", "zb"):
        told["virtual_stages"] = max(1, int(found[3]) // int(pp[1]))
    if local_batch is not None and not local_batch % count:
        told["micro_batch"] = local_batch // count
    return told


def _read_torchtitan_mesh(text: str) -> dict[str, int]:
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    named = re.search(r"device mesh with parallelism: (.*)", text)
    if named is not None:
        pairs = re.findall(r"(\w+)=(\d{1,9})\b", named[1])
    else:
        older = re.search(r"Building \d+-D device mesh with (\[.*?\]), (\[.*?\])", text)
        if older is None:
            return {}
        try:
            pairs = list(zip(literal_eval(older[1]), literal_eval(older[2]), strict=True))
        except (ValueError, SyntaxError):
            return {}
        # The first versions have a single data-parallel axis, which shards by default.
        pairs = [("dp_shard" if name == "dp" else name, size) for name, size in pairs]
    sizes = {name: int(size) for name, size in pairs if name in axes}
    world = 1
    for name, size in sizes.items():
        world *= size if name != "ep" else 1
    return {**sizes, "world_size": world}


def _read_torchtitan_options(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mode = re.search(r"Applied (full|selective|FullAC|SelectiveAC) activation checkpointing", text)
    if mode is not None:
        found["checkpointing"] = mode[1].removesuffix("AC").lower()
    if re.search(r"Float8 .*training active|to (?:Float8|MXFP8)Linear", text):
        found["precision"] = "fp8"
    if "Applied CPU Offloading to the model" in text:
        found |= {"offload_parameters": "cpu", "offload_optimizer": "cpu"}
    size = re.search(r"size: ([\d,]+) total parameters", text)
    if size is not None:
        found["parameters"] = int(size[1].replace(",", ""))
    return found


# Megatron's arguments, printed by _print_args as " seq_length ........ 4096".
_MEGATRON: Mapping[str, str] = {
    "seq_length": "seq_len",
    "global_batch_size": "global_batch",
    "micro_batch_size": "micro_batch",
    "world_size": "world_size",
    "model_parallel_size": "tp",  # before pipelines, in 2020
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "ds_sequence_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "expert_tp",
    "virtual_pipeline_model_parallel_size": "virtual_stages",
    "num_layers": "layers",
    "hidden_size": "hidden",
}


def read_megatron(lines: Sequence[str]) -> dict[str, Any] | None:
    """Return what Megatron logged; None if it logged no steps."""
    lines, grown = _keep_last_batch_size(lines)
    times = find_numbers(rf"elapsed time per iteration \(ms\):\s*{NUMBER}", lines)
    if not times:
        return None
    # DeepSpeed's settings have the same names as Megatron's, but its world size counts only
    # data-parallel ranks.
    own = [line for line in lines if not _DEEPSPEED_SETTING.search(line)]
    said = dict(find_settings(own))
    found: dict[str, Any] = whole_settings(said, _MEGATRON)
    if found.get("virtual_stages", 1) > 1:
        found["pp_schedule"] = "interleaved"
    else:
        found.pop("virtual_stages", None)
    batch = last_number(r"global batch size:\s*(\d+)", lines)
    length = last_number(r"actual seqlen:\s*(\d+)", lines)
    memory = find_numbers(rf"max allocated:\s*{NUMBER}", lines)
    options = _read_megatron_options(said, found)
    if said.get("deepspeed") == "True" and (stage := _read_zero_stage(lines)) is not None:
        options["zero"] = stage
    return {
        "trainer": "megatron",
        "steps": max(1, len(times) - 1),
        "step_time_s": (steady_median(times) or 0.0) / 1e3,
        "peak_memory_bytes": int(max(memory) * _MIB) if memory else None,
        "pp_schedules_all": True,
        **found,
        **({"global_batch": batch} if batch else {}),
        **({"seq_len": length} if length else {}),
        **options,
        "notes": (*options["notes"], *grown),
    }


def _keep_last_batch_size(lines: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """Drop steps whose global batch or sequence length differs from the last step's.

    Returns the remaining lines and a note. Megatron may change both during a run
    (rampup_batch_size, step_batch_size_schedule, curriculum).
    """
    sizes = re.compile(r"global batch size:\s*(\d+)(?:.*actual seqlen:\s*(\d+))?")
    steps = {place: match for place, line in enumerate(lines) if (match := sizes.search(line))}
    if len({match.groups() for match in steps.values()}) <= 1:
        return lines, ()
    last = [*steps.values()][-1].groups()
    other = {place for place, match in steps.items() if match.groups() != last}
    batch, length = last
    note = (
        f"the batch or the length changed during the run: only the {len(steps) - len(other):,} "
        f"logged steps of {batch} sequences{f' of {length} tokens' if length else ''} are read."
    )
    return [line for place, line in enumerate(lines) if place not in other], (note,)


_FSDP_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _read_megatron_options(
    arguments: Mapping[str, str], sizes: Mapping[str, int]
) -> dict[str, Any]:
    options: dict[str, Any] = _read_megatron_precision(arguments)
    notes = []
    sharded = arguments.get("use_distributed_optimizer")
    if sharded in ("True", "False"):
        options["zero"] = int(sharded == "True")
    if "True" in (arguments.get("use_megatron_fsdp"), arguments.get("use_custom_fsdp")):
        options["zero"] = _FSDP_STAGES.get(arguments.get("data_parallel_sharding_strategy", ""), 3)
    elif arguments.get("use_torch_fsdp2") == "True":
        options["zero"] = 3
    if arguments.get("sequence_parallel") in ("True", "False") and sizes.get("tp", 1) > 1:
        options["sequence_parallel"] = arguments["sequence_parallel"] == "True"
    if sizes.get("ep", 1) > 1 and not options.get("zero"):
        options["zero"] = 1
        notes.append(
            "Megatron kept whole optimizer states while it divided experts over ranks; the plan "
            "shards them (ZeRO-1), which needs less memory."
        )
    if sizes.get("expert_tp", sizes.get("tp", 1)) != sizes.get("tp", 1):
        notes.append(
            f"Megatron split experts over {sizes['expert_tp']} tensor-parallel ranks and other "
            f"layers over {sizes.get('tp', 1)}; the plan splits both in the same way, or does not "
            "split experts if ep includes the ranks of tp."
        )
    granularity = arguments.get("recompute_granularity")
    if granularity == "full":
        options["checkpointing"] = "full"
        if arguments.get("recompute_method") == "block":
            notes.append(
                f"the first {arguments.get('recompute_num_layers')} blocks of each stage were "
                "recomputed; the plan recomputes all. Use --layout checkpoint_every=K to recompute "
                "every K-th block."
            )
    elif granularity == "selective":
        notes.append(
            "Megatron recomputed some modules (recompute_granularity selective), which matches no "
            "mode of outpace; the plan recomputes none. Use --layout checkpointing=selective "
            "or attention."
        )
    return {**options, "notes": tuple(notes)}


def _read_megatron_precision(arguments: Mapping[str, str]) -> dict[str, Any]:
    """Read precision and optimizer offloading; an offloaded optimizer keeps no master weights."""
    offloaded = arguments.get("optimizer_cpu_offload") == "True"
    options: dict[str, Any] = {"offload_optimizer": "cpu"} if offloaded else {}
    masters = "" if offloaded else "-master"
    if arguments.get("fp8", "None") not in ("None", "False"):
        options["precision"] = "fp8"
    elif arguments.get("bf16") == "True":
        options["precision"] = f"bf16{masters}"
    elif arguments.get("fp16") == "True":
        options["precision"] = f"fp16{masters}"
    elif arguments.get("bf16") == arguments.get("fp16") == "False":
        options["precision"] = "fp32"
    return options


_DEEPSPEED: Mapping[str, str] = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "world_size": "world_size",
}
_DEEPSPEED_SETTING = re.compile(r"\[config\.py:\d+:print\]")
# Signs of ranks that are not data-parallel: Ulysses, AutoTP and pipelines.
_DEEPSPEED_MODEL_RANKS = re.compile(
    r'"(?:sequence_parallel_size|autotp_size|tp_size)": *(?![01]\b)\d|Partitioning pipeline stages'
)


def read_deepspeed(lines: Sequence[str]) -> dict[str, Any] | None:
    """Return what DeepSpeed logged; None if it logged no steps."""
    rates = find_numbers(rf"CurrSamplesPerSec={NUMBER}", lines)
    if not rates:  # before 0.6.6, only the mean since the second step
        rates = find_numbers(rf"[ ,]SamplesPerSec={NUMBER}", lines)[-1:]
    if not rates:
        return None
    most = max(find_numbers(rf"MaxMemAllocated={NUMBER}GB", lines), default=0.0)
    said = dict(find_settings(lines))
    found = {name: value for name, value in whole_settings(said, _DEEPSPEED).items() if value}
    if any(_DEEPSPEED_MODEL_RANKS.search(line) for line in lines):
        found.pop("world_size", None)
    stage = _read_zero_stage(lines)
    return {
        "trainer": "deepspeed",
        "steps": max(1, len(rates) - 1),
        "samples_per_s": steady_median(rates),
        "clock_step_s": _read_deepspeed_clock_s(lines, said),
        "peak_memory_bytes": int(most * _GIB) or None,
        **({} if stage is None else {"zero": stage}),
        **found,
        **_read_deepspeed_options(lines, said),
    }


def _read_zero_stage(lines: Sequence[str]) -> int | None:
    # Pipeline stages are printed as "stage=3 layers=7" when a model is built.
    return last_number(
        r'(?:"stage": ?|zero_optimization_stage \.* |stage=(?:<ZeroStageEnum\.\w+: )?)(\d)\b'
        r"(?! layers=)",
        lines,
    )


def _read_deepspeed_options(lines: Sequence[str], settings: Mapping[str, str]) -> dict[str, Any]:
    """Read precision and offloading from DeepSpeed's settings, whose names vary by version."""
    found: dict[str, Any] = {}
    zero = " ".join(line for line in lines if "zero_config" in line)
    for name, theirs in (("parameters", "param"), ("optimizer", "optimizer")):
        place = re.search(rf"offload_{theirs}=\w+\(device=\S*?(cpu|nvme)", zero)
        if place is not None:
            found[f"offload_{name}"] = "cpu" if place[1] == "cpu" else "disk"
    if re.search(r"CPU Offload: True", "\n".join(lines)):
        found.setdefault("offload_optimizer", "cpu")
    masters = "" if found else "-master"
    for dtype, names in (
        ("bf16", ("bfloat16_enabled", "bfloat16_config")),
        ("fp16", ("fp16_enabled", "float16_config")),
    ):
        values = [settings[name] for name in names if name in settings]
        if any(value == "True" or value.startswith("enabled=True") for value in values):
            found["precision"] = f"{dtype}{masters}"
    return found


def _read_deepspeed_clock_s(
    lines: Sequence[str], settings: Mapping[str, str]
) -> tuple[float, float] | None:
    """Return bounds of the step time in seconds, from the timestamps of lines.

    Before version 0.8, DeepSpeed counted micro-batches instead of steps, and its rate often
    excluded the optimizer.
    """
    if (clock := clock_step_s(re.compile(r"global_step=(\d{1,15}),"), lines)) is not None:
        return clock
    micro = clock_step_s(re.compile(r"\b\d+/(\d{1,15}), (?:\w+)?SamplesPerSec="), lines)
    passes = whole_settings(settings, {"gradient_accumulation_steps": "passes"}).get("passes")
    return None if micro is None or not passes else (micro[0] * passes, micro[1] * passes)


_HUMAN = rf"{NUMBER}([KMGBT]?)"
# Settings of nanotron's Config, as Python prints them.
_NANOTRON: Mapping[str, str] = {
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
    "zero_stage": "zero",
    "micro_batch_size": "micro_batch",
    "sequence_length": "seq_len",
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
}


def read_nanotron(lines: Sequence[str]) -> dict[str, Any] | None:
    """Return what nanotron logged; None if it logged no steps."""
    times = _read_abbreviated(rf"(?:elapsed_)?time_per_iteration_ms: {_HUMAN}", lines)
    if not times:
        return None
    total = _read_abbreviated(rf"tokens_per_sec: {_HUMAN}", lines)
    each = _read_abbreviated(rf"tokens_per_sec_per_gpu: {_HUMAN}", lines)
    found = _read_nanotron_settings("\n".join(lines))
    if total and each and (world := _infer_world_size(total, each)) is not None:
        found.setdefault("world_size", world)
    batch = _read_nanotron_batch(lines, times, total, found)
    memory = _read_abbreviated(rf"cuda_max_memory_reserved: {_HUMAN}", lines)
    return {
        "trainer": "nanotron",
        "steps": max(1, len(times) - 1),
        "step_time_s": (steady_median([_midpoint(time) for time in times]) or 0.0) / 1e3,
        "tokens_per_s_per_device": steady_median([_midpoint(value) for value in each]) or None,
        "peak_memory_bytes": int(max(map(_midpoint, memory))) if memory else None,
        "memory_kind": "reserved",
        **found,
        "global_batch": batch,
    }


def _read_nanotron_settings(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for theirs, name in _NANOTRON.items():
        match = re.search(rf"\b{theirs}=(\d{{1,9}})\b", text)
        if match:
            found[name] = int(match[1])
    dp = found.pop("dp", None)
    if dp is not None and {"tp", "pp"} <= found.keys():
        found["world_size"] = dp * found["tp"] * found["pp"] * found.get("cp", 1)
    mode = re.search(r"tp_mode=\S*?(ALL_REDUCE|REDUCE_SCATTER)", text)
    if mode is not None and found.get("tp", 1) > 1:
        found["sequence_parallel"] = mode[1] == "REDUCE_SCATTER"
    engine = re.search(r"pp_engine=\S*?(AllForwardAllBackward|OneForwardOneBackward)", text)
    if engine is not None and found.get("pp", 1) > 1:
        found |= {
            "pp_schedule": "gpipe" if engine[1].startswith("All") else "1f1b",
            "pp_schedules_all": True,
        }
    recomputed = re.search(r"recompute_layer=(True|False)", text)
    if recomputed is not None:
        found["checkpointing"] = "full" if recomputed[1] == "True" else "none"
    dtype = re.search(r"\bdtype=torch\.(bfloat16|float16|float32)", text)
    if dtype is not None:
        names = {"bfloat16": "bf16-master", "float16": "fp16-master", "float32": "fp32"}
        found["precision"] = names[dtype[1]]
    return found


def _read_nanotron_batch(
    lines: Sequence[str],
    times_ms: Sequence[Range],
    rates: Sequence[Range],
    settings: Mapping[str, Any],
) -> int | None:
    """Return the number of sequences per step; None if the log does not give it exactly.

    The global_batch_size in a step's line counted sequences until March 2025, and has counted
    tokens since. The logged rate times the step time shows which of the two was logged.
    """
    exact = last_number(r"\bmbs: \d+ .*global_batch_size: (\d+) \|", lines)
    if exact:
        return exact
    batch = _read_abbreviated(rf"time_per_iteration_ms: .*global_batch_size: {_HUMAN}", lines)
    if not batch:
        return None
    counted = batch[-1]
    if rates:
        tokens = rates[-1].multiply(times_ms[-1])
        if counted.high >= tokens.low / 1e3 and counted.low <= tokens.high / 1e3:
            length = settings.get("seq_len")
            if not length:
                return None
            counted = Range(counted.low / length, counted.high / length)
    return counted.only_whole_number()


def _infer_world_size(total_rates: Sequence[Range], device_rates: Sequence[Range]) -> int | None:
    """Return the number of devices, total rate / rate per device; None if several are possible.

    Both rates of a line are rounded, so all lines are used to narrow the quotient.
    """
    quotients = [
        one.divide(part)
        for one, part in zip(total_rates, device_rates, strict=False)
        if part.low > 0
    ]
    if not quotients:
        return None
    low, high = max(one.low for one in quotients), min(one.high for one in quotients)
    return Range(low, high).only_whole_number() if low <= high else None


def _midpoint(number: Range) -> float:
    return (number.low + number.high) / 2


def _read_abbreviated(pattern: str, lines: Iterable[str]) -> list[Range]:
    """Read numbers in nanotron's abbreviated form, such as 1.05M."""
    compiled = re.compile(pattern)
    matches = [match for line in lines if (match := compiled.search(line))]
    found = [(parse_number(match[1]), match[2]) for match in matches]
    return [abbreviation_range(value, suffix) for value, suffix in found if value is not None]
