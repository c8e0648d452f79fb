"""Check that the modules selected by an adapter's config match the tensors in its file."""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from outpace.records.errors import BadInputError, excerpt, shorten


def require_targets(
    config: Mapping[str, Any],
    weights: Path,
    adapter_modules: Collection[str],
    base_modules: Collection[str],
) -> None:
    """Refuse an adapter whose tensors do not match the modules that its config selects.

    `weights` is the adapter's file, `adapter_modules` are the modules for which it holds tensors,
    and `base_modules` are all modules of the base model. PEFT silently skips tensors of modules
    that are not selected, and treats missing tensors of selected modules as zeros.
    """
    _require_valid_selectors(config, weights.with_name("adapter_config.json"))
    targeted = _make_target_predicate(config)
    if targeted is None:
        return
    extra = [name for name in adapter_modules if not targeted(name)]
    # Module names in the adapter and in the base may have different prefixes (`model.`,
    # `transformer.`).
    lacking = [
        name
        for name in base_modules
        if targeted(name)
        and not any(f".{one}".endswith(f".{_strip_model_prefix(name)}") for one in adapter_modules)
    ]
    for names, found in ((extra, "holds matrices of"), (lacking, "holds no matrices of")):
        if names:
            contrary = "does not name" if names is extra else "names"
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise BadInputError(
                f"{weights} {found} {shorten(names[0], 120)}{more}, which "
                f"target_modules in adapter_config.json {contrary}{_list_conditions(config)}: "
                "one of the two files belongs to another adapter or is incomplete. Restore both as "
                "they were saved, or correct target_modules."
            )


def _require_valid_selectors(config: Mapping[str, Any], path: Path) -> None:
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        value = config.get(key)
        names = value if isinstance(value, list) else [value or ""]
        try:
            if not all(isinstance(one, str) for one in names):
                raise BadInputError(
                    f"{path}: {key} is {excerpt(value)}; it must be a string or a list of strings"
                )
            for pattern in names if key == "layers_pattern" or isinstance(value, str) else ():
                re.compile(pattern)
        except re.error as error:
            raise BadInputError(
                f"{path}: {key} has {excerpt(value)}, which is not a valid pattern of names: "
                f"{error}"
            ) from None
    layers = config.get("layers_to_transform")
    if not all(type(one) is int for one in (layers if isinstance(layers, list) else [layers or 0])):
        raise BadInputError(
            f"{path}: layers_to_transform is {excerpt(layers)}; it must be the number of a layer "
            "or a list of numbers"
        )


def _list_conditions(config: Mapping[str, Any]) -> str:
    """Return a phrase that names the config's other keys that select modules, or "".

    In messages, it follows the words "target_modules".
    """
    keys = ("exclude_modules", "layers_to_transform", "layers_pattern")
    found = [key for key in keys if config.get(key) not in (None, [], "")]
    return f" (with {' and '.join(found)})" if found else ""


def _strip_model_prefix(module: str) -> str:
    """Return "3.attn.q" for "model.layers.3.attn.q"; names without a layer number are unchanged."""
    found = re.search(r"(?:^|\.)(\d+\..+)$", module)
    return found[1] if found else module


def _make_target_predicate(config: Mapping[str, Any]) -> Callable[[str], bool] | None:
    """Return a predicate for names of adapted modules; None if the config names no modules."""
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if not targets or targets == "all-linear":
        return None
    in_layer, exact = _make_layer_predicate(config), targets if isinstance(targets, list) else []
    return lambda module: (
        (module in exact or (_matches_name(module, targets) and in_layer(module)))
        and not (excluded and _matches_name(module, excluded))
    )


def _matches_name(module: str, names: str | list[Any]) -> bool:
    """Return whether `names` has the module: a pattern of the whole name, or a list of suffixes."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in names)


def _make_layer_predicate(config: Mapping[str, Any]) -> Callable[[str], bool]:
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
    if layers is None or layers == []:
        return lambda module: True
    numbers = {layers} if isinstance(layers, int) else set(layers)
    names = [patterns] if isinstance(patterns, str) else patterns or [r"[^.]+"]

    def in_layer(module: str) -> bool:
        found = [re.search(rf"(?:^|\.){name}\.(\d+)\.", module) for name in names]
        return any(one is not None and int(one[1]) in numbers for one in found)

    return in_layer
