"""Writing what other trainers read: comments, TOML, YAML, and the command that starts ranks."""

import json
import math
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from outpace.interop.export.request import hosts

_WIDTH = 98


class Placeholder(str):
    """A word in the place of a value: TOML has no such value, and its readers stop at the line."""

    __slots__ = ()


# You put the address in place of this word before starting several hosts.
HEAD = "$HEAD_NODE"


def comments(sentences: Iterable[str], bullet: str = "# ") -> str:
    """Lines that a reader of TOML, YAML or shell passes over, each sentence wrapped."""
    return "".join(
        line + "\n"
        for sentence in sentences
        for line in textwrap.wrap(
            sentence,
            _WIDTH,
            initial_indent=bullet,
            subsequent_indent="#" + " " * (len(bullet) - 1),
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def heading(tool: str, title: str, notes: Iterable[str]) -> str:
    """Return the comments that a file begins with: what it is, and what it does not say."""
    notes = tuple(notes)
    said = comments([f"A plan of outpace for {tool}.", title])
    if not notes:
        return said + "\n"
    return said + "#\n# What this file does not say:\n" + comments(notes, "# - ") + "\n"


def as_json(values: Mapping[str, Any]) -> str:
    """Indented JSON in the order given."""
    return json.dumps(values, indent=2) + "\n"


def as_yaml(values: Mapping[str, Any]) -> str:
    """YAML in the order given."""
    import yaml

    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text


def as_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values, their names dotted where they lie in others."""
    parts = []
    for name, table in tables.items():
        lines = [f"{key} = {_toml_value(value)}" for key, value in table.items()]
        parts.append("\n".join([f"[{name}]", *lines]) + "\n")
    return "\n".join(parts)


def _toml_value(value: Any) -> str:
    if isinstance(value, Placeholder):
        return value
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def torchrun(ranks: int, *words: str, module: bool = False) -> str:
    """Return the command that starts `ranks` processes of a program, the same on every host."""
    nodes, each = hosts(ranks)
    many = [f"--nnodes={nodes}", f"--nproc-per-node={each}"]
    if nodes == 1:
        many = ["--standalone", f"--nproc-per-node={each}"]
    else:
        many += ["--rdzv-backend=c10d", f'--rdzv-endpoint="{HEAD}:29500"']
    return " ".join(["torchrun", *many, *(["-m"] if module else []), *map(quote, words)])


def quote(word: str) -> str:
    """Return a word for a shell; a variable stays one."""
    return word if word.startswith("$") else shlex.quote(word)
