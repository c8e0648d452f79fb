"""Check that the modules selected by an adapter's config match the tensors in its file."""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from outpace.records.errors import BadInputError, excerpt, shorten


def require_targets(
    config: Mapping[str, Any], weights: Path, held: Collection[str], known: Collection[str]
) -> None:
    """Refuse an adapter whose tensors do not match the modules that its config selects.

    `weights` is the adapter's file, `held` are the modules of its tensors, and `known` are the
    modules of the base model. PEFT silently skips tensors of modules that are not selected, and
    treats missing tensors of selected modules as zeros.
    """
    _require_form(config, weights.with_name("adapter_config.json"))
    targeted = _target_rule(config)
    if targeted is None:
        return
    extra = [name for name in held if not targeted(name)]
    # Module names in the adapter and in the base may have different prefixes (`model.`,
    # `transformer.`).
    lacking = [
        name
        for name in known
        if targeted(name) and not any(f".{one}".endswith(f".{_inner(name)}") for one in held)
    ]
    for names, found in ((extra, "holds matrices of"), (lacking, "holds no matrices of")):
        if names:
            contrary = "does not name" if names is extra else "names"
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise BadInputError(
                f"{weights} {found} {shorten(names[0], 120)}{more}, which "
                f"target_modules in adapter_config.json {contrary}{_conditions(config)}: one of "
                "the two files belongs to another adapter or is incomplete. Restore both as they "
                "were saved, or correct target_modules."
            )


def _require_form(config: Mapping[str, Any], path: Path) -> None:
    """Refuse module names, patterns and layer numbers of invalid types or syntax."""
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


def _conditions(config: Mapping[str, Any]) -> str:
    """Return, for a message, the other config keys that select modules, or ''."""
    keys = ("exclude_modules", "layers_to_transform", "layers_pattern")
    found = [key for key in keys if config.get(key) not in (None, [], "")]
    return f" (with {' and '.join(found)})" if found else ""


def _inner(module: str) -> str:
    """Return a module's name from its layer number on, or the whole name if it has none."""
    found = re.search(r"(?:^|\.)(\d+\..+)$", module)
    return found[1] if found else module


def _target_rule(config: Mapping[str, Any]) -> Callable[[str], bool] | None:
    """Return a predicate for the modules that PEFT adapts; None if the config names no modules."""
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if not targets or targets == "all-linear":
        return None
    in_layer, exact = _layer_rule(config), targets if isinstance(targets, list) else []
    return lambda module: (
        (module in exact or (_is_named(module, targets) and in_layer(module)))
        and not (excluded and _is_named(module, excluded))
    )


def _is_named(module: str, names: str | list[Any]) -> bool:
    """Return whether a pattern matches a module's name, or the name ends with one in a list."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in names)


def _layer_rule(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a predicate for the modules in `layers_to_transform`.

    Without that key, it is true for all modules.
    """
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
    if layers is None or layers == []:
        return lambda module: True
    numbers = {layers} if isinstance(layers, int) else set(layers)
    names = [patterns] if isinstance(patterns, str) else patterns or [r"[^.]+"]

    def in_layer(module: str) -> bool:
        found = [re.search(rf"(?:^|\.){name}\.(\d+)\.", module) for name in names]
        return any(one is not None and int(one[1]) in numbers for one in found)

    return in_layer
