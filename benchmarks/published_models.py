"""Outlines of published rows' models: by what a row states, or by the model's name.

Names identify models with published dimensions (each outline has its source).
"""

import csv
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megatron_tests import TABLE

from outpace.catalog.models import PRESETS
from outpace.catalog.outlines import OUTLINES
from outpace.planner.model.outline import outline as preset_outline
from outpace.records.outline import AttentionShape, MatmulShape, Mlp, Outline, Stack

_HEAD = 128  # width of a head if the number of heads is not stated
# Spellings in rows of models in the catalog.
_SPELLINGS: Mapping[str, str] = {
    "deepseekv3": "deepseek-v3", "deepseekv2": "deepseek-v2", "llama3-8b": "llama-3-8b",
    "llama3-70b": "llama-3-70b", "llama31-8b": "llama-31-8b", "llama31-70b": "llama-31-70b",
    "llama31-405b": "llama-31-405b",
}  # fmt: skip
# Families whose blocks have an RMS norm, a gated MLP and rotations, without biases.
_LLAMA_LIKE = re.compile(r"llama|mistral|mixtral|qwen|granite|baichuan|internlm|glm|yi|swiglu moe")
_EXPERTS = re.compile(r"(\d+) experts top-(\d+)(?: \+ (\d+) shared)?")


def _rms(name: str, hidden: int, vocab: int, stacks: tuple[Stack, ...]) -> Outline:
    return Outline(
        name=name, hidden=hidden, stacks=stacks, vocab=vocab, outputs=vocab,
        outside_parameters=hidden, max_positions=131072,
        source=f"config.json of {name} on Hugging Face",
    )  # fmt: skip


def _gpt_oss(name: str, layers: int, experts: int) -> Outline:
    """Build an outline: every second layer sees 128 tokens, with sinks and router biases."""
    attention = AttentionShape(
        heads=64, kv_heads=8, head_dim=64, value_dim=64, qkv_bias=True, out_bias=True
    )
    common: dict[str, Any] = {
        "layers": layers // 2, "other_parameters": 64 + experts,
        "mlp": Mlp(width=2880, gated=True, bias=True, experts=experts, active=4),
    }  # fmt: skip
    windowed = attention.model_copy(update={"window": 128})
    return _rms(name, 2880, 201088, (
        Stack(name="layers with a window", attention=windowed, **common),
        Stack(attention=attention, **common),
    ))  # fmt: skip


def _latent(
    name: str, hidden: int, heads: int, layers: int, dense: int, mlp: Mlp, query_rank: int | None
) -> Outline:
    """Build an outline like DeepSeek-V3's, whose first layer has no experts."""
    attention = AttentionShape(
        heads=heads, kv_heads=heads, head_dim=192, value_dim=128, query_rank=query_rank,
        kv_rank=512, rope_dim=64,
    )  # fmt: skip
    return _rms(name, hidden, 163840, (
        Stack(layers=1, attention=attention, mlp=Mlp(width=dense, gated=True)),
        Stack(name="layers of experts", layers=layers - 1, attention=attention, mlp=mlp),
    ))  # fmt: skip


def _llama4_maverick() -> Outline:
    """Build an outline: every second layer has experts, of which each token goes through one."""
    attention = AttentionShape(heads=40, kv_heads=8, head_dim=128, value_dim=128)
    expert = Mlp(width=8192, gated=True, experts=128, active=1, shared=8192)
    return _rms("llama4-maverick-400b", 5120, 202048, (
        Stack(layers=24, attention=attention, mlp=Mlp(width=16384, gated=True)),
        Stack(name="layers of experts", layers=24, attention=attention, mlp=expert),
    ))  # fmt: skip


# Models in rows that the catalog does not have.
_OTHERS: Mapping[str, Outline] = {
    one.name: one
    for one in (
        _gpt_oss("gpt-oss-120b", 36, 128),
        _gpt_oss("gpt-oss-20b", 24, 32),
        _llama4_maverick(),
        _latent("moonlight-16b-a3b", 2048, 16, 27, 11264,
                Mlp(width=1408, gated=True, experts=64, active=6, shared=2816), None),
        _latent("kimi-k2", 7168, 64, 61, 18432,
                Mlp(width=2048, gated=True, experts=384, active=8, shared=2048), 1536),
    )
}  # fmt: skip


@lru_cache
def megatron_tests() -> Mapping[str, Mapping[str, str]]:
    """Return what each of Megatron-LM's functional tests states, by its name."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {line["model"]: line for line in csv.DictReader(file)}


def find_model(name: str) -> Outline | None:
    """Return the outline of a model by its name; None if it is unknown."""
    plain = re.sub(r"\(.*\)", "", name).strip().casefold()
    plain = re.sub(r"[_ ]+", "-", plain).replace(".", "")
    wanted = _SPELLINGS.get(plain, plain)
    for known, found in {**OUTLINES, **_OTHERS}.items():
        if known.replace(".", "") == wanted:
            return found
    for known, preset in PRESETS.items():
        if known.replace(".", "") == wanted:
            return preset_outline(preset.spec, known)
    return None


def _unstated(arch: str) -> str:
    kind = arch.split()[0]
    kind = {"vit": "ViT", "t5": "T5"}.get(kind, kind)
    return f"the row does not state all dimensions of the {kind} model"


def stated_outline(
    values: Mapping[str, str], vocab: int, seq: int, *, dropout: bool, gpt_positions: bool = True
) -> Outline:
    """Return the outline of a row that states layers and hidden width.

    Raises ValueError for a kind of model whose other dimensions the row does not state.
    """
    arch = values["arch"]
    refuse = next((word for word in ("hybrid", "t5", "vit") if word in arch), None)
    if refuse is not None:
        raise ValueError(_unstated(arch))
    hidden = _int(values["hidden"])
    rms = bool(_LLAMA_LIKE.search(arch)) or "swiglu" in arch
    # As in Megatron's tests of "gpt swiglu": layer norms and biases, but a gated MLP.
    plain = rms and not arch.startswith(("gpt", "moe"))
    bert = arch == "bert"
    attention = _attention(values, hidden, causal=not bert, bias=not plain)
    width = _int(values["ffn"] or _of_test(values, "ffn") or 4 * hidden)
    mlps = _mlps(values, width, gated=rms, bias=not plain)
    stacks = tuple(
        Stack(
            name="layers of experts" if mlp.experts else "layers", layers=layers,
            attention=attention, mlp=mlp, norm_bias=not plain, dropout=dropout,
        )
        for layers, mlp in mlps
    )  # fmt: skip
    transform = MatmulShape(name="head transform", inputs=hidden, outputs=hidden)
    learned = not plain and gpt_positions
    return Outline(
        name=values["model"] or arch,
        hidden=hidden,
        stacks=stacks,
        vocab=vocab,
        outputs=vocab,
        tied=_is_tied(arch, not plain),
        learned_positions=seq if learned else 0,
        max_positions=seq,
        outside_parameters=hidden if plain else 2 * hidden,
        head_matmuls=(transform,) if bert else (),
    )


def _of_test(values: Mapping[str, str], column: str) -> str:
    return megatron_tests().get(values["model"], {}).get(column, "")


def _int(text: str | int) -> int:
    return int(float(text))


def _is_tied(arch: str, otherwise: bool) -> bool:
    if re.search(r"\btied\b", arch):
        return True
    return False if re.search(r"\buntied\b", arch) else otherwise


def _attention(
    values: Mapping[str, str], hidden: int, *, causal: bool, bias: bool
) -> AttentionShape:
    arch = values["arch"]
    heads = _int(values["heads"] or _unstated_heads(values, hidden))
    grouped = _of_test(values, "kv_groups") or heads
    # Qwen3's and GLM-4.5's heads are 128 wide whatever the hidden width (their config.json).
    wide = arch.startswith(("qwen3", "glm4"))
    width = _HEAD if wide else hidden // heads
    return AttentionShape(
        heads=heads, kv_heads=_int(values["kv_heads"] or grouped), head_dim=width,
        value_dim=width, causal=causal, qk_norm=wide,
        qkv_bias=bias or "qkv bias" in arch or arch.startswith(("internlm", "glm4")),
        out_bias=bias or arch.startswith("internlm"),
    )  # fmt: skip


def _unstated_heads(values: Mapping[str, str], hidden: int) -> int:
    """Return a model's number of heads if its row has none; heads are 128 wide by default.

    BLOOM's prequel states them between its tables (bigscience 053adafe, train/tr11-176B-ml/
    chronicles-prequel.md): NHEADS=96 with NHIDDEN=14400, and "all NHEADS=64 (above too)".
    """
    if values.get("source_key") == "bloom-prequel":
        return 96 if hidden == 14400 else 64
    return hidden // _HEAD


def _mlps(values: Mapping[str, str], width: int, *, gated: bool, bias: bool) -> list[Any]:
    """Return the numbers of layers with their MLPs: those without experts first."""
    layers, arch = _int(values["layers"]), values["arch"]
    dense = Mlp(width=width, gated=gated, bias=bias)
    stated = _EXPERTS.search(arch)
    if stated is not None:
        experts, active, shared = (int(one or 0) for one in stated.groups())
        return [(layers, Mlp(width=width, gated=True, experts=experts, active=active,
                             shared=shared * width))]  # fmt: skip
    if "moe" not in arch:
        return [(layers, dense)]
    test = megatron_tests().get(values["model"])
    if test is None or not test["experts"]:
        raise ValueError(_unstated(arch))
    gated = test["swiglu"] == "true"
    expert = Mlp(
        width=_int(test["expert_width"] or width), gated=gated, bias=bias,
        experts=_int(test["experts"]), active=_int(test["topk"] or 2),
        shared=_int(test["shared_width"] or 0),
    )  # fmt: skip
    first = re.match(r"\(\[0\]\*(\d+)", test["layer_freq"])
    whole = min(int(first[1]), layers) if first else 0
    found = [(whole, Mlp(width=width, gated=gated, bias=bias)), (layers - whole, expert)]
    return [one for one in found if one[0]]


def padded_vocabulary(vocab: int, step: int) -> int:
    """Return the vocabulary rounded up to a multiple of `step`."""
    return math.ceil(vocab / step) * step
