"""Published rows as questions to the planner: an outline, plans, a machine, and the measurements.

Only what a row states determines these: its framework, sharding, recomputation, precision,
attention, GPU and network. What a framework does regardless of the row is in
published_frameworks.py, with sources. Nothing about a row, a table or a source here was adjusted to
its figures.
"""

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from published_frameworks import Framework, find_framework
from published_models import (
    find_model,
    megatron_tests,
    padded_vocabulary,
    stated_outline,
)
from published_recipes import (
    recipe_outline,
    recipe_recomputation,
    recipe_stack,
    virtual_stages,
)

from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.stacks import Casts, SoftwareStack
from outpace.planner.calibration.cluster import of_catalog
from outpace.planner.hardware.networks import read_network
from outpace.planner.memory.framework_traits import FrameworkTraits
from outpace.planner.model.outline_flops import forward_flops
from outpace.planner.plan_columns import OPTIMIZERS, PRECISIONS, PlanBatch, of_plans
from outpace.planner.step_time.adapters import WIDENED, Adapters, Target
from outpace.planner.step_time.layer import Kernel
from outpace.planner.step_time.setup import StepTimeQuestion
from outpace.records.errors import BadInputError
from outpace.records.hardware import Accelerator, Node
from outpace.records.network import Network
from outpace.records.outline import Outline
from outpace.records.plan import Plan

_DATA = Path(__file__).parent / "data"
PUBLISHED = _DATA / "published.csv"
ALL = (PUBLISHED, *(_DATA / f"published-{number}.csv" for number in (2, 3, 4)))
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_VIRTUAL = (1, 2, 3, 4, 6, 8)
_GPT2_VOCAB, _BERT_VOCAB = 50257, 30522


class UnstatedError(Exception):
    """Something that a row does not state, or that a plan cannot express: no prediction."""


# Chips of the catalog by rows' names; a row's gpu_mem_gb decides between variants.
_CHIPS: Mapping[str, str] = {
    "A100": "A100 SXM 80 GB", "A100-80GB": "A100 SXM 80 GB", "A100-40GB": "A100 SXM 40 GB",
    "A100-SXM4-40GB": "A100 SXM 40 GB", "A800-80GB": "A800 SXM 80 GB",
    "H800-80GB": "H800 SXM",
    "H100": "H100 SXM", "H100-80GB": "H100 SXM", "H200": "H200 SXM",
    "H100-96GB HBM2e 500W": "H100 SXM 96 GB 500 W",
    "H100-95GB HBM2e low-TDP": "H100 SXM 96 GB 500 W",
}  # fmt: skip
# Racks whose 72 GPUs are one NVLink domain, and how many of them a job uses whose size is not a
# multiple of 72: "segments" of 16 trays (NVIDIA DGX GB200 user guide, topology-aware scheduling).
_RACKS = ("GB200", "GB300")
_RACK, _SEGMENT = 72, 64
# "8x200Gb HDR IB/node", "inter-node 800 Gbps/node", "4x Omni-Path (100Gb) per node",
# "4x100Gb RoCE/node", "NVLink + 400 Gbps/GPU RDMA", "8x ConnectX-7 IB NDR 400Gb/s".
_NETWORKS = (
    (re.compile(r"(\d+)x\d+Gb (HDR|NDR|EDR) IB/node"), "{0} x InfiniBand {1}"),
    (re.compile(r"(\d+) ?x ?ConnectX-[78] IB (NDR|XDR|HDR)"), "{0} x InfiniBand {1}"),
    (re.compile(r"(\d+)x Omni-Path \(100Gb\) per node"), "{0} x Omni-Path 100"),
    (re.compile(r"(\d+)x(\d+)Gb RoCE/node"), "{0} x Ethernet {1}"),
    (re.compile(r"(\d+)x (\d+)Gbe Ethernet"), "{0} x Ethernet {1}"),
)
_PER_NODE = re.compile(r"inter-node (\d+) Gbps/node")
_PER_GPU = re.compile(r"(\d+) Gbps/GPU")
_TRAINED_WHOLE = re.compile(r"^$|pre-?training|pretrain|sft|full", re.IGNORECASE)
_RANK = re.compile(r"(?:Q-?)?LoRA (?:nf4 )?r(\d+) ")
_PEFT = re.compile(r"LORA lora/\S+-rank(\d+)$")
# Number of a weight's adapters: three for queries, keys and values. For fms-acceleration's on GPTQ,
# scripts/benchmarks/scenarios.yaml names the same four projections as for the others.
_ONE = Target(1)
_TARGETS: Sequence[tuple[str, Mapping[str, Target]]] = (
    ("q,k,v,o", {"qkv": Target(3), "out": _ONE}),
    ("on GPTQ", {"qkv": Target(3), "out": _ONE}),
    ("attention qkv and proj", {"qkv": _ONE, "out": _ONE}),
    ("c_attn, c_proj, w1, w2", {"qkv": _ONE, "out": _ONE, "up": Target(2), "down": _ONE}),
    ("q,v,o and MLP", {"qkv": Target(2), "out": _ONE, "up": Target(2), "down": _ONE}),
    ("all linear", {"qkv": Target(3), "out": _ONE, "up": Target(2), "down": _ONE}),
)
# BLOOM's trials "always hang" on 320 GPUs and more without CUDA_LAUNCH_BLOCKING=1, which they used
# from then on (bigscience 053adafe, train/tr11-176B-ml/chronicles-prequel.md, "dealing with JZ
# hanging on the large model").
_BLOCKING, _BLOCKING_GPUS = "bloom-prequel", 320


@dataclass(frozen=True)
class Row:
    """A line of the file."""

    values: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def number(self, name: str) -> int:
        """Return a number. Raises UnstatedError if it is not stated."""
        text = self.values[name]
        if not text:
            raise UnstatedError(f"{name} is not stated")
        try:
            return int(float(text))
        except ValueError:
            raise UnstatedError(f"{name} is not a number: {text}") from None

    def optional(self, name: str, default: int) -> int:
        return int(float(self.values[name])) if self.values[name] else default

    @property
    def source(self) -> str:
        return self.values["source_key"]

    @property
    def id(self) -> str:
        return self.values["row_id"]

    @property
    def framework(self) -> Framework:
        named = self.values["framework"]
        found = find_framework(named, self.source)
        if found is None:
            raise UnstatedError(f"framework {named!r} is not described")
        return found

    @property
    def same(self) -> tuple[str, ...]:
        """Return a key of rows that differ only in their layout."""
        return tuple(
            self.values[name]
            for name in ("layers", "hidden", "heads", "seq", "n_gpus", "global_batch")
        )

    @property
    def layouts(self) -> tuple[str, ...]:
        """Return a key of a source's rows that differ only in their layout."""
        names = ("model", "gpu", "precision", "compile", "task", "attention")
        return (self.source, *self.same, *(self.values[name] for name in names))

    @cached_property
    def measured_s(self) -> float | None:
        """Return the seconds of a step, as published or calculated from published figures."""
        v = self.values
        if v["step_time_s"]:
            return float(v["step_time_s"])
        if v["tokens_per_s_per_gpu"]:
            tokens = step_samples(self) * self.number("seq")
            return tokens / float(v["tokens_per_s_per_gpu"]) / self.number("n_gpus")
        if v["derived_step_time_s"]:
            return float(v["derived_step_time_s"])
        if v["mfu_pct"] and self.framework.stack == "nanotron":
            # Of 989 TFLOP/s, attention in full (nanotron v0.5, models/llama.py, get_flops).
            flops = 3 * forward_flops(outline(self), self.number("seq"), step_samples(self))
            return flops / (float(v["mfu_pct"]) / 100 * 989e12) / self.number("n_gpus")
        if v["tflops_per_gpu"]:
            return (
                published_flops(self) / (float(v["tflops_per_gpu"]) * 1e12) / self.number("n_gpus")
            )
        return None

    @property
    def measured_bytes(self) -> float | None:
        v = self.values
        if not v["peak_mem"]:
            return None
        return float(v["peak_mem"]) * {"GiB": 2**30, "GB": 1e9, "MiB": 2**20}[v["peak_mem_unit"]]


def rows(*paths: Path) -> list[Row]:
    """Return all rows of some files; by default, those with which the planner was developed."""
    found = []
    for path in paths or (PUBLISHED,):
        with path.open(encoding="utf-8", newline="") as file:
            found += [Row(line) for line in csv.DictReader(file)]
    return found


def published_flops(row: Row) -> float:
    """Return a step's FLOPs by the formula with which a row's TFLOP/s were published.

    Megatron-Core counts the matmuls of the experts that a token goes through, and half of the
    scores (megatron/training/training.py, num_floating_point_operations: core_attn_flops / 2).
    """
    if row.framework.memory == "megatron" and outline(row).experts:
        model, length, samples = outline(row), row.number("seq"), row.number("global_batch")
        matmuls = forward_flops(model, length, samples, attention=False)
        return 3.0 * (matmuls + forward_flops(model, length, samples)) / 2
    layers, hidden, length = row.number("layers"), row.number("hidden"), row.number("seq")
    vocab = padded(row)
    tokens = row.number("global_batch") * length
    if "96BsLh^2" in row["tflops_kind"]:  # arXiv 2104.04473, eq. 3
        return 96.0 * tokens * layers * hidden**2 * (
            1 + length / (6 * hidden) + vocab / (16 * layers * hidden)
        )  # fmt: skip
    width = row.optional("ffn", 4 * hidden)
    matmuls = 4 * hidden**2 + 2 * hidden * width + 2 * length * hidden
    return 6.0 * tokens * (layers * matmuls + hidden * vocab)


def least_s(row: Row, question: StepTimeQuestion) -> float:
    """Return the seconds of a row's matmuls alone at peak rate: two passes for frozen weights."""
    peak = question.device.peak_flops_per_s
    rate = peak.get("fp8", peak["bf16"]) if eight(row) else peak["bf16"]
    passes = 3 if question.adapters is None else 2
    flops = forward_flops(question.outline, question.seq_len, step_samples(row), attention=False)
    return passes * flops / rate / row.number("n_gpus")


def padded(row: Row) -> int:
    """Return the vocabulary: as stated, or that of the framework's default tokenizer."""
    own = _BERT_VOCAB if row["arch"] == "bert" else _GPT2_VOCAB
    thousands = re.fullmatch(r"(\d+)k", row["vocab"])
    vocab = int(thousands[1]) * 1000 if thousands else row.optional("vocab", own)
    if row["vocab"] and vocab not in (_GPT2_VOCAB, _BERT_VOCAB) and not thousands:
        return vocab
    tp = row.optional("tp", 1)
    if row.framework.drops_rows:
        return vocab // tp * tp
    return padded_vocabulary(vocab, row.framework.padding * tp)


def outline(row: Row) -> Outline:
    """Return a model's outline. Raises UnstatedError unless dimensions are stated or known."""
    if not row["hidden"]:
        found = find_model(row["model"])
        if found is None:
            raise UnstatedError(f"the dimensions of {row['model'] or 'the model'} are not stated")
        return recipe_outline(found) if row.framework.recipes else found
    row.number("layers")
    try:
        return stated_outline(
            row.values, padded(row), row.number("seq"), dropout=_drops(row),
            gpt_positions="ALiBi" not in row["arch"],
        )  # fmt: skip
    except ValueError as error:
        raise UnstatedError(str(error)) from None


def _drops(row: Row) -> bool:
    """Return whether blocks have dropout: as stated, or as the framework has by default."""
    stated = re.search(r"(no )?dropout", row["notes"])
    return row.framework.dropout if stated is None else stated[1] is None


def chip(row: Row) -> Accelerator:
    """Return the row's chip. Raises UnstatedError."""
    name = _CHIPS.get(row["gpu"], row["gpu"])
    if name not in ACCELERATORS:
        raise UnstatedError(f"GPU {row['gpu']!r} is not in the catalog")
    return ACCELERATORS[name]


def node(row: Row) -> Node:
    """Return a machine with the row's chips, each with the links with which it is sold."""
    found = chip(row)
    alone = found.device_link is None or found.device_link.link.startswith("PCIe")
    return Node(
        name=row["gpu"], accelerator=found.name, devices=_per_node(row),
        topology="none" if alone else "switch", device_link=found.device_link,
        host_link=found.host_link, source=row["source"],
    )  # fmt: skip


def _per_node(row: Row) -> int:
    """Return the number of devices that NVLink connects."""
    if row["gpu"] in _RACKS:
        whole = row.optional("n_gpus", 1) % _RACK == 0
        return _RACK if whole else _SEGMENT
    return row.optional("gpus_per_node", 8)


def network(row: Row, devices: int) -> Network | None:
    """Return all network cards of a node, or of a rack's domain; None if the row states none."""
    said = row["interconnect"]
    for pattern, name in _NETWORKS:
        found = pattern.search(said)
        if found:
            count = int(found[1])
            # MLPerf's cards are those of a host; a rack's domain has one for every four GPUs.
            count *= max(1, devices // row.optional("gpus_per_node", devices)) if (
                row["gpu"] in _RACKS and row["gpus_per_node"].isdecimal()
            ) else 1  # fmt: skip
            return read_network(name.format(count, found[2]) if "{1}" in name
                                else name.format(count))  # fmt: skip
    rate, each = _PER_NODE.search(said), _PER_GPU.search(said)
    if rate:  # such rates are of HDR cards, 200 Gbit/s each (arXiv 2312.12391, §5)
        return read_network(f"{int(rate[1]) // 200} x InfiniBand HDR")
    if each:
        return read_network(f"{devices} x InfiniBand {_GENERATIONS[int(each[1])]}")
    return None


_GENERATIONS = {100: "EDR", 200: "HDR", 400: "NDR", 800: "XDR"}


def question(row: Row) -> StepTimeQuestion:
    """Return the row's model, machine and network; the catalog's network if none is stated."""
    each = node(row)
    nodes = math.ceil(row.optional("n_gpus", 1) / each.processes)
    cluster = of_catalog(each, max(nodes, 2), network(row, each.devices))
    return StepTimeQuestion(
        outline(row), row.number("seq"), cluster.device, cluster.fabric, kernel(row),
        other_program=True, stack=software(row), adapters=adapters(row), uneven=routes_by_data(row),
    )  # fmt: skip


def routes_by_data(row: Row) -> bool:
    """Return whether a trained router distributes tokens, so that loads are uneven.

    A row may state this; fms-acceleration and others fine-tune pretrained models. Megatron's
    benchmarks force balanced loads.
    """
    return "real routing" in row["notes"] or row.framework.stack == "Trainer"


def adapters(row: Row) -> Adapters | None:
    """Return the trained adapters of a row; None if everything is trained. Raises UnstatedError."""
    task = row["task"]
    if _TRAINED_WHOLE.search(task):
        return None
    stated, named = _RANK.match(task), _PEFT.match(task)
    found = stated or named
    if found is None or "trained embedding" in task:
        raise UnstatedError("adapters of another kind than LoRA, or of a rank that is not stated")
    targets = next((on for words, on in _TARGETS if words in task), None)
    if named:  # peft's default for Llama: q_proj and v_proj
        heads, keys = row.number("heads"), row.number("kv_heads")
        targets = {"qkv": Target(2, (heads + keys) / (heads + 2 * keys))}
    if targets is None:
        raise UnstatedError("what adapters are on is not stated")
    low = f"{task} {row['precision']}".casefold()
    four = "nf4" in low or "4-bit" in low or "int4" in low
    # There is one 16-bit scale for every 64 or 128 weights.
    packed = 0.5 + 2 / 64 if four else None
    # Qwen's finetune.py sets disable_exllama, for which transformers uses AutoGPTQ's operators;
    # fms-acceleration's plugins have Triton kernels.
    eager = "GPTQ" in row["precision"] and "accelerated-peft" not in row["framework"]
    return Adapters(
        int(found[1]), targets, packed, kept=_kept_adapters(row), unpacks_by_operators=eager,
        widened=_widened(row), copies_results="bnb" in row["precision"],
    )  # fmt: skip


def _widened(row: Row) -> Mapping[str, int]:
    """Return the matmuls with packed weights whose inputs are in fp32 (`adapters.WIDENED`).

    trl prepares a model for that on a single device. Layer norms also return fp32 under autocast;
    gpt_bigcode has a single matrix for queries, keys and values, and no gates.
    """
    if "bnb" not in row["precision"] or "autocast" not in row["precision"]:
        return {}
    if outline(row).stacks[0].norm_bias:
        return dict.fromkeys(WIDENED, 1)
    alone = row.optional("n_gpus", 1) == 1
    return WIDENED if alone and "baseline-peft-bnb" in row["framework"] else {}


def _kept_adapters(row: Row) -> Literal["low", "cast", "fp32"]:
    """Return the dtypes in which PEFT keeps adapters next to a 16-bit base, and multiplies them.

    They are fp32 since 0.12 of July 2024 (autocast_adapter_dtype), which trl 0.13 followed; inputs
    are first cast to that (except those of packed weights under autocast: peft/tuners/lora/bnb.py,
    Linear4bit). Without autocast, matmuls are in fp32 too (scripts/benchmarks/scenarios.yaml of
    fms-acceleration, standard-peft: torch_dtype bfloat16 and no bf16; PEFT's method_comparison:
    use_amp false).
    """
    said = row["precision"]
    if "adapters in fp32" in said:
        return "fp32"
    packed = "gptq" in said.casefold() or "nf4" in said
    if "trl 0.13" not in row["framework"] or packed:
        return "low"
    return "fp32" if "pure" in said else "cast"


def software(row: Row) -> SoftwareStack:
    """Return the traits of the software that trained a row, as the row or its recipe sets them."""
    found = _as_noted(row, row.framework.software)
    if row.framework.engine:
        found = found.model_copy(update={"casts": engine_casts(row)})
    if row.framework.recipes:
        # Experts that drop tokens have room for a fixed number.
        found = found.model_copy(update={"pads_tokens": "tokendrop" not in row["model"]})
        return recipe_stack(found, outline(row), row["source"], row["gpu"], row["precision"])
    if row.source == "moe-modelzoo":
        return found.model_copy(update=_modelzoo_traits(row))
    if row.source == _BLOCKING and row.number("n_gpus") >= _BLOCKING_GPUS:
        return found.model_copy(update={"blocks_launches": True, "overlaps": False})
    if "CUDA graphs" in row["notes"]:  # NVIDIA's recipes of MLPerf: LAYER_CUDA_GRAPH
        return found.model_copy(update={"graphs": "step"})
    # llm-foundry's older tables used torch 1.13 (sweep.sh before b2a43a1472), and checkpoints of
    # transformers 4 are reentrant: all of a block is recomputed.
    older = row.source == "llm-foundry" and "MP PURE" in row["precision"]
    if older or row.framework.stack == "Trainer":
        found = found.model_copy(update={"stops_early": False})
    if row.framework.stack in ("torchtitan", "TRL"):
        found = _as_published(row, found)
    # transformers 4.4x, with fms-acceleration's Triton experts instead of its loop, and unsloth's
    # kernels: norms, rotations, activations, the loss.
    changes: dict[str, object] = {"wraps_adapters": "FSDP1" in row["framework"]}
    if "trl 0.13" in row["framework"]:
        changes["experts"] = "triton" if "scattermoe" in row["framework"] else "loop"
    if "foak" in row["framework"]:
        changes["elementwise"] = "fused"
    return found.model_copy(update=changes)


def _as_noted(row: Row, found: SoftwareStack) -> SoftwareStack:
    """Return a program's traits with what a row's notes state.

    AutoModel computes models with experts by Transformer Engine, others by transformers' modules.
    """
    changes: dict[str, object] = {}
    if "no overlap" in row["notes"]:
        changes["overlaps"] = False
    if "DeepEP" in row["notes"]:
        changes["dispatcher"] = "deepep"
    if row.framework.stack == "AutoModel" and outline(row).experts:
        changes["elementwise"] = "fused"
    return found.model_copy(update=changes)


def _modelzoo_traits(row: Row) -> dict[str, object]:
    """Return the traits of Megatron-MoE-ModelZoo's rows, on racks those of its commands.

    There (e865051, best_practice/qwen3/readme.md), HybridEP sends tokens. Except with 131,072
    tokens, attention and routers are CUDA graphs, and MXFP8 has A2A_OVERLAP=1.
    """
    if row["gpu"] not in _RACKS:
        return {"dispatcher": "deepep"} if "DeepEP" in row["framework"] else {}
    short, eight = row.number("seq") == 4096, row["precision"] == "MXFP8"
    return {
        "dispatcher": "deepep", "graphs": "blocks" if short else "none",
        "overlaps_dispatch": short and eight,
    }  # fmt: skip


def _as_published(row: Row, newest: SoftwareStack) -> SoftwareStack:
    """Return the traits of torchtitan at the time of its tables, or of accelerate by default.

    accelerate gathers keys and values by default (PARALLELISM_CONFIG_CP_COMM_STRATEGY). torchtitan:
    until 2025-08-29 checkpoints stopped early, and 8-bit matmuls (aten._scaled_mm) were not in the
    list of what selective recomputation saves (9dec370, parallelize_llama.py); until 2026-01
    (ff0829c10) keys and values were repeated. float8.md launches training with 8-bit gathers of
    shards, which one scale per tensor allows, as the preset of 405B says (train_configs,
    3faaa1a0d).
    """
    if row.framework.stack == "TRL":
        return newest.model_copy(update={"gathers_keys": True})
    said = row["precision"].casefold()
    rows_apart = "rowwise" in said  # whose scales need whole rows, so that 16 bits are sent
    whole = ("float8" in said or "tensorwise" in said) and not rows_apart
    return newest.model_copy(
        update={
            "stops_early": True, "repeats_keys": True,
            "repeats_matmuls": "all" if eight(row) else newest.repeats_matmuls,
            "shards_fp8": whole and row.optional("dp", 1) > 1,
            "gathers_fp8": newest.gathers_fp8 and not rows_apart,
        }
    )  # fmt: skip


def engine_casts(row: Row) -> Casts:
    """Return how Transformer Engine casts operands, by the recipe that a row names.

    Without a recipe, it is delayed scaling: the default of Megatron-Core (--fp8-recipe), and the
    only recipe before Transformer Engine 2.0.
    """
    said = row["precision"].casefold()
    # Numbers in parentheses in Megatron-Bridge's tables are numbers of blocks, by the note below
    # them.
    if any(word in said for word in ("mx", "blockwise", "granularity")):
        return "blocks"
    current = any(word in said for word in ("fp8-cs", "current", "tensorwise"))
    # "FP8" in Megatron-Bridge's tables is its recipe fp8_cs, except where they say FP8-MX.
    return "current" if current or row.framework.recipes else "delayed"


def kernel(row: Row) -> Kernel:
    """Return the attention kernel: as stated, as configured in Megatron's test, or the framework's.

    Megatron's own attention, without Transformer Engine, writes scores.
    """
    stated = row["attention"]
    own = row.framework.kernel
    if stated.startswith("unfused"):
        return "unfused"
    # PyTorch prefers cuDNN's attention to FlashAttention-2 only since 2.10 (aten/src/ATen/native/
    # transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention).
    if stated in ("SDPA flash", "flash-attn 2", "flash2"):
        return "flash2"
    if stated:
        return "fused" if own == "unfused" else own
    test = megatron_tests().get(row["model"])
    if test is None or not row["framework"].startswith("Megatron-LM CI"):
        return own
    local = test["transformer_impl"] == "local" or test["attention_backend"] == "unfused"
    return "unfused" if local else own


def precision(row: Row) -> dict[str, Any]:
    """Return the precision that the row states, in the terms of a plan.

    Megatron's 16-bit training, of either kind, has 16-bit weights and fp32 masters
    (megatron/core/optimizer/optimizer.py: Float16OptimizerWithFloat16Params), which is fp16-master
    here; bf16 would be fp32 weights, cast at their use. For fp8, `columns` sets the matmuls.
    """
    said = row["precision"].casefold()
    if not row.framework.masters and not _TRAINED_WHOLE.search(row["task"]):
        return {"precision": "bf16-pure", "optimizer": "adamw-bf16"}  # frozen weights in 16 bits
    if "nvfp4" in said or "int8" in said:
        kind = "nvfp4" if "nvfp4" in said else "int8"
        raise UnstatedError(f"the planner does not support {kind} matmuls")
    if row.framework.masters and ("16" in said or eight(row)):
        return {"precision": "fp16-master"}
    if "pure" in said:  # FSDP's MixedPrecision with gradients summed in bf16
        return {"precision": "bf16-pure", "optimizer": "adamw-bf16"}
    low = "bf16" in said or "bfloat16" in said or eight(row)
    return {"precision": "bf16" if low else "fp16" if "16" in said else "fp32"}


def eight(row: Row) -> bool:
    """Return whether matmuls are in 8 bits, with any scales."""
    said = row["precision"].casefold()
    return "fp8" in said or "float8" in said


def columns(row: Row, found: Sequence[Plan], layers: int, *, times: bool) -> PlanBatch:
    """Return the plans as columns; `times` adds 8-bit matmuls and another trainer's fused AdamW.

    A plan of outpace refuses 8 bits with tensor parallelism, which others support; in memory, they
    keep the same as with 16 bits.
    """
    try:
        all_of = of_plans(found, step_samples(row), layers)
    except BadInputError as error:
        raise UnstatedError(str(error)) from None
    stated = megatron_tests().get(row["model"], {}).get("etp") or _stated_number(row, "etp")
    if row.framework.whole_experts or stated:
        all_of = replace(all_of, etp=np.full_like(all_of.etp, int(stated or 1)))
    if not times:
        return all_of
    # Other trainers' AdamW differs from outpace's for pure precision, which processes one tensor
    # after another.
    fused = np.full_like(all_of.optimizer, OPTIMIZERS.index("adamw-fused"))
    all_of = replace(all_of, optimizer=fused)
    if eight(row):
        low = np.full_like(all_of.precision, PRECISIONS.index("fp8"))
        # As in compiled code, whose casts are separate kernels.
        tight = all_of.compile | row.framework.engine
        tight = tight | (row.framework.compiles_eight and not row["compile"])
        all_of = replace(all_of, precision=low, compile=tight)
    return all_of


def _stated_number(row: Row, name: str) -> str:
    """Return the number after a name in a row's notes; "" if there is none."""
    found = re.search(rf"\b{name} (\d+)", row["notes"])
    return found[1] if found else ""


def traits(row: Row) -> FrameworkTraits:
    """Return the framework's traits of memory use."""
    found = row.framework.traits(row["precision"], zero_level(row))
    return replace(found, repeats_matmuls=software(row).repeats_matmuls)


def plans(row: Row) -> list[Plan]:
    """Return one plan, or all that a row allows; the planner's best of these is used."""
    try:
        if row.framework.pipelines:
            found = [plan for plan in _products(row) if plan is not None]
        else:
            found = [_sharded(row)]
    except BadInputError as error:
        raise UnstatedError(str(error)) from None
    samples = step_samples(row)
    found = [p for p in found if samples % (p.samples_per_pass * p.data_parallel) == 0]
    if not found:
        raise UnstatedError("micro-batch and ranks do not divide the stated global batch")
    return found


def step_samples(row: Row) -> int:
    """Return the samples per step; if accumulation is stated, as many as it implies.

    llm-foundry's batches are not always a multiple of the micro-batch stated with them; its figures
    are per token.
    """
    if row["grad_accum"] and row["micro_batch"] and row["dp"]:
        return row.number("micro_batch") * row.number("grad_accum") * row.number("dp")
    return row.number("global_batch")


_ZERO = (
    (re.compile(r"zero3|fsdp(?!\w*1)"), 3), (re.compile(r"zero2"), 2), (re.compile(r"zero1"), 1),
)  # fmt: skip
_OVER = re.compile(r"zero\d over (\d+)|megatron-fsdp (\d+)")


def zero_level(row: Row) -> int:
    """Return the ZeRO level, from what a row states about sharding."""
    said = row["sharding"]
    return next((level for pattern, level in _ZERO if pattern.search(said)), 0)


def _sharded(row: Row) -> Plan:
    ranks = row.optional("dp", row.optional("n_gpus", 1))
    level = zero_level(row)
    if level == 2 and "DeepSpeed" in row["framework"]:  # whose weights are then whole
        level = 1
    strategy = f"zero{level}" if level else "ddp" if row["sharding"] == "none" else "single"
    axis = "dp_replicate" if strategy == "ddp" else "dp_shard"
    # Ranks that share experts gather only the rest (fms-acceleration's plugin for scattermoe).
    shared: dict[str, Any] = {}
    if row.optional("ep", 1) > 1:
        strategy, shared = "3d", {"zero": level, "ep": row.number("ep")}
    over = _OVER.search(row["sharding"])
    if over and int(over[1] or over[2]) < ranks:  # and copies of these shards
        strategy, shared = "3d", {"zero": level, "dp_replicate": ranks // int(over[1] or over[2])}
        ranks = int(over[1] or over[2])
    return Plan.parse(
        {
            "strategy": strategy if ranks > 1 else "single",
            axis: ranks if ranks > 1 else 1,
            **shared,
            "micro_batch": row.number("micro_batch"),
            "compile": row["compile"] == "True",
            **checkpointing(_recomputation(row["recompute"])[0]),
            **precision(row),
        },
        "row",
    )


def checkpointing(mode: str) -> dict[str, Any]:
    """Return the options of a plan for a mode of recomputation."""
    if mode == "every second":
        return {"checkpointing": "full", "checkpoint_every": 2}
    return {"checkpointing": mode}


def _products(row: Row) -> Iterator[Plan | None]:
    """Yield plans with the stated axes, for each value of the settings left open."""
    tp, pp, cp, dp = _axes(row)
    said, share = row["recompute"], row.number("global_batch") // dp
    stated = row.optional("micro_batch", 0)
    loops = _virtual(row, pp)
    sizes = (stated,) if stated else _micro_batches(row, share, pp)
    modes = _recomputation(said)
    if not said and row.framework.recipes:
        modes = (recipe_recomputation(outline(row), row["source"], row["gpu"], row["precision"]),)
    elif not said and row.framework.whole_experts:  # whose settings name modules, not whole blocks
        modes = ("none", "selective", "attention", "full")
    for size in sizes:
        for mode in modes:
            for count in loops:
                yield _product(row, (tp, pp, cp, dp), size, share, mode, count)


def _micro_batches(row: Row, share: int, pp: int) -> Sequence[int]:
    """Return the micro-batches to try for a rank's `share` of samples.

    torchtitan has as many micro-batches as a pipeline has ranks, by default (pytorch/torchtitan
    9dec370, parallelisms/pipelining_utils.py, build_pipeline_schedule; since 2025-01-07, 90567fc98,
    as many as stages).
    """
    if row.framework.stack == "torchtitan" and pp > 1:
        return (share // pp,) if share % pp == 0 else ()
    return tuple(n for n in _MICRO_BATCHES if share % n == 0)


def _axes(row: Row) -> tuple[int, int, int, int]:
    """Return tensor, pipeline, context and data-parallel degrees. Raises UnstatedError."""
    if not (row["tp"] or row["pp"] or row["dp"]):
        raise UnstatedError("the layout is not stated")
    tp, pp, cp = (row.optional(name, 1) for name in ("tp", "pp", "cp"))
    dp = row.optional("dp", row.number("n_gpus") // (tp * pp * cp))
    if row["n_gpus"] and tp * pp * cp * dp != row.number("n_gpus"):
        raise UnstatedError("the stated layout does not match the stated number of devices")
    return tp, pp, cp, dp


def _recomputation(said: str) -> tuple[str, ...]:
    """Return modes; selective-attention (arXiv 2205.05198) recomputes scores and their softmax."""
    if not said:
        return ("none", "full")
    if said.startswith("full"):
        return ("full",)
    if said.startswith("selective-layer"):  # torchtitan: every second block
        return ("every second",)
    nothing = said in ("none", "selective:[]") or said.startswith(
        ("selective:core_attn", "not stated")
    )
    if nothing or "selective-attention" in said:
        return ("none",)
    # Megatron's module names: an MLP or experts as a whole are more than the mode without matmuls.
    modules = set(re.findall(r"[a-z_]+", said)) - {"selective"}
    return ("attention",) if modules & {"moe", "mlp"} else ("selective",)


def keeps_scores(row: Row) -> bool:
    """Return whether attention's scores are kept: written, and not recomputed."""
    return kernel(row) == "unfused" and "selective-attention" not in row["recompute"]


def _virtual(row: Row, pp: int) -> Sequence[int]:
    layers, said = outline(row).layers, row["vpp"]
    if pp == 1:
        return (1,)
    if "layers/vstage" in said:
        return (layers // pp // int(said.split()[0]),)
    if said:
        return (int(float(said)),)
    if row.framework.stack == "torchtitan":  # generate_split_points in the file above
        return (2,) if "interleaved" in row["precision"] else (1,)
    if row["micro_batch"]:
        return (virtual_stages(row.source, outline(row)) or 1,)
    return tuple(n for n in _VIRTUAL if layers % (pp * n) == 0)


def _product(
    row: Row, axes: tuple[int, int, int, int], size: int, share: int, mode: str, loops: int
) -> Plan | None:
    tp, pp, cp, dp = axes
    parts = share // size
    zero = zero_level(row)
    ep = row.optional("ep", 1)
    values: dict[str, Any] = {
        "strategy": "3d", "tp": tp, "pp": pp, "cp": cp, "ep": ep, "micro_batch": size,
        "stage_split": "even", "bucket_mib": row.framework.bucket_mib,
        "sequence_parallel": _sequence_parallel(row),
        "async_tp": _overlaps_tensor(row),
        "compile": row["compile"] == "True",
        "offload_activations": "cpu" if "activations offloaded" in row["recompute"] else "none",
        **checkpointing(mode), **precision(row),
    }  # fmt: skip
    over = _OVER.search(row["sharding"])
    shard = int(over[1] or over[2]) if over else dp
    if zero and dp > 1:
        values |= {"dp_shard": shard, "dp_replicate": dp // shard, "zero": zero if shard > 1 else 3}
    else:
        values |= {"dp_replicate": dp}
    if pp > 1:
        schedule = "interleaved" if loops > 1 else "1f1b" if parts >= pp else "gpipe"
        if schedule == "interleaved" and parts % pp:
            return None
        # Some programs run a pipeline for each local batch, and add up these batches' gradients.
        local = int(_stated_number(row, "local batch") or share) // size
        values |= {"pp_microbatches": min(parts, local), "pp_schedule": schedule}
        values |= {"virtual_stages": loops} if loops > 1 else {}
    return Plan.parse(values, "row")


def _overlaps_tensor(row: Row) -> bool:
    """Return whether tensor parallelism's collectives overlap with its matmuls.

    NVIDIA's recipes of MLPerf have TP_COMM_OVERLAP=True, those of Megatron-Bridge
    CommOverlapConfig(tp_comm_overlap=True).
    """
    said = ("tp-comm-overlap on", "TP communication overlapped")
    stated = any(words in row["notes"] for words in said)
    stated = stated or "async" in row["precision"].casefold()
    return stated or (row.framework.recipes and row.optional("tp", 1) > 1)


def _sequence_parallel(row: Row) -> bool:
    """Return whether a row states sequence parallelism; overlap needs it (Megatron-LM's arguments).

    torchtitan, nanotron and the recipes of Megatron-Bridge and NeMo use it wherever they use tensor
    parallelism.
    """
    said = "sequence parallel" in f"{row['recompute']} {row['notes']}"
    said = said or "tp-comm-overlap on" in row["notes"]
    return said or row.framework.stack in ("torchtitan", "nanotron", "Megatron-Bridge", "NeMo")
