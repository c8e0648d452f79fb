"""Other tools' names for outpace's options, keys and values.

Options come from transformers' TrainingArguments (4 and 5), accelerate's launcher and
configuration, torchtitan, Megatron-LM, DeepSpeed, axolotl, nanoGPT, Lightning's Trainer and
torchrun; machine names come from nvidia-smi and cloud providers. Aliases are only suggested, never
applied.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class Meaning(NamedTuple):
    """outpace's names for a term of another tool (an alias), with an optional remark.

    A command suggests only the names that it accepts. A name may include a value after a space.
    """

    names: tuple[str, ...]
    remark: str = ""


@lru_cache
def read_tables() -> tuple[dict[str, Meaning], dict[str, Meaning]]:
    """Return the meanings of setting aliases and of value aliases from aliases.json.

    A key in the file lists aliases separated by blanks. Its value lists outpace's names separated
    by |, either alone or in a list with a remark.
    """
    tables = json.loads(Path(__file__).with_name("aliases.json").read_text("utf-8"))
    return _read_meanings(tables["settings"]), _read_meanings(tables["values"])


def _read_meanings(groups: dict[str, dict[str, str | list[str]]]) -> dict[str, Meaning]:
    meanings: dict[str, Meaning] = {}
    for rows in groups.values():
        for aliases, meant in rows.items():
            names, *remark = [meant] if isinstance(meant, str) else meant
            meaning = Meaning(tuple(names.split("|")), *remark)
            meanings |= dict.fromkeys(map(_normalise, aliases.split()), meaning)
    return meanings


def _normalise(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def format_setting(name: str, value: str) -> str:
    """Format a flag as `--name value`, and any other setting as in TOML: `name = value`."""
    if name.startswith("--"):
        return f"{name} {value}"
    return f"{name} = {value}" if value.isdigit() else f'{name} = "{value}"'


def translate_alias(
    word: str, choices: Iterable[str], form: Callable[[str, str], str] = format_setting
) -> tuple[list[str], str]:
    """Return the choices that another tool's term stands for, and a remark.

    `form` formats a choice that comes with a value.
    """
    known = {_normalise(choice): choice for choice in choices}
    if _normalise(word) in known:  # the same apart from case and punctuation
        return [known[_normalise(word)]], ""
    for table in read_tables():
        meaning = table.get(_normalise(word))
        if meaning is None:
            continue
        pairs = [name.partition(" ") for name in meaning.names]
        names = [form(known[_normalise(name)], value) if value else known[_normalise(name)]
                 for name, _, value in pairs if _normalise(name) in known]  # fmt: skip
        if names:
            return names, meaning.remark
    return [], ""
