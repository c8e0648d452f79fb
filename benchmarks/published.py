"""Published rows as questions to the planner: an outline, plans, a machine, and what was measured.

Only what a row states decides: its framework, sharding, recomputation, precision, attention, GPU
and network. What a framework does whatever the row is stands in FRAMEWORKS, with where that is
said. There is nothing of a row, a table or a source here that was adjusted to its figures.
"""

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from outpace.catalog.accelerators import ACCELERATORS
from outpace.planner.habits import MEGATRON_BF16, MEGATRON_FP16, OUTPACE, Habits
from outpace.planner.layers import Kernel
from outpace.planner.machines import of_catalog
from outpace.planner.networks import read_network
from outpace.planner.step_setup import Question
from outpace.records.errors import BadInputError
from outpace.records.hardware import Accelerator, Node
from outpace.records.outline import AttentionShape, Mlp, Outline, ProductShape, Stack
from outpace.records.plan import Plan

PUBLISHED = Path(__file__).parent / "data" / "published.csv"
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_VIRTUAL = (1, 2, 3, 4, 6, 8)
_GPT2_VOCAB, _BERT_VOCAB = 50257, 30522
_ONE_BUCKET_MIB = 10**6
_HEAD = 128  # width of a head where their number is not said


class UnstatedError(Exception):
    """What a row does not say, or a plan cannot: why it is not predicted."""


@dataclass(frozen=True)
class Framework:
    """What a program does, whatever it is asked.

    `kernel` is of attention where a row does not say. `bucket_mib` of gradients. `padding`: the
    vocabulary is filled up to a multiple of this times tp. `pipelines`: it has axes of its own, and
    stages of equal numbers of blocks. `masters`: 16-bit weights have fp32 masters. `megatron`: it
    holds in memory what Megatron-LM does (outpace/planner/habits.py).
    """

    source: str
    kernel: Kernel
    dropout: bool
    bucket_mib: int = 25
    padding: int = 1
    pipelines: bool = True
    masters: bool = True
    megatron: bool = False


_PADDED = "vocabulary padded to a multiple of 128 × tp: --make-vocab-size-divisible-by"
FRAMEWORKS: Mapping[str, Framework] = {
    "Megatron-DeepSpeed": Framework(
        "VIA-Research/vTrain f8dda8473a: src/model/gpt_modeling.py (scores written, fused softmax, "
        "dropout), src/config.py (vocab_size 50257, cut by tp as it is), config/validation "
        "(use_gradient_bucket false: one exchange after the backward)",
        kernel="unfused", dropout=True, bucket_mib=_ONE_BUCKET_MIB,
    ),
    "Megatron-LM 2021": Framework(
        "arXiv 2104.04473 and Megatron-LM's local DDP: one exchange after the backward; written "
        f"scores, dropout; {_PADDED}",
        kernel="unfused", dropout=True, bucket_mib=_ONE_BUCKET_MIB, padding=128, megatron=True,
    ),
    "Megatron-LM 2022": Framework(
        "arXiv 2205.05198, §4 and §6: as Megatron-LM 2021; with selective recomputation sequence "
        "parallelism",
        kernel="unfused", dropout=True, bucket_mib=_ONE_BUCKET_MIB, padding=128, megatron=True,
    ),
    "Megatron-Core r0.8.0": Framework(
        "Megatron-LM core_r0.8.0, README: flash attention, overlap of gradients, parameters and "
        "tensor parallelism; megatron/core/distributed/distributed_data_parallel_config.py: "
        "buckets of 40 million parameters in fp32",
        kernel="fused", dropout=True, bucket_mib=153, padding=128, megatron=True,
    ),
    "Megatron-Core+TE": Framework(
        "Megatron-LM d98e8a64dd, examples/llama: as Megatron-Core, without dropout",
        kernel="fused", dropout=False, bucket_mib=153, padding=1, megatron=True,
    ),
    "Megatron-LM CI": Framework(
        "Megatron-LM d98e8a64dd, tests/functional_tests/test_cases: arguments' defaults (dropout "
        "0.1, fused softmax); BERT with BertWordPieceLowerCase",
        kernel="fused", dropout=True, bucket_mib=153, padding=128, megatron=True,
    ),
    "composer FSDP1": Framework(
        "mosaicml/llm-foundry 12a631913c, scripts/train/benchmarking/submit_benchmarks.py: "
        "attn_impl triton and low_precision_layernorm by default; scripts/train/yamls/pretrain: no "
        "dropout",
        kernel="triton", dropout=False, pipelines=False, masters=False,
    ),
    "litgpt": Framework(
        "Lightning-AI/litgpt 26857050fe, tutorials/resource-tables.md, finetune/lora.py: adapters "
        "of rank 8 on queries and values, behind dropout of 0.05; FSDP with activation "
        "checkpointing, a block to a flat parameter, micro-batches before the last under no_sync",
        kernel="fused", dropout=False, pipelines=False, masters=False,
    ),
    "transformers": Framework(
        "huggingface/transformers 4.3, GPT2Model: written scores, dropout 0.1",
        kernel="unfused", dropout=True, pipelines=False, masters=False,
    ),
}  # fmt: skip

# Whole machines whose chip a row names by its memory.
_CHIPS: Mapping[str, str] = {
    "A100": "A100 SXM 80 GB", "A100-80GB": "A100 SXM 80 GB", "A100-40GB": "A100 SXM 40 GB",
    "A100-SXM4-40GB": "A100 SXM 40 GB", "H100-80GB": "H100 SXM", "GB200": "GB200",
}  # fmt: skip
# "8x200Gb HDR IB/node", "inter-node 800 Gbps/node".
_CARDS = re.compile(r"(\d+)x\d+Gb (HDR|NDR|EDR) IB/node")
_PER_NODE = re.compile(r"inter-node (\d+) Gbps/node")


@dataclass(frozen=True)
class Row:
    """A line of the file."""

    values: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def number(self, name: str) -> int:
        """Raises UnstatedError where it is not said."""
        text = self.values[name]
        if not text:
            raise UnstatedError(f"{name} is not stated")
        return int(float(text))

    def optional(self, name: str, default: int) -> int:
        return int(float(self.values[name])) if self.values[name] else default

    @property
    def source(self) -> str:
        return self.values["source_key"]

    @property
    def framework(self) -> Framework:
        named = self.values["framework"]
        for name, found in FRAMEWORKS.items():
            if named == name or named.startswith(f"{name} "):
                return found
        raise UnstatedError(f"framework {named!r} is not described")

    @property
    def same(self) -> tuple[str, ...]:
        """Of rows that differ in their layout only."""
        return tuple(
            self.values[name]
            for name in ("layers", "hidden", "heads", "seq", "n_gpus", "global_batch")
        )

    @cached_property
    def measured_s(self) -> float | None:
        """Seconds of a step, as published or by arithmetic on what is."""
        v = self.values
        if v["step_time_s"]:
            return float(v["step_time_s"])
        if v["tokens_per_s_per_gpu"]:
            tokens = step_samples(self) * self.number("seq")
            return tokens / float(v["tokens_per_s_per_gpu"]) / self.number("n_gpus")
        if v["derived_step_time_s"]:
            return float(v["derived_step_time_s"])
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


def rows(path: Path = PUBLISHED) -> list[Row]:
    """All of them."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(line) for line in csv.DictReader(file)]


def published_flops(row: Row) -> float:
    """A step's FLOPs by the formula with which a row's TFLOP/s were published."""
    layers, hidden, length = row.number("layers"), row.number("hidden"), row.number("seq")
    vocab = padded(row)
    tokens = row.number("global_batch") * length
    if "96BsLh^2" in row["tflops_kind"]:  # arXiv 2104.04473, eq. 3
        return 96.0 * tokens * layers * hidden**2 * (
            1 + length / (6 * hidden) + vocab / (16 * layers * hidden)
        )  # fmt: skip
    width = row.optional("ffn", 4 * hidden)
    products = 4 * hidden**2 + 2 * hidden * width + 2 * length * hidden
    return 6.0 * tokens * (layers * products + hidden * vocab)


def padded(row: Row) -> int:
    """The vocabulary: as stated, else of the tokenizer that the framework has by default."""
    own = _BERT_VOCAB if row["arch"] == "bert" else _GPT2_VOCAB
    vocab = row.optional("vocab", own)
    if row["vocab"] and vocab not in (_GPT2_VOCAB, _BERT_VOCAB):
        return vocab
    step = row.framework.padding * row.optional("tp", 1)
    return math.ceil(vocab / step) * step


def outline(row: Row) -> Outline:
    """Raises UnstatedError for a kind of model whose dimensions the row does not give."""
    arch, hidden = row["arch"], row.number("hidden")
    if any(word in arch for word in ("moe", "hybrid", "t5")):
        raise UnstatedError(f"of a {arch.split()[0]} model the row does not give all dimensions")
    heads, length = row.optional("heads", hidden // _HEAD), row.number("seq")
    llama = "llama" in arch
    gated = llama or "swiglu" in arch
    bert = arch == "bert"
    vocab = padded(row)
    attention = AttentionShape(
        heads=heads, kv_heads=row.optional("kv_heads", heads), head_dim=hidden // heads,
        value_dim=hidden // heads, causal=not bert, qkv_bias=not llama, out_bias=not llama,
    )  # fmt: skip
    block = Stack(
        layers=row.number("layers"),
        attention=attention,
        mlp=Mlp(width=row.optional("ffn", 4 * hidden), gated=gated, bias=not llama),
        norm_bias=not llama,
        dropout=row.framework.dropout,
    )
    transform = ProductShape(name="head transform", inputs=hidden, outputs=hidden)
    return Outline(
        name=row["model"] or arch,
        hidden=hidden,
        stacks=(block,),
        vocab=vocab,
        outputs=vocab,
        tied=not llama,
        learned_positions=0 if llama else length,
        max_positions=length,
        outside_parameters=hidden if llama else 2 * hidden,
        head_products=(transform,) if bert else (),
    )


def chip(row: Row) -> Accelerator:
    """The row's. Raises UnstatedError."""
    name = _CHIPS.get(row["gpu"])
    if name is None:
        raise UnstatedError(f"GPU {row['gpu']!r} is not in the catalog")
    return ACCELERATORS[name]


def node(row: Row) -> Node:
    """A machine with the row's chips, each with the links that it is sold with."""
    found = chip(row)
    return Node(
        name=row["gpu"], accelerator=found.name, devices=row.optional("gpus_per_node", 8),
        topology="switch", device_link=found.device_link, host_link=found.host_link,
        source=row["source"],
    )  # fmt: skip


def question(row: Row) -> Question:
    """The row's model on its machine, with its network; where none is said, the catalog's."""
    each = node(row)
    nodes = math.ceil(row.optional("n_gpus", 1) / each.processes)
    cards, rate = _CARDS.search(row["interconnect"]), _PER_NODE.search(row["interconnect"])
    network = None
    if cards:
        network = read_network(f"{cards[1]} x InfiniBand {cards[2]}")
    elif rate:  # such rates are of HDR cards, 200 Gbit/s each (arXiv 2312.12391, §5)
        network = read_network(f"{int(rate[1]) // 200} x InfiniBand HDR")
    cluster = of_catalog(each, max(nodes, 2), network)
    return Question(
        outline(row), row.number("seq"), cluster.device, cluster.fabric, kernel(row),
        other_program=True,
    )  # fmt: skip


def kernel(row: Row) -> Kernel:
    """Of attention: as stated, else the framework's.

    Megatron's tests without Transformer Engine have its own attention, which writes scores; their
    names say which have it ("_te_").
    """
    stated = row["attention"]
    own = row.framework.kernel
    if stated == "unfused":
        return "unfused"
    if stated == "flash":
        return "fused" if own == "unfused" else own
    plain = row["framework"].startswith("Megatron-LM CI") and "_te_" not in row["model"]
    return "unfused" if plain else own


def precision(row: Row) -> dict[str, Any]:
    """As the row says.

    Megatron's 16-bit training, of either kind, has 16-bit weights and fp32 masters
    (megatron/core/optimizer/optimizer.py: Float16OptimizerWithFloat16Params), which is fp16-master
    here; bf16 would be fp32 weights, cast at their use.
    """
    said = row["precision"]
    if "fp8" in said:
        return {"precision": "fp8"}
    if row.framework.masters and "16" in said:
        return {"precision": "fp16-master"}
    if "PURE" in said:  # FSDP's MixedPrecision with gradients summed in bf16
        return {"precision": "bf16-pure", "optimizer": "adamw-bf16"}
    return {"precision": "bf16" if "bf16" in said else "fp16" if "16" in said else "fp32"}


def habits(row: Row) -> Habits:
    """Of memory, by the framework; Megatron's depend on what gradients are added up in."""
    if not row.framework.megatron:
        return OUTPACE
    return MEGATRON_FP16 if row["precision"].startswith("fp16") else MEGATRON_BF16


def plans(row: Row) -> list[Plan]:
    """One, or all that a row leaves open: of those the planner's best is taken."""
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
    """Of a step; where accumulation is stated, as many as it makes up.

    llm-foundry's batches are not always a multiple of the micro-batch that is stated with them; its
    figures are per token.
    """
    if row["grad_accum"] and row["micro_batch"] and row["dp"]:
        return row.number("micro_batch") * row.number("grad_accum") * row.number("dp")
    return row.number("global_batch")


def _sharded(row: Row) -> Plan:
    ranks = row.number("dp")
    zero = {"zero2": "zero2", "zero3": "zero3", "fsdp": "zero3"}.get(row["sharding"], "single")
    return Plan.parse(
        {
            "strategy": zero if ranks > 1 else "single",
            "dp_shard": ranks if ranks > 1 else 1,
            "micro_batch": row.number("micro_batch"),
            "checkpointing": "full" if row["recompute"].startswith("full") else "none",
            **precision(row),
        },
        "row",
    )


def _products(row: Row) -> Iterator[Plan | None]:
    """Axes as stated; open are micro-batch, virtual stages and recomputation where they are not."""
    tp, pp, cp = (row.optional(name, 1) for name in ("tp", "pp", "cp"))
    dp = row.optional("dp", row.number("n_gpus") // (tp * pp * cp))
    said, share = row["recompute"], row.number("global_batch") // dp
    stated = row.optional("micro_batch", 0)
    sizes = (stated,) if stated else tuple(n for n in _MICRO_BATCHES if share % n == 0)
    modes = _recomputation(said)
    loops = _virtual(row, pp)
    for size in sizes:
        for mode in modes:
            for count in loops:
                yield _product(row, (tp, pp, cp, dp), size, share, mode, count)


def _recomputation(said: str) -> tuple[str, ...]:
    """selective-attention is of arXiv 2205.05198, which computes scores and their softmax again."""
    if not said:
        return ("none", "full")
    if said.startswith("full"):
        return ("full",)
    return ("none",) if said == "none" or "selective-attention" in said else ("selective",)


def _virtual(row: Row, pp: int) -> Sequence[int]:
    layers, said = row.number("layers"), row["vpp"]
    if pp == 1:
        return (1,)
    if "layers/vstage" in said:
        return (layers // pp // int(said.split()[0]),)
    if said:
        return (int(float(said)),)
    if row["micro_batch"]:
        return (1,)
    return tuple(n for n in _VIRTUAL if layers % (pp * n) == 0)


def _product(
    row: Row, axes: tuple[int, int, int, int], size: int, share: int, mode: str, loops: int
) -> Plan | None:
    tp, pp, cp, dp = axes
    parts = share // size
    zero = 3 if "fsdp" in row["sharding"] else 1 if "zero1" in row["sharding"] else 0
    values: dict[str, Any] = {
        "strategy": "3d", "tp": tp, "pp": pp, "cp": cp, "micro_batch": size,
        "checkpointing": mode, "stage_split": "even", "bucket_mib": row.framework.bucket_mib,
        "sequence_parallel": _sequence_parallel(row),
        "async_tp": "tp-comm-overlap on" in row["notes"],
        **precision(row),
    }  # fmt: skip
    values |= {"dp_shard": dp, "zero": zero} if zero and dp > 1 else {"dp_replicate": dp}
    if pp > 1:
        schedule = "interleaved" if loops > 1 else "1f1b" if parts >= pp else "gpipe"
        if schedule == "interleaved" and parts % pp:
            return None
        values |= {"pp_microbatches": parts, "pp_schedule": schedule}
        values |= {"virtual_stages": loops} if loops > 1 else {}
    return Plan.parse(values, "row")


def _sequence_parallel(row: Row) -> bool:
    """Where a row says so; overlap of tensor parallelism needs it (arguments of Megatron-LM)."""
    return "sequence parallel" in row["recompute"] or "tp-comm-overlap on" in row["notes"]
