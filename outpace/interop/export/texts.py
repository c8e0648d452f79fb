"""Text in the exported formats: comments, JSON, YAML, TOML, and launch commands."""

import json
import math
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from outpace.interop.export.request import hosts

_WIDTH = 98


class Placeholder(str):
    """A placeholder for a value. It is invalid TOML, so that parsers fail at its line."""

    __slots__ = ()


# Environment variable for commands on several hosts. If it is not set, the shell stops at HEAD.
HEAD_NODE, HEAD_MEANING = "HEAD_NODE", "the address of the first host"
HEAD = f"${{{HEAD_NODE}:?set it to {HEAD_MEANING}}}"


def comments(sentences: Iterable[str], bullet: str = "# ") -> str:
    """Format sentences as wrapped comments for TOML, YAML or a shell."""
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
    """Return the comments at the start of a file: a summary of the plan, and notes."""
    notes = tuple(notes)
    said = comments([f"An outpace plan for {tool}.", title])
    if not notes:
        return said + "\n"
    return said + "#\n# This file does not specify:\n" + comments(notes, "# - ") + "\n"


def as_json(values: Mapping[str, Any]) -> str:
    """Format values as indented JSON, in the given order."""
    return json.dumps(values, indent=2) + "\n"


def as_yaml(values: Mapping[str, Any]) -> str:
    """Format values as YAML, in the given order."""
    import yaml

    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text


def as_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Format tables of plain values as TOML; nested tables have dotted names."""
    parts = []
    for name, table in tables.items():
        lines = [f"{key} = {_format_toml_value(value)}" for key, value in table.items()]
        parts.append("\n".join([f"[{name}]", *lines]) + "\n")
    return "\n".join(parts)


def _format_toml_value(value: Any) -> str:
    if isinstance(value, Placeholder):
        return value
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def torchrun(ranks: int, *words: str, module: bool = False) -> str:
    """Return a torchrun command for `ranks` ranks, which is the same on all hosts."""
    nodes, each = hosts(ranks)
    many = [f"--nnodes={nodes}", f"--nproc-per-node={each}"]
    if nodes == 1:
        many = ["--standalone", f"--nproc-per-node={each}"]
    else:
        many += ["--rdzv-backend=c10d", f'--rdzv-endpoint="{HEAD}:29500"']
    return " ".join(["torchrun", *many, *(["-m"] if module else []), *map(quote, words)])


def quote(word: str) -> str:
    """Quote a word for a shell, unless it is a variable."""
    return word if word.startswith("$") else shlex.quote(word)
