"""Small trees of files, and strategies that break one of them as people, disks and networks do."""

import copy
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Link:
    """A symbolic link in the place of a file."""

    target: str


class Instead(Enum):
    """What else there may be in the place of a file."""

    FOLDER = "a folder"
    GONE = "nothing"


Content = bytes | Link | Instead
Tree = Mapping[str, Content]
Draw = Callable[[st.SearchStrategy[Any]], Any]

# Nested further than Python's own parsers go, and as far as they just do; of more digits than int
# takes. They stand in JSON as these words, since nothing could write them.
_SPELT = {
    "<deep>": b"[" * 100_000,
    "<nested>": b"[" * 900 + b"]" * 900,
    "<objects>": b'{"a":' * 400 + b"1" + b"}" * 400,
    "<digits>": b"9" * 5000,
}
_EDGES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 1000, 10**6, 2**31, -(2**31), 2**63 - 1, 2**63, 2**64,
    10**400, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"), "", " ", "\0",
    "\ud800", "²", "1e400", "nan", "-1", "none", "x" * 5000, "x" * 300, "a/b", "..", "/dev/null",
    "~nobody/x", "[red]x", "<script>", [], {}, [[]], [None], {"": None}, *_SPELT,
)  # fmt: skip
# Copied, since what is put into a value may be changed there.
JUNK = st.sampled_from(_EDGES).map(copy.deepcopy) | st.recursive(
    st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
_FEW = st.sampled_from((1, 1, 1, 2))
_TEXTS = (
    b"", b"\n", b"\0", b" " * 9, b"\xff\xfe", b"\xef\xbb\xbf", b"\x80abc\n", b"null", b"[]", b"{}",
    b"[1]", b'"x"', b"1", b"NaN", b"{", b"[", b'{"', b'{"a":' * 100_000, *_SPELT.values(),
)  # fmt: skip


def written(value: Any) -> bytes:
    """JSON, with NaN and half surrogate pairs as Python writes them."""
    text = json.dumps(value).encode()
    for word, stands_for in _SPELT.items():
        text = text.replace(json.dumps(word).encode(), stands_for)
    return text


def toml(table: Mapping[str, Any]) -> bytes:
    """A table of TOML, every table in it in one line."""
    return "\n".join(f"{_key(key)} = {_toml(value)}" for key, value in table.items()).encode(
        errors="surrogatepass"
    )


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quoted(key)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return _SPELT.get(value, b"").decode() or _quoted(value)
    if isinstance(value, bool):
        return str(value).lower()
    return "''" if value is None else str(value)


@st.composite
def broken(draw: Draw, trees: Sequence[Tree]) -> Tree:
    """One of the trees, in which a file or two are not what they were."""
    tree = dict(draw(st.sampled_from(trees)))
    for _ in range(draw(_FEW)):
        name = draw(st.sampled_from(sorted(tree)))
        if draw(st.integers(0, 11)):
            tree[name] = _changed(draw, name, tree[name])
        else:
            loop = Link(Path(name).name)
            others = (*Instead, Link("nothing"), loop, Link("."))
            tree[name] = draw(st.sampled_from(others))
    return tree


def _changed(draw: Draw, name: str, content: Content) -> Content:
    if not isinstance(content, bytes):
        return content
    by_kind = _KINDS.get(Path(name).suffix)
    if by_kind is None or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from((_bytes, _lines)))(draw, content)
    try:
        return by_kind(draw, content)
    except (ValueError, TypeError, IndexError, RecursionError, struct.error):  # broken before
        return _bytes(draw, content)


def _bytes(draw: Draw, content: bytes) -> bytes:
    """Cut, flipped, doubled, in another encoding, or something else altogether."""
    at, end = sorted(draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    part = content[at:end]
    return draw(
        st.sampled_from(_TEXTS)
        | st.binary(max_size=8).map(lambda new: content[:at] + new + content[at:])
        | st.binary(min_size=1, max_size=4).map(
            lambda new: content[:at] + new + content[at + len(new) :]
        )
        | st.sampled_from((
            content[:at], content[at:], content[:at] + content[end:], content + part,
            content.decode("latin-1").encode("utf-16"), b"\xef\xbb\xbf" + content,
            content.replace(b"\n", b"\r\n"), content + b"\0" * 9,
        ))
    )  # fmt: skip


def _lines(draw: Draw, content: bytes) -> bytes:
    """With a line left out, twice, in another place, or with another word in it."""
    lines = content.split(b"\n")
    at, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(other, lines[at])
    elif kind == 2:
        lines[at], lines[other] = lines[other], lines[at]
    else:
        words = lines[at].split(b" ")
        words[draw(st.integers(0, len(words) - 1))] = draw(_WORDS)
        lines[at] = b" ".join(words)
    return b"\n".join(lines)


_WORDS = st.sampled_from(_TEXTS[:-5]) | st.sampled_from(_EDGES).map(
    lambda value: str(value).encode(errors="surrogatepass")
)


def _json(draw: Draw, content: bytes) -> bytes:
    text = written(altered(draw, json.loads(content)))
    if draw(st.integers(0, 15)) == 0:  # a key twice
        key = draw(st.sampled_from(sorted(json.loads(content)) or [""]))
        text = text.replace(b"{", b"{" + json.dumps(key).encode() + b": null, ", 1)
    return text


def _json_lines(draw: Draw, content: bytes) -> bytes:
    lines = content.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = written(altered(draw, json.loads(lines[at])))
    return b"\n".join(lines) + draw(st.sampled_from((b"\n", b"")))


def _toml_file(draw: Draw, content: bytes) -> bytes:
    import tomllib

    table = altered(draw, tomllib.loads(content.decode()))
    return toml(table) if isinstance(table, dict) else written(table)


def altered(draw: Draw, value: Any) -> Any:
    """The value with one change or two anywhere in it."""
    root = [copy.deepcopy(value)]
    for _ in range(draw(_FEW)):
        places = list(_places(root))
        holder, key = draw(st.sampled_from(places))
        kind = draw(st.integers(0, 9))
        if kind == 0 and holder is not root:
            del holder[key]
        elif kind == 1:
            holder[key] = [holder[key]]
        elif kind == 2 and isinstance(holder[key], dict):
            holder[key][draw(st.text(max_size=8))] = draw(JUNK)
        elif kind == 3 and isinstance(holder[key], list):
            holder[key] = holder[key] * 2
        elif kind == 4 and type(holder[key]) in (int, float):
            holder[key] = draw(
                st.sampled_from((-holder[key], holder[key] * 10**9, str(holder[key])))
            )
        elif kind == 5:  # what is right elsewhere
            other, there = draw(st.sampled_from(places))
            holder[key] = copy.deepcopy(other[there]) if there in _keys(other) else None
        else:
            holder[key] = draw(JUNK)
    return root[0]


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or object in the value with each of its places."""
    for key in _keys(holder):
        yield holder, key
        if isinstance(holder[key], (dict, list)):
            yield from _places(holder[key])


def _safetensors(draw: Draw, content: bytes) -> bytes:
    """Another header, as long as it says or not."""
    size = struct.unpack_from("<Q", content)[0]
    header = written(altered(draw, json.loads(content[8 : 8 + size])))
    said = draw(st.sampled_from((len(header), len(header) - 1, 0, 2**40, 2**64 - 1)))
    return struct.pack("<Q", said) + header + content[8 + size :]


def _index(draw: Draw, content: bytes) -> bytes:
    """Megatron's: another number somewhere."""
    found = bytearray(content)
    kind, size = draw(st.sampled_from((("<B", 1), ("<i", 4), ("<q", 8))))
    at = draw(st.sampled_from((9, 17, 18, 26)) | st.integers(9, max(9, len(found) - size)))
    number = draw(st.integers(-(2 ** (8 * size - 1)), 2 ** (8 * size - 1) - 1) | st.integers(0, 9))
    struct.pack_into(kind, found, at, number % 256 if size == 1 else number)
    return bytes(found)


_KINDS: Mapping[str, Callable[[Draw, bytes], bytes]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".toml": _toml_file,
    ".safetensors": _safetensors,
    ".idx": _index,
}
