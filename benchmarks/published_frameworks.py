"""Fixed behaviour of the programs that published rows used, with sources.

`find_framework` names a row's program. The row's own statements (attention, compile, precision,
recomputation) take precedence over what is given here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from outpace.catalog.stacks import STACKS, SoftwareStack
from outpace.planner.memory.framework_traits import (
    DEEPSPEED_BF16,
    DEEPSPEED_FP16,
    DEEPSPEED_FP16_ZERO1,
    MEGATRON_BF16,
    MEGATRON_FP16,
    OUTPACE,
    FrameworkTraits,
)
from outpace.planner.step_time.layer import Kernel

_ONE_BUCKET_MIB = 10**6
Memory = Literal["outpace", "megatron", "whole loss"]


@dataclass(frozen=True)
class Framework:
    """Behaviour of a program that does not depend on its settings.

    `stack` is the software's name in tables. `kernel` is the attention kernel if a row does not
    state one. `bucket_mib` is the size of gradient buckets. `padding`: the vocabulary is padded to
    a multiple of this times tp; or, if `drops_rows`, it loses the rows that tp's ranks cannot
    share. `pipelines`: it has a pipeline axis, with stages of equal numbers of blocks. `masters`:
    16-bit weights have fp32 masters. `memory`: the traits of memory use. `engine`: 8-bit matmuls
    are Transformer Engine's, which casts in separate kernels. `whole_experts`: its recipes have
    expert tensor parallelism of 1. `recipes`: rows come from Megatron-Bridge's recipes
    (`published_recipes`). `compiles_eight`: rows with 8-bit matmuls are compiled unless they state
    otherwise.
    """

    source: str
    stack: str
    kernel: Kernel
    dropout: bool
    bucket_mib: int = 25
    padding: int = 1
    drops_rows: bool = False
    pipelines: bool = True
    masters: bool = True
    memory: Memory = "outpace"
    engine: bool = False
    whole_experts: bool = False
    recipes: bool = False
    compiles_eight: bool = False

    @property
    def software(self) -> SoftwareStack:
        """Return the program's traits that affect training."""
        return STACKS[_SOFTWARE.get(self.stack, "megatron-lm")]

    def traits(self, precision: str, zero: int) -> FrameworkTraits:
        """Return the traits of memory use; Megatron's depend on the dtype of gradient sums."""
        if "BF16Optimizer" in precision:
            return DEEPSPEED_BF16
        if self.stack == "Megatron-DeepSpeed" and precision.startswith("fp16"):
            return DEEPSPEED_FP16_ZERO1 if zero else DEEPSPEED_FP16
        if self.memory == "megatron":
            # NeMo's configurations of benchmarks and MLPerf add up gradients in 16 bits (dgxc-
            # benchmarking, grad_sync_dtype; NeMo, scripts/performance, grad_reduce_in_fp32 False).
            low = precision.startswith("fp16") or self.stack == "NeMo"
            found = MEGATRON_FP16 if low else MEGATRON_BF16
            # Others (nanotron, InternEvo, Megatron-DeepSpeed) compute a gate by torch's operators.
            return replace(found, fuses_gates=self.engine)
        return OUTPACE if self.memory == "outpace" else _WHOLE_LOSS


# Names of the tables' stacks in the catalog (outpace/catalog/stacks.json); others are plain.
_SOFTWARE: Mapping[str, str] = {
    "Megatron-Core": "megatron", "Megatron-Bridge": "megatron", "NeMo": "megatron",
    "DeepSpeed": "deepspeed-2021", "InternEvo": "internevo", "nanotron": "nanotron",
    "torchtitan": "torchtitan", "Composer": "composer", "Trainer": "trainer", "TRL": "accelerate",
    "transformers": "trainer", "torchtune": "trainer", "AutoModel": "accelerate",
    "fms-fsdp": "trainer",
}  # fmt: skip

# Stacks whose loss is computed over all logits at once.
_WHOLE_LOSS = replace(OUTPACE, chunks_loss=False)
_PADDED = "vocabulary padded to a multiple of 128 × tp: --make-vocab-size-divisible-by"
_TE = (
    "megatron/core/distributed/distributed_data_parallel_config.py: buckets of 40 million "
    "parameters in fp32; overlap of gradients and parameters; no dropout"
)


def _core(source: str, stack: str, **more: object) -> Framework:
    """Return Megatron-Core with Transformer Engine, as used by other projects."""
    return Framework(
        f"{source}; {_TE}", stack, kernel="fused", dropout=False, bucket_mib=153, padding=128,
        memory="megatron", engine=True, **more,
    )  # type: ignore[arg-type]  # fmt: skip


_TRAINER = Framework(
    "transformers, Trainer: the model's own forward, whose loss is over fp32 logits of all tokens "
    "(loss/loss_utils.py, ForCausalLMLoss: logits.float()); accelerate's FSDP1 a block a unit",
    "Trainer", kernel="fused", dropout=False, pipelines=False, masters=False, memory="whole loss",
)  # fmt: skip
FRAMEWORKS: Mapping[str, Framework] = {
    "vtrain": Framework(
        "VIA-Research/vTrain f8dda8473a: src/model/gpt_modeling.py (scores written, fused softmax, "
        "dropout, vocab_size // world_size rows of the head), src/config.py (vocab_size 50257), "
        "config/validation (use_gradient_bucket false: one exchange after the backward)",
        "Megatron-DeepSpeed", kernel="unfused", dropout=True, bucket_mib=_ONE_BUCKET_MIB,
        drops_rows=True, memory="megatron",
    ),
    "Megatron-DeepSpeed": Framework(
        "bigscience-workshop/Megatron-DeepSpeed: its DDP's one exchange after the backward, ZeRO-1 "
        f"of DeepSpeed, written scores; dropout 0.1 as Megatron's arguments; {_PADDED}",
        "Megatron-DeepSpeed", kernel="unfused", dropout=True, bucket_mib=_ONE_BUCKET_MIB,
        padding=128, memory="megatron",
    ),
    "Megatron-LM 2021": Framework(
        "arXiv 2104.04473 and Megatron-LM's local DDP: one exchange after the backward; written "
        f"scores, dropout; {_PADDED}",
        "Megatron-LM", kernel="unfused", dropout=True, bucket_mib=_ONE_BUCKET_MIB, padding=128,
        memory="megatron",
    ),
    "Megatron-LM 2022": Framework(
        "arXiv 2205.05198, §4 and §6: as Megatron-LM 2021; with selective recomputation sequence "
        "parallelism",
        "Megatron-LM", kernel="unfused", dropout=True, bucket_mib=_ONE_BUCKET_MIB, padding=128,
        memory="megatron",
    ),
    "Megatron-LM PTD-P": Framework(
        f"arXiv 2104.04473, table 2: as Megatron-LM 2021; {_PADDED}",
        "Megatron-LM", kernel="unfused", dropout=True, bucket_mib=_ONE_BUCKET_MIB, padding=128,
        memory="megatron",
    ),
    "DeepSpeed ZeRO-3": Framework(
        "arXiv 2104.04473, §5.2 and table 2: DeepSpeed's ZeRO-3 of 2021 with Megatron's model, "
        "without model parallelism",
        "DeepSpeed", kernel="unfused", dropout=True, padding=128,
    ),
    "Megatron-Core r0.8.0": Framework(
        "Megatron-LM core_r0.8.0, README: flash attention, overlap of gradients, parameters and "
        "tensor parallelism; megatron/core/distributed/distributed_data_parallel_config.py: "
        "buckets of 40 million parameters in fp32",
        "Megatron-Core", kernel="fused", dropout=True, bucket_mib=153, padding=128,
        memory="megatron", engine=True,
    ),
    "Megatron-Core+TE": Framework(
        "Megatron-LM d98e8a64dd, examples/llama: as Megatron-Core, without dropout",
        "Megatron-Core", kernel="fused", dropout=False, bucket_mib=153, padding=1,
        memory="megatron", engine=True,
    ),
    "Megatron-LM CI": Framework(
        "Megatron-LM d98e8a64dd, tests/functional_tests/test_cases: arguments' defaults (dropout "
        "0.1, fused softmax); BERT with BertWordPieceLowerCase",
        "Megatron-Core", kernel="fused", dropout=True, bucket_mib=153, padding=128,
        memory="megatron", engine=True,
    ),
    "Megatron-Core": _core(
        "NVIDIA/Megatron-MoE-ModelZoo, model_configs", "Megatron-Core", whole_experts=True
    ),
    "Megatron-Bridge": _core(
        "NVIDIA-NeMo/Megatron-Bridge 067f987df0, docs/performance-summary.md and the recipes of "
        "scripts/performance", "Megatron-Bridge", whole_experts=True, recipes=True,
    ),
    "Primus Megatron": _core("AMD-AGI/Primus fd1eeabb, docs", "Megatron-Core"),
    "NeMo": _core(
        "NVIDIA/NeMo, docs/source/performance, and NVIDIA/dgxc-benchmarking: each model's "
        "configuration has overlap_grad_sync, overlap_param_sync, no dropout", "NeMo"
    ),
    "NeMo AutoModel": Framework(
        "NVIDIA-NeMo/Automodel 36044ad3d: fully_shard by blocks; models with experts use "
        "Transformer Engine's norms, attention and matmuls, and DeepEP or HybridEP; others are "
        "transformers' modules", "AutoModel", kernel="fused", dropout=False, masters=False,
        memory="whole loss",
    ),
    "mlperf": _core(
        "mlcommons/training_results: NVIDIA's reference submission, NeMo on Megatron-Core; that of "
        "AMD is Megatron's model on ROCm's Transformer Engine", "NeMo",
    ),
    "mlperf DeepSpeed": replace(
        _TRAINER, source="mlcommons/training_results_v4.0, HF's model under DeepSpeed's ZeRO-3: "
        f"{_TRAINER.source}",
    ),
    "InternEvo": Framework(
        "InternLM/InternEvo c628a8c874, doc/en/train_performance.md; internlm/solver/optimizer/"
        "hybrid_zero_optim.py: 16-bit weights, fp32 masters over zero1's ranks, buckets of 512 MiB "
        "reduced in the last micro-batch's backward",
        "InternEvo", kernel="fused", dropout=False, bucket_mib=512, memory="megatron",
    ),
    "nanotron": Framework(
        "huggingface/nanotron v0.5: DDP with buckets of 25 MiB, ZeRO-1, gradients added up in fp32",
        "nanotron", kernel="fused", dropout=False, memory="megatron",
    ),
    "torchtitan": Framework(
        "pytorch/torchtitan, models/llama3/infra/parallelize.py: FSDP2 with fp32 shards, bf16 "
        "gathers and fp32 reductions, a block a unit; cross entropy over fp32 logits of all tokens"
        "; components/quantization/float8.md: compiling is required for float8 to compete",
        "torchtitan", kernel="fused", dropout=False, masters=False, memory="whole loss",
        compiles_eight=True,
    ),
    "composer FSDP1": Framework(
        "mosaicml/llm-foundry 12a631913c, scripts/train/benchmarking/submit_benchmarks.py: "
        "attn_impl triton and low_precision_layernorm by default; scripts/train/yamls/pretrain: no "
        "dropout; amp_fp8 by Transformer Engine",
        "Composer", kernel="triton", dropout=False, pipelines=False, masters=False, engine=True,
    ),
    "litgpt": Framework(
        "Lightning-AI/litgpt 26857050fe, tutorials/resource-tables.md, finetune/lora.py: adapters "
        "of rank 8 on queries and values, behind dropout of 0.05; FSDP with activation "
        "checkpointing, a block to a flat parameter, micro-batches before the last under no_sync",
        "LitGPT", kernel="fused", dropout=False, pipelines=False, masters=False,
    ),
    "fms-fsdp FSDP1": replace(
        _TRAINER, stack="fms-fsdp",
        source="foundation-model-stack/fms-fsdp 5a296af, main_training_llama.py: FSDP1 by blocks, "
        "shards in fp32, gathers and sums in bf16 (policies/mixed_precision.py)",
    ),
    "TinyLlama": Framework(
        "jzhang38/TinyLlama bf12224, pretrain/tinyllama.py: Lightning's FSDP by blocks, without "
        "checkpoints; flash-attn's attention and rotations, norms and SwiGLU in one kernel each",
        "LitGPT", kernel="flash2", dropout=False, pipelines=False, masters=False,
        memory="whole loss",
    ),
    "transformers + DeepSpeed": replace(
        _TRAINER, source="FlagOpen/FlagPerf 1b5a0303, training/benchmarks/llama2_7b/deepspeed: "
        "transformers' Llama under deepspeed.initialize; bf16 weights with fp32 masters",
    ),
    "transformers": replace(
        _TRAINER, source="huggingface/transformers 4.3, GPT2Model: written scores, dropout 0.1",
        kernel="unfused", dropout=True, memory="outpace",
    ),
    "transformers Trainer": _TRAINER,
    "transformers 5": replace(_TRAINER, stack="transformers"),
    "swift": replace(_TRAINER, source=f"modelscope/ms-swift: {_TRAINER.source}"),
    "trl": replace(
        _TRAINER, stack="TRL", memory="outpace", pipelines=True,
        source="huggingface/trl#6845, #6869: accelerate's FSDP2 and context parallelism, loss in "
        "chunks",
    ),
    "torchtune": replace(
        _TRAINER, stack="torchtune", memory="outpace",
        source="pytorch/torchtune, modules/loss: cross entropy in chunks",
    ),
    "PyTorch": replace(
        _TRAINER, stack="PyTorch", source="pytorch/ao, README files of torchao.prototype: own loops"
    ),
}  # fmt: skip
_MLPERF = "mlperf-"


def find_framework(named: str, source_key: str) -> Framework | None:
    """Return a row's framework, by its source if several share a name; None if unknown."""
    if source_key.startswith(_MLPERF):
        return FRAMEWORKS["mlperf DeepSpeed" if "Deepspeed" in named else "mlperf"]
    if source_key == "vtrain-single":  # pieces of its own model; vtrain-multi has whole steps
        return FRAMEWORKS["vtrain"]
    fits = [key for key in FRAMEWORKS if named == key or named.startswith((f"{key} ", f"{key}."))]
    fits += [key for key in FRAMEWORKS if named.startswith((f"{key},", f"{key} ("))]
    return FRAMEWORKS[max(fits, key=len)] if fits else None
