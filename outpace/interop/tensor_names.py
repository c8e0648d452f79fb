"""Names of outpace's tensors in Hugging Face files, by family.

tensor_names.json maps outpace's modules to stored modules; `*` stands for the layer number.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from outpace.interop.config import OWN_TYPE
from outpace.records.model_families import FAMILY_TRAITS


@dataclass(frozen=True)
class Naming:
    """Tensor names of a family.

    All stored names start with `prefix`, except those that start with one of `heads`; files of a
    bare encoder omit the prefix. `transposed` lists modules whose weights are stored as in × out
    (GPT-2's Conv1D). `ignored` are patterns of names that outpace does not use (buffers in old
    files, heads for other purposes).
    """

    modules: Mapping[str, str]
    prefix: str
    heads: tuple[str, ...]
    ignored: tuple[str, ...]
    tied_head: str
    head_bias: str = ""
    transposed: tuple[str, ...] = ()

    def stored_name(self, name: str) -> str:
        """Return the stored name of outpace's tensor `name`."""
        if name == "head_bias":
            return self.head_bias
        module, leaf = name.rsplit(".", 1)
        number = re.search(r"\d+", module)
        pattern = module if number is None else module.replace(number[0], "*", 1)
        theirs = self.modules[pattern]
        return f"{theirs if number is None else theirs.replace('*', number[0], 1)}.{leaf}"

    def is_transposed(self, stored: str) -> bool:
        """Return whether the stored tensor is the transpose of outpace's."""
        return any(stored.endswith(f".{module}.weight") for module in self.transposed)

    def current_name(self, stored: str) -> str:
        """Return a stored name in its current form: new names of norms, and with the prefix."""
        name = stored.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        return name if name.startswith((self.prefix, *self.heads)) else self.prefix + name

    def is_ignored(self, current_name: str) -> bool:
        """Return whether outpace ignores a stored tensor."""
        return any(re.search(pattern, current_name) for pattern in self.ignored)


@cache
def _read_namings() -> dict[str, Naming]:
    namings = json.loads(Path(__file__).with_name("tensor_names.json").read_text("utf-8"))
    for values in namings.values():
        values |= {name: tuple(one) for name, one in values.items() if isinstance(one, list)}
    return {form: Naming(**values) for form, values in namings.items()}


def tensor_naming(model_type: str) -> Naming | None:
    """Return the naming of a family; None for outpace's format, which stores its own names."""
    if model_type == OWN_TYPE:
        return None
    traits = FAMILY_TRAITS.get(model_type)  # type: ignore[call-overload]
    return _read_namings()["llama" if traits is None else traits.form]


def group(names: Iterable[str], naming: Naming | None) -> dict[str, list[str]]:
    """Group outpace's tensor names by the name of the stored tensor that contains them.

    For example, GPT-2 stores q, k and v in one tensor. Names keep their order.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        stored = name if naming is None else naming.stored_name(name)
        groups.setdefault(stored, []).append(name)
    return groups
