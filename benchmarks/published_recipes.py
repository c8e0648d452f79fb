"""Settings of Megatron-Bridge's performance recipes that its tables of results do not repeat.

They come from NVIDIA-NeMo/Megatron-Bridge 067f987df0, src/megatron/bridge/perf_recipes, by model
and machine. The tables state that they used these recipes.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from outpace.catalog.stacks import SoftwareStack
from outpace.records.outline import MatmulShape, Outline

TABLE = Path(__file__).parent / "data" / "bridge-recipes.csv"
# The release of a table: "§25.11 NeMo Container".
_RELEASE = re.compile(r"§(\d+\.\d+(?:\.\d+)?)")
_LATEST = (26, 8)
_LLAMA_8B_LAYERS = 32


def virtual_stages(source_key: str, model: Outline) -> int | None:
    """Return a rank's stages if the configuration that a row names leaves them at its defaults.

    NVIDIA's GPT-3 of MLPerf 3.1 interleaves 12, and none of its configurations overrides this
    (training_results_v3.1 f33f9444, NVIDIA/benchmarks/gpt3/implementations/pytorch, conf/
    custom.yaml: virtual_pipeline_model_parallel_size, INTERLEAVED_PIPELINE).
    """
    return 12 if source_key == "mlperf-3.1" and model.layers == 96 else None


def recipe_recomputation(model: Outline, source: str, gpu: str, precision: str) -> str:
    """Return the mode of recomputation of a model's recipe.

    Llama's and Qwen3's have none (recompute_granularity None; for Llama 3 8B on H100, 5 of 32
    layers, which is ignored). Others name modules that have hardly any matmuls: mla_up_proj,
    layernorm, moe_act, or the MLP of layers without experts.
    """
    return _find_recipe(model, source, gpu, precision).get("recompute", "none")


def recipe_outline(model: Outline) -> Outline:
    """Return a model as its recipes train it.

    DeepSeek-V3 also predicts the token after the next (recipes/deepseek/deepseek_v3.py:
    mtp_num_layers = 1): one more layer, after a matmul that joins the hidden states with the
    tokens' embeddings, and a second use of the head, with the same weights.
    """
    if model.name != "deepseek-v3":
        return model
    joined = MatmulShape(name="joined", inputs=2 * model.hidden, outputs=model.hidden)
    layer = model.stacks[-1].model_copy(
        update={"name": "predicts one token more", "layers": 1, "other": (joined,), "norms": 4}
    )
    again = MatmulShape(
        name="head once more", inputs=model.hidden, outputs=model.outputs, weighted=False
    )
    return model.model_copy(update={"stacks": (*model.stacks, layer), "head_matmuls": (again,)})


def recipe_stack(
    stack: SoftwareStack, model: Outline, source: str, gpu: str, precision: str
) -> SoftwareStack:
    """Return Megatron-Core's traits as the recipes of a table's release set them.

    Among dense models' FP8 recipes, those that pre-train Llama 3 8B on Blackwell are one CUDA graph
    from 25.11 (97ad8cc6) on. Those of 70B and 405B have no graphs, or, for fine-tuning, only replay
    MLPs, which is ignored.
    """
    found = _find_recipe(model, source, gpu, precision)
    if not found:
        small = not model.experts and model.layers == _LLAMA_8B_LAYERS
        graphs = small and gpu.endswith(("B200", "B300")) and _release(source) >= (25, 11)
        return stack.model_copy(update={"graphs": "step" if graphs else "none"})
    return stack.model_copy(
        update={
            "dispatcher": found["dispatcher"],
            "overlaps_dispatch": found["overlaps_dispatch"] == "1",
            "graphs": found["graphs"],
        }
    )


def _find_recipe(model: Outline, source: str, gpu: str, precision: str) -> Mapping[str, str]:
    """Return the line of `TABLE` for a model's row; empty if there is none.

    This is the recipe of the newest release that is not newer than the row's, or the first.
    """
    release = _release(source)
    stated = precision.upper()
    named = "bf16" if "BF16" in stated else "fp8-mx" if "MX" in stated else "fp8-cs"
    own = [
        line for line in _recipes()
        if (line["model"], line["gpu"], line["precision"]) == (model.name, gpu, named)
    ]  # fmt: skip
    until = [line for line in own if _number(line["release"]) <= release]
    return (until or own[:1] or [{}])[-1]


@lru_cache
def _recipes() -> Sequence[Mapping[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _release(source: str) -> tuple[int, ...]:
    """Return the release of a row's table, or the latest if it has none."""
    stated = _RELEASE.search(source)
    return _number(stated[1]) if stated else _LATEST


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))
