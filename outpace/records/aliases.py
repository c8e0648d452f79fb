"""Names that other tools have for outpace's options, keys and values.

They come from transformers' TrainingArguments (4 and 5), accelerate's launcher and configuration,
torchtitan, Megatron-LM, DeepSpeed, axolotl, nanoGPT, Lightning's Trainer, torchrun, and from the
names that nvidia-smi and cloud providers give to machines. An alias is only suggested; it sets
nothing.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class Meaning(NamedTuple):
    """Possible names in outpace, of which a command suggests only those that it has, and a remark.

    A name may be followed by a space and a value.
    """

    names: tuple[str, ...]
    remark: str = ""


@lru_cache
def read_tables() -> tuple[dict[str, Meaning], dict[str, Meaning]]:
    """Read the meanings of settings and of values, by alias, from aliases.json.

    An entry of the file is a meaning, with all its aliases as the key: outpace's names, between |,
    alone or in a list with a remark.
    """
    tables = json.loads(Path(__file__).with_name("aliases.json").read_text("utf-8"))
    return _read_meanings(tables["settings"]), _read_meanings(tables["values"])


def _read_meanings(groups: dict[str, dict[str, str | list[str]]]) -> dict[str, Meaning]:
    meanings: dict[str, Meaning] = {}
    for rows in groups.values():
        for aliases, meant in rows.items():
            names, *remark = [meant] if isinstance(meant, str) else meant
            meaning = Meaning(tuple(names.split("|")), *remark)
            meanings |= dict.fromkeys(map(_plain, aliases.split()), meaning)
    return meanings


def _plain(name: str) -> str:
    """Normalise a name: convert it to lower case, and keep only letters and digits."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def format_setting(name: str, value: str) -> str:
    """Format a setting with its value, for a command line, or for a file and Python."""
    if name.startswith("--"):
        return f"{name} {value}"
    return f"{name} = {value}" if value.isdigit() else f'{name} = "{value}"'


def translate_alias(
    word: str, choices: Iterable[str], form: Callable[[str, str], str] = format_setting
) -> tuple[list[str], str]:
    """Return outpace's names for another tool's word, and a remark.

    Some names have a value; `form` writes both.
    """
    known = {_plain(choice): choice for choice in choices}
    if _plain(word) in known:  # apart from dashes and capitals
        return [known[_plain(word)]], ""
    for table in read_tables():
        meaning = table.get(_plain(word))
        if meaning is None:
            continue
        pairs = [name.partition(" ") for name in meaning.names]
        names = [form(known[_plain(name)], value) if value else known[_plain(name)]
                 for name, _, value in pairs if _plain(name) in known]  # fmt: skip
        if names:
            return names, meaning.remark
    return [], ""
