"""Settings of Megatron-Bridge's performance recipes that its tables of results do not repeat.

NVIDIA-NeMo/Megatron-Bridge 067f987df0, src/megatron/bridge/perf_recipes, by model and machine. The
tables name these recipes as what was run.
"""

import re

from outpace.catalog.stacks import SoftwareStack
from outpace.records.outline import Outline

# The release of a table: "§25.11 NeMo Container".
_RELEASE = re.compile(r"§(\d+\.\d+)")
_LATEST = 26.08


def virtual_stages(source_key: str, model: Outline) -> int | None:
    """Return a rank's stages where a configuration that a row names leaves them to its defaults.

    NVIDIA's GPT-3 of MLPerf 3.1 interleaves 12, and none of its configurations says otherwise
    (training_results_v3.1 f33f9444, NVIDIA/benchmarks/gpt3/implementations/pytorch, conf/
    custom.yaml: virtual_pipeline_model_parallel_size, INTERLEAVED_PIPELINE).
    """
    return 12 if source_key == "mlperf-3.1" and model.layers == 96 else None


def recipe_recomputation(model: Outline) -> str:
    """Return the mode of recomputation of a model's recipes.

    Llama's and Qwen3's have none (recompute_granularity None; of Llama 3 8B on H100 5 of 32 layers,
    which is left out). DeepSeek-V3's, Kimi's and gpt-oss's name modules that have hardly any
    products: mla_up_proj, layernorm, moe_act.
    """
    attention = [stack.attention for stack in model.stacks if stack.attention is not None]
    latent = any(one.kv_rank is not None for one in attention)
    return "selective" if model.experts and (latent or model.name.startswith("gpt-oss")) else "none"


def recipe_stack(
    stack: SoftwareStack, model: Outline, source: str, gpu: str, precision: str
) -> SoftwareStack:
    """Return Megatron-Core's traits as the recipes of a table's release set them.

    Releases by the commits of their tables: 25.09 (ea299063) has all-to-alls of copies; from 25.11
    (97ad8cc6) on moe_flex_dispatcher_backend is HybridEP or DeepEP, but for Qwen3-235B on H100,
    whose all-to-alls are overlapped (moe_a2a_overlap). From 26.06 (63b08b39) on those in MXFP8 on
    GB200 and GB300 are one CUDA graph (full_iteration) with overlap_moe_expert_parallel_comm.
    Recipes for Blackwell replay attention and routers of blocks (transformer_engine), or a step.
    """
    found = _RELEASE.search(source)
    release = float(found[1]) if found else _LATEST
    blackwell = "B200" in gpu or "B300" in gpu
    whole = release >= 26.06 and "MX" in precision and gpu in ("GB200", "GB300")
    copies = release < 25.11 or (not blackwell and model.name.startswith("qwen3-235b"))
    return stack.model_copy(
        update={
            "dispatcher": "alltoall" if copies else "deepep",
            "overlaps_dispatch": whole or (copies and release >= 25.11),
            "graphs": blackwell and release >= 25.11,
        }
    )
