"""Model presets: published sizes, each with its source, and a few small ones."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outpace.catalog.outlines import OUTLINES
from outpace.records.base import Record
from outpace.records.errors import BadInputError, nearest_model, suggest
from outpace.records.model import ModelSpec, RopeScaling
from outpace.records.model_families import Family


class Preset(Record):
    """A model's dimensions, with their source."""

    spec: ModelSpec
    source: str


_GPT2 = "Radford et al. 2019, table 2, and config.json of openai-community/{} on Hugging Face"
_LLAMA = "config.json of meta-llama/{} on Hugging Face"
_QWEN = "config.json of Qwen/{} on Hugging Face"
_BERT = "Devlin et al., arXiv 1810.04805, §3, and config.json of google-bert/{} on Hugging Face"
_OURS = "outpace's own: small enough for a laptop"

# Columns: layers, hidden, heads.
_GPT2_SIZES = {
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}

# Columns: layers, hidden, heads, kv_heads, ffn.
_LLAMA_2 = {
    "llama-2-7b": ("Llama-2-7b-hf", (32, 4096, 32, 32, 11008)),
    "llama-2-13b": ("Llama-2-13b-hf", (40, 5120, 40, 40, 13824)),
    "llama-2-70b": ("Llama-2-70b-hf", (80, 8192, 64, 8, 28672)),
}
_LLAMA_3 = {
    "llama-3-8b": ("Meta-Llama-3-8B", (32, 4096, 32, 8, 14336)),
    "llama-3-70b": ("Meta-Llama-3-70B", (80, 8192, 64, 8, 28672)),
}
_LLAMA_31 = {
    "llama-3.1-8b": ("Llama-3.1-8B", (32, 4096, 32, 8, 14336)),
    "llama-3.1-70b": ("Llama-3.1-70B", (80, 8192, 64, 8, 28672)),
    "llama-3.1-405b": ("Llama-3.1-405B", (126, 16384, 128, 8, 53248)),
}
_LLAMA_32 = {
    "llama-3.2-1b": ("Llama-3.2-1B", (16, 2048, 32, 8, 8192)),
    "llama-3.2-3b": ("Llama-3.2-3B", (28, 3072, 24, 8, 8192)),
}

# Columns: layers, hidden, heads, kv_heads, ffn, vocab, tied, norm_eps, max_positions.
_QWEN_2 = {
    "qwen2-0.5b": ("Qwen2-0.5B", (24, 896, 14, 2, 4864, 151936, True, 1e-6, 131072)),
    "qwen2-1.5b": ("Qwen2-1.5B", (28, 1536, 12, 2, 8960, 151936, True, 1e-6, 131072)),
    "qwen2-7b": ("Qwen2-7B", (28, 3584, 28, 4, 18944, 152064, False, 1e-6, 131072)),
    "qwen2-72b": ("Qwen2-72B", (80, 8192, 64, 8, 29568, 152064, False, 1e-5, 131072)),
    "qwen2.5-0.5b": ("Qwen2.5-0.5B", (24, 896, 14, 2, 4864, 151936, True, 1e-6, 32768)),
    "qwen2.5-1.5b": ("Qwen2.5-1.5B", (28, 1536, 12, 2, 8960, 151936, True, 1e-6, 131072)),
    "qwen2.5-3b": ("Qwen2.5-3B", (36, 2048, 16, 2, 11008, 151936, True, 1e-6, 32768)),
    "qwen2.5-7b": ("Qwen2.5-7B", (28, 3584, 28, 4, 18944, 152064, False, 1e-6, 131072)),
    "qwen2.5-14b": ("Qwen2.5-14B", (48, 5120, 40, 8, 13824, 152064, False, 1e-5, 131072)),
    "qwen2.5-32b": ("Qwen2.5-32B", (64, 5120, 40, 8, 27648, 152064, False, 1e-5, 131072)),
    "qwen2.5-72b": ("Qwen2.5-72B", (80, 8192, 64, 8, 29568, 152064, False, 1e-5, 131072)),
}

# Columns: layers, hidden, heads, kv_heads, ffn, tied.
_QWEN_3 = {
    "qwen3-0.6b": ("Qwen3-0.6B", (28, 1024, 16, 8, 3072, True)),
    "qwen3-1.7b": ("Qwen3-1.7B", (28, 2048, 16, 8, 6144, True)),
    "qwen3-4b": ("Qwen3-4B", (36, 2560, 32, 8, 9728, True)),
    "qwen3-8b": ("Qwen3-8B", (36, 4096, 32, 8, 12288, False)),
    "qwen3-14b": ("Qwen3-14B", (40, 5120, 40, 8, 17408, False)),
    "qwen3-32b": ("Qwen3-32B", (64, 5120, 64, 8, 25600, False)),
}

_BERT_SIZES = {
    "bert-base": ("bert-base-uncased", (12, 768, 12, 30522)),
    "bert-base-cased": ("bert-base-cased", (12, 768, 12, 28996)),
    "bert-large": ("bert-large-uncased", (24, 1024, 16, 30522)),
    "bert-large-cased": ("bert-large-cased", (24, 1024, 16, 28996)),
}


def _preset(source: str, family: Family, **dimensions: Any) -> Preset:
    return Preset(spec=ModelSpec.parse({"family": family, **dimensions}, source), source=source)


def _gpt() -> Iterator[tuple[str, Preset]]:
    common = {"vocab": 50257, "max_positions": 1024, "dropout": 0.1}
    for name, (layers, hidden, heads) in _GPT2_SIZES.items():
        size = {"layers": layers, "hidden": hidden, "heads": heads}
        yield name, _preset(_GPT2.format(name), "gpt2", **size, **common)
    yield (
        "gpt3-175b",
        _preset(
            "Brown et al., arXiv 2005.14165, table 2.1 (dense attention in every layer)",
            "gpt2",
            **{"layers": 96, "hidden": 12288, "heads": 96, "vocab": 50257, "max_positions": 2048},
        ),
    )


def _llama() -> Iterator[tuple[str, Preset]]:
    blend = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
    scaling_31 = RopeScaling(factor=8.0, **blend)
    scaling_32 = RopeScaling(factor=32.0, **blend)
    third = {"vocab": 128256, "rope_theta": 500_000.0}
    long_31 = {**third, "max_positions": 131072, "rope_scaling": scaling_31}
    long_32 = {**third, "max_positions": 131072, "rope_scaling": scaling_32, "tied": True}
    for sizes, common in (
        (_LLAMA_2, {"vocab": 32000, "max_positions": 4096}),
        (_LLAMA_3, {**third, "max_positions": 8192}),
        (_LLAMA_31, long_31),
        (_LLAMA_32, long_32),
    ):
        for name, (published, numbers) in sizes.items():
            names = ("layers", "hidden", "heads", "kv_heads", "ffn")
            size = dict(zip(names, numbers, strict=True))
            yield name, _preset(_LLAMA.format(published), "llama", **size, **common)


def _mistral() -> Iterator[tuple[str, Preset]]:
    size = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}
    first = {**size, "vocab": 32000, "max_positions": 32768, "sliding_window": 4096}
    third = {**size, "vocab": 32768, "max_positions": 32768, "rope_theta": 1e6}
    paper = (
        "Jiang et al., arXiv 2310.06825, table 1, and config.json of mistralai/{} on Hugging Face"
    )
    yield "mistral-7b", _preset(paper.format("Mistral-7B-v0.1"), "mistral", **first)
    source = "config.json of mistralai/Mistral-7B-v0.3 on Hugging Face"
    yield "mistral-7b-v0.3", _preset(source, "mistral", **third)


def _qwen() -> Iterator[tuple[str, Preset]]:
    names = ("layers", "hidden", "heads", "kv_heads", "ffn")
    more = (*names, "vocab", "tied", "norm_eps", "max_positions")
    for name, (published, numbers_2) in _QWEN_2.items():
        size = dict(zip(more, numbers_2, strict=True))
        yield name, _preset(_QWEN.format(published), "qwen2", **size)
    common = {"head_dim": 128, "vocab": 151936, "max_positions": 40960}
    for name, (published, numbers_3) in _QWEN_3.items():
        size = dict(zip((*names, "tied"), numbers_3, strict=True))
        yield name, _preset(_QWEN.format(published), "qwen3", **size, **common)


def _bert() -> Iterator[tuple[str, Preset]]:
    common = {"max_positions": 512, "dropout": 0.1}
    for name, (published, (layers, hidden, heads, vocab)) in _BERT_SIZES.items():
        size = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab}
        yield name, _preset(_BERT.format(published), "bert", **size, **common)


def _outpace_presets() -> Iterator[tuple[str, Preset]]:
    tiny = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 192}
    yield "outpace-tiny", _preset(_OURS, "llama", **tiny, vocab=512, max_positions=256, tied=True)
    small = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 704}
    yield (
        "outpace-small",
        _preset(_OURS, "llama", **small, vocab=4096, max_positions=1024, tied=True),
    )


PRESETS: Mapping[str, Preset] = MappingProxyType(
    dict(
        preset
        for family in (_outpace_presets, _gpt, _llama, _mistral, _qwen, _bert)
        for preset in family()
    )
)


def _repositories() -> Iterator[tuple[str, str]]:
    """Return outpace's model names by Hugging Face repository, in lower case."""
    for name, one in PRESETS.items():
        for repository in re.findall(r"config\.json of (\S+/\S+) on Hugging Face", one.source):
            yield repository.casefold(), name
    for name, known in OUTLINES.items():
        # OPT-175B is not on the Hub, so a smaller model's name is used below.
        if found := re.match(r"config\.json of (\S+/\S+) on Hugging Face", known.source):
            yield found[1].casefold(), name


_BY_HUB: Mapping[str, str] = MappingProxyType(dict(_repositories()))


def named_model(reference: str) -> str:
    """Return the name of the preset or outline that `text` means, despite capitals and spaces.

    Examples are "Llama-3.1-8B" and "Mixtral 8x7B". Files or folders of that name take precedence.
    """
    name = reference.casefold().replace(" ", "-")
    return name if name in PRESETS or name in OUTLINES else reference


def name_of_hub(reference: str) -> str | None:
    """Return the preset or outline for the Hugging Face Hub's `reference` ("Qwen/Qwen2.5-7B")."""
    return _BY_HUB.get(reference.casefold())


def without_weights(reference: str) -> str:
    """Return the preset or outline for a name on the Hub, if only dimensions are needed.

    Any other reference, and the name of an existing folder, is returned unchanged.
    """
    try:
        is_file = Path(reference).expanduser().exists()
    except (OSError, RuntimeError):  # name too long, or no home directory
        is_file = False
    return reference if is_file else name_of_hub(reference) or reference


def unknown_model(reference: str, known: Iterable[str]) -> BadInputError:
    """Return the error message for a name that is neither among `known` nor a file or folder.

    For a repository on the Hub, it says how to download it, and names its preset if there is one.
    """
    said = f"no preset, directory or file named {reference!r}."
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", reference):
        said += (
            f"{nearest_model(reference, known)} outpace models lists all that are known by name."
        )
        return BadInputError(said)
    folder = reference.rpartition("/")[2]
    alike = name_of_hub(reference)
    said += (
        " outpace downloads no models. If it is a model of the Hugging Face Hub: hf download "
        f"{reference} --local-dir {folder}, then --model {folder}."
    )
    if alike is None:
        return BadInputError(f"{said} outpace models lists all that are known by name.")
    return BadInputError(
        f"{said} If you do not need its weights: --model {alike} has the same dimensions."
    )


def untrained_model(reference: str) -> BadInputError | None:
    """Return the error message for building a model known only by its outline; None for others."""
    name = name_of_hub(reference) or named_model(reference)
    if name not in OUTLINES:
        return None
    return BadInputError(
        f"{OUTLINES[name].untrained}, so it cannot train {name}, nor build or trace it. outpace "
        "plan and outpace estimate predict its time, memory and layouts: "
        f"outpace plan --model {name} --machine NAME"
    )


def preset(name: str) -> ModelSpec:
    """Return the dimensions of a preset. Raises BadInputError, which names the closest presets."""
    try:
        return PRESETS[name].spec
    except KeyError:
        raise BadInputError(
            f"there is no model preset {name!r}.{suggest(name, PRESETS)} "
            "outpace models lists all that are known by name."
        ) from None
