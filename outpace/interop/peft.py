"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

`peft.PeftModel.from_pretrained(base, folder)` gives the trained model. GPT-2 stores q, k and v as
one matrix, so their adapters become one adapter whose rank is the sum of their ranks: the A's are
stacked, the B's form a block diagonal, and alpha grows with the rank. outpace.json holds values for
which PEFT's config has no keys.

Legend: r rank; A (r, in), B (out, r).
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.interop.adapter_targets import require_targets
from outpace.interop.atomic_folder import whole_folder
from outpace.interop.config import read_config
from outpace.interop.tensor_names import Naming, group, tensor_naming
from outpace.interop.weight_files import fingerprint
from outpace.interop.weights import expected_shapes, require_numbers
from outpace.nn.lora import PLACES, adapters
from outpace.nn.nf4 import dequantize, quantize
from outpace.nn.transformer import Transformer
from outpace.records.base import Record, read_object
from outpace.records.checksums import require_readable, require_small_files
from outpace.records.errors import BadInputError, excerpt, shorten
from outpace.records.model import ModelSpec
from outpace.records.plan import Base, Plan

ADAPTER_CONFIG, ADAPTER_WEIGHTS, NOTE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "outpace.json",
)
_PREFIX = "base_model.model."
_MOST_ALPHA = 1e9
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.(?:default\.)?weight")
# Options of PEFT's config that change LoRA's formula, with their defaults.
_UNSUPPORTED = {"use_dora": False, "bias": "none", "modules_to_save": None, "lora_bias": False,
                "target_parameters": None, "trainable_token_indices": None,
                "layer_replication": None, "alora_invocation_tokens": None}  # fmt: skip
# Options that leave PEFT's B · A unchanged. Other use_… and …_config options (use_qalora,
# kasa_config, future ones) change the result.
_HARMLESS = frozenset(
    {"use_rslora", "megatron_config", "loftq_config", "eva_config", "corda_config",
     "lora_ga_config", "velora_config", "runtime_config"}
)  # fmt: skip
_CHANGING = re.compile(r"use_.+|.+_config")
# Keys that determine which B · A is added to which matrix.
_OF_MATRICES = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
                "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
                "lora_dropout")  # fmt: skip
# Initialisations that leave the base weights unchanged. With others (PiSSA, OLoRA, CorDA, LoftQ,
# LoRA-GA), the adapter matches only the changed weights.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


class AdapterNote(Record):
    """Record of how an adapter was trained: the format and fingerprint of its base model's weights.

    `stop_ids` are the token IDs that end answers.
    """

    has_checksum: ClassVar[bool] = True

    base: Base
    fingerprint: str
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A module's adapter in PEFT's format; `scale` multiplies B · A."""

    a: Tensor
    b: Tensor
    scale: float


def write_adapter(
    directory: Path,
    model: Transformer,
    plan: Plan,
    base: Path,
    tokenizer_save: Callable[[Path], None] | None,
    stop_ids: Sequence[int] = (),
) -> None:
    """Write the model's LoRA adapters in PEFT's format, completely or not at all.

    `base` is the folder of the weights to which they belong. `stop_ids` end answers, in addition to
    the token IDs that end texts. Raises BadInputError if the directory cannot be written.
    """
    naming = tensor_naming(str(read_config(base).get("model_type")))
    pairs = _collect_pairs(model, naming)
    rank = plan.lora_rank
    assert rank is not None
    config = _build_adapter_config(pairs, model.spec, naming, rank, plan.lora_scale)
    config |= {"base_model_name_or_path": str(base.resolve()), "lora_dropout": plan.lora_dropout}
    tensors = {}
    for name, pair in pairs.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = pair.a
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = pair.b
    with whole_folder(directory, ADAPTER_CONFIG) as folder:
        if tokenizer_save is not None:
            tokenizer_save(folder)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, str(folder / ADAPTER_WEIGHTS), metadata={"format": "pt"})
        note = AdapterNote(base=plan.base, fingerprint=fingerprint(base), stop_ids=tuple(stop_ids))
        note.save(folder / NOTE)


def _collect_pairs(model: Transformer, naming: Naming | None) -> dict[str, Pair]:
    """Return the model's LoRA adapters, by the module names that PEFT uses.

    Where the family stores several of outpace's matrices as one, their adapters are joined.
    """
    shapes, ours = expected_shapes(model.spec), adapters(model)
    pairs = {}
    for stored, names in group(shapes, naming).items():
        modules = [name.removesuffix(".weight") for name in names]
        if any(module in ours for module in modules):
            parts = [ours.get(module) for module in modules]
            rows = [shapes[name][0] for name in names]
            pairs[stored.removesuffix(".weight")] = _join_adapters(parts, rows)
    return pairs


def _join_adapters(parts: list[tuple[Tensor, Tensor, float] | None], rows: list[int]) -> Pair:
    """Join the adapters of matrices that are stored as one matrix.

    The A's are stacked, and the B's form a block diagonal. None stands for a matrix without an
    adapter, and `rows` are the output sizes of the matrices.
    """
    there = [part for part in parts if part is not None]
    a = torch.cat([a for a, _, _ in there]).detach().float().cpu()
    b = torch.zeros(sum(rows), len(a))
    row = column = 0
    for part, height in zip(parts, rows, strict=True):
        if part is not None:
            width = part[1].shape[1]
            b[row : row + height, column : column + width] = part[1].detach()
            column += width
        row += height
    return Pair(a.contiguous(), b, there[0][2])


def _build_adapter_config(
    pairs: Mapping[str, Pair], spec: ModelSpec, naming: Naming | None, rank: int, scale: float
) -> dict[str, Any]:
    known = [name.removesuffix(".weight") for name in group(expected_shapes(spec), naming)]
    joined: dict[int, list[str]] = {}
    for name, pair in pairs.items():
        if len(pair.a) != rank:
            joined.setdefault(len(pair.a), []).append(name)
    ranks = {end: r for r, names in joined.items() for end in shortest_suffixes(names, known)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if spec.causal else None,
        "r": rank,
        "lora_alpha": _to_int_if_whole(scale * rank),
        "rank_pattern": ranks,
        "alpha_pattern": {end: _to_int_if_whole(scale * r) for end, r in ranks.items()},
        "target_modules": shortest_suffixes(pairs, known),
        # Whether modules store matrices as in × out, which is the same for all modules of a family.
        "fan_in_fan_out": naming is not None and bool(naming.transposed),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _to_int_if_whole(number: float) -> int | float:
    """Return a whole number as an int, as PEFT stores alphas."""
    return int(number) if number == int(number) else number


def shortest_suffixes(chosen: Collection[str], known: Collection[str]) -> list[str]:
    """Return the shortest endings of module names that select all `chosen` modules and no others.

    `known` are the names of all modules.
    """
    found = set()
    for name in chosen:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            end = ".".join(parts[-count:])
            others = (k for k in known if k not in chosen)
            if not any(other == end or other.endswith(f".{end}") for other in others):
                found.add(end)
                break
    return sorted(found)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the values of adapter_config.json. Raises BadInputError unless it is plain LoRA."""
    path = folder / ADAPTER_CONFIG
    values = read_object(path)
    if values.get("peft_type") != "LORA":
        raise BadInputError(
            f"{path} describes an adapter of type {values.get('peft_type')}; only LORA is "
            f"supported. "
            "Merge it into its base model with peft (merge_and_unload)."
        )
    for name, plain in _UNSUPPORTED.items():
        if values.get(name, plain) not in (plain, None, [], {}, False):
            raise BadInputError(
                f"{path}: {name} is {values[name]!r}, which is not supported. Merge the adapter "
                "into its base model with peft (merge_and_unload)."
            )
    _require_plain_update(values, path)
    _check_alphas(values, path)
    return values


def fingerprint_config(folder: Path) -> str:
    """Return the settings that determine an adapter's matrices and scale, as sorted JSON.

    The base's name is excluded, because it is a path that may differ between hosts. Raises
    BadInputError if the adapter is not plain LoRA.
    """
    config = read_adapter_config(folder)
    found = {name: config[name] for name in _OF_MATRICES if config.get(name)}
    targets = found.get("target_modules")
    if isinstance(targets, list):
        found["target_modules"] = sorted(map(str, targets))  # peft uses a set here
    return json.dumps(found, sort_keys=True)


def _require_plain_update(values: Mapping[str, Any], path: Path) -> None:
    """Refuse adapters that do more than add B · A to the base weights."""
    begun = values.get("init_lora_weights", True)
    if begun not in _BEGINNINGS:
        raise BadInputError(
            f"{path}: init_lora_weights is {excerpt(begun)}: its initialisation may have changed "
            "the base model's weights, so the adapter does not fit the original weights. Merge it "
            "with peft (merge_and_unload), or save it for the base model with "
            "path_initial_model_for_weight_conversion."
        )
    for name, value in values.items():
        if value and name not in _HARMLESS and _CHANGING.fullmatch(name):
            raise BadInputError(
                f"{path}: {shorten(name)} is {excerpt(value)}, which is not supported. Merge the "
                "adapter into its base model with peft (merge_and_unload)."
            )


def _check_alphas(values: Mapping[str, Any], path: Path) -> None:
    patterns = values.get("alpha_pattern") or {}
    for key, found in (("alpha_pattern", patterns), ("rank_pattern", values.get("rank_pattern"))):
        _check_patterns(key, found or {}, path)
    for name, alpha in {"lora_alpha": values.get("lora_alpha", 8), **patterns}.items():
        if type(alpha) not in (int, float) or not abs(alpha) < _MOST_ALPHA:
            raise BadInputError(
                f"{path}: {shorten(name)} is {excerpt(alpha)}, which is not a valid alpha"
            )


def _check_patterns(key: str, patterns: Any, path: Path) -> None:
    if not isinstance(patterns, dict):
        raise BadInputError(
            f"{path}: {key} is {excerpt(patterns)}; it must be an object that maps "
            "module-name patterns to numbers"
        )
    for name in patterns:
        try:
            re.compile(name)
        except re.error as error:
            raise BadInputError(
                f"{path}: {key} has {excerpt(name)}, which is not a valid pattern of names: {error}"
            ) from None


def base_of(folder: Path) -> Path:
    """Return the directory of an adapter's base model.

    Raises BadInputError if it is not on this machine.
    """
    named = named_base(folder)
    base = _find_directory(named)
    if base is None:
        raise BadInputError(
            f"{folder} is an adapter of {shorten(named) or 'a model that it does not name'}, "
            "which is not a directory here. Fetch that model, and merge with outpace merge "
            "--model DIR."
        )
    return base


def named_base(folder: Path) -> str:
    """Return the base model's name in an adapter's config, or "".

    Raises BadInputError if the adapter is not plain LoRA.
    """
    return str(read_adapter_config(folder).get("base_model_name_or_path") or "")


def _find_directory(reference: str) -> Path | None:
    try:
        path = Path(reference).expanduser()
        return path if reference and path.is_dir() else None
    except (OSError, RuntimeError):  # name too long, or no home directory
        return None


def merge_into(
    weights: dict[str, Tensor], folder: Path, base: Path, form: Base | None = None
) -> None:
    """Add an adapter to the weights of its base model in place: W + s·B·A.

    `weights` have outpace's names, and `base` is their folder. `form` is the format of the weights,
    by default the one in which the adapter was trained. For nf4, matrices are first quantized and
    dequantized. Raises BadInputError for an adapter of another model.
    """
    note = read_note(folder)
    if note is not None and form is None and note.fingerprint != fingerprint(base):
        raise BadInputError(
            f"the adapter in {folder} was not trained with the weights in {base}. Restore its base "
            "weights, or merge it into these anyway: outpace merge --base fp32."
        )
    if (form or (note.base if note else "fp32")) == "nf4":
        _round_to_nf4(weights)
    naming = tensor_naming(str(read_config(base).get("model_type")))
    groups = group(weights, naming)
    pairs = dict(_read_pairs(folder))
    known = [name.removesuffix(".weight") for name in groups]
    require_targets(read_adapter_config(folder), folder / ADAPTER_WEIGHTS, pairs, known)
    for module, pair in pairs.items():
        stored = f"{module}.weight" if naming is None else naming.current_name(f"{module}.weight")
        names = groups.get(stored)
        rows = [weights[name].shape[0] for name in names or ()]
        inner = weights[names[0]].shape[1:] if names else None
        if names is None or pair.b.shape[0] != sum(rows) or pair.a.shape[1:] != inner:
            raise BadInputError(
                f"{folder} has an adapter for {module}, {tuple(pair.b.shape)} · "
                f"{tuple(pair.a.shape)}, which does not fit the model in {base}."
            )
        for name, part in zip(names, pair.b.split(rows), strict=True):
            weights[name] += (pair.scale * part @ pair.a).to(weights[name].dtype)


def adapter_notes(folder: Path) -> tuple[str, ...]:
    """Return notes on an adapter that PEFT would ignore, or that does not change the model.

    There are none for an unreadable file, which merging refuses.
    """
    try:
        with safe_open(str(folder / ADAPTER_WEIGHTS), "pt") as held:
            keys = list(held.keys())
            second = [key for key in keys if (found := _KEY.fullmatch(key)) and found[2] == "B"]
            zero = bool(second) and not any(held.get_tensor(key).any() for key in second)
    except (OSError, SafetensorError):
        return ()
    notes = []
    bare = [key for key in keys if _KEY.fullmatch(key) and not key.startswith(_PREFIX)]
    if bare:
        notes.append(
            f"the adapter in {folder} names its matrices without {_PREFIX} (such as "
            f"{shorten(bare[0], 120)}): outpace adds them, but peft would leave them out"
        )
    if zero:
        notes.append(
            f"the adapter in {folder} changes nothing: all of its B are zero, as before training"
        )
    return tuple(notes)


def read_note(folder: Path) -> AdapterNote | None:
    """Return outpace's record of an adapter; None if another program wrote the adapter."""
    path = folder / NOTE
    return AdapterNote.load(path) if path.is_file() else None


def _round_to_nf4(weights: dict[str, Tensor]) -> None:
    """Quantize the matrices of all blocks to nf4 and dequantize them, in place."""
    ends = tuple(f".{place}.weight" for place in PLACES.values())
    for name, weight in weights.items():
        if name.startswith("blocks.") and name.endswith(ends):
            parts = list(quantize(weight).values())
            weights[name] = dequantize(parts, weight.shape, weight.dtype)


def _read_pairs(folder: Path) -> Iterator[tuple[str, Pair]]:
    config, path = read_adapter_config(folder), folder / ADAPTER_WEIGHTS
    require_small_files(folder)
    require_readable(path)
    try:
        tensors = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"{path} cannot be read: {shorten(str(error))}") from None
    if not tensors:
        raise BadInputError(f"{path} holds no tensors: the adapter would change nothing.")
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key.replace("_orig_mod.", ""))  # prefix of a compiled module
        if found is None:
            raise BadInputError(
                f"{path} holds {shorten(key, 120)}, which is not a LoRA matrix of a layer, such as "
                "an embedding, a head or a layer that was fully trained. Merge the "
                "adapter into its base model with peft (merge_and_unload)."
            )
        require_numbers(tensor, f"{path}: {key}")
        half = halves.setdefault(found[1], {})
        if found[2] in half and not torch.equal(half[found[2]], tensor.float()):
            raise BadInputError(
                f"{path} holds {found[2]} of the adapter of {found[1]} under two names, with "
                "different values. Keep one."
            )
        half[found[2]] = tensor.float()
    for module, held in halves.items():
        if held.keys() != {"A", "B"}:
            raise BadInputError(f"{path} holds only one half of the adapter of {module}.")
        rank = len(held["A"])
        named = _match_module(config.get("rank_pattern") or {}, module, config.get("r", rank))
        if named != rank:
            raise BadInputError(
                f"{path}: the matrices of {module} have rank {rank}, and adapter_config.json says "
                f"{excerpt(named)}: one of the two files belongs to another adapter or was "
                "changed. Restore both as they were saved."
            )
        yield module, Pair(held["A"], held["B"], _lora_scale(config, module, rank))


def _match_module(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module's name, as PEFT does."""
    own = (value for end, value in patterns.items() if re.fullmatch(rf"(.*\.)?({end})", module))
    return next(own, default)


def _lora_scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return α/r, or α/√r if the config uses rsLoRA (Kalajdzievski, arXiv 2312.03732)."""
    patterns = config.get("alpha_pattern") or {}
    alpha = float(_match_module(patterns, module, config.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
