"""Detection of differences between a tokenizer's transformers class and its tokenizer.json."""

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers

from outpace.data.isolation import call_isolated
from outpace.data.tokenizer import Tokenizer
from outpace.interop.config import CONFIG_FILE
from outpace.interop.config_check import quiet_transformers
from outpace.records.base import keep_memo
from outpace.records.errors import BadInputError, shorten

# Classes that read tokenizer.json unchanged.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Families of trainable models for which transformers 5 uses a fixed tokenizer class, regardless of
# the class in the files (MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS).
_BY_FAMILY = frozenset({"qwen2"})
_CONFIG = "tokenizer_config.json"
# Maximum size of a tokenizer's files (vocab.json, tokenizer.model); larger files are weights.
_FILE_BYTES = 64 << 20
# Texts that reveal differences in patterns, normalizers, leading spaces and common special tokens.
_PROBES = (
    "A text", " a text", "  two  blanks ", "a", "12345 and 7", "don't DON'T it's",
    "\n\n\ta\n  b\r\n", "Été ÉTÉ Été ﬁ ①", "中文字符", "x=f(a[1])+2; // ...", "a😀b", "UPPER lower",
    "<s> </s> <unk> <pad> <mask> <bos> <eos> <|endoftext|>",
)  # fmt: skip
# Limits far above what reading a few short texts takes, including the import of transformers.
_PROBE_CPU_S, _PROBE_BYTES = 60.0, 4 << 30


def source_difference(path: Path, tokenizer: Tokenizer, cache_dir: Path) -> str | None:
    """Describe how transformers reads the tokenizer in `path` differently from outpace, or None."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "tokenizer.json").is_file() or not _may_use_special_class(folder):
        return None
    work = partial(_find_difference, folder, tokenizer, _make_probes(tokenizer))
    found = _run_cached(cache_dir, tokenizer, _read_small_files(folder), work)
    if found is None:
        return None
    return (
        f"transformers {version('transformers')} reads the tokenizer in {folder} by its class "
        f"{found['class']}, which differs from the tokenizer.json that outpace uses and exports: "
        f"{_format_ids(found)}. If the model learned the ids of tokenizer.json, as with "
        "transformers 4, load it with PreTrainedTokenizerFast.from_pretrained(DIR). If it learned "
        "the ids of the class, replace the files first: "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    )


def export_difference(tokenizer: Tokenizer, model_type: str, cache_dir: Path) -> str | None:
    """Describe how transformers will read an exported tokenizer differently, or return None."""
    if model_type not in _BY_FAMILY:
        return None
    work = partial(_find_export_difference, tokenizer, model_type, _make_probes(tokenizer))
    found = _run_cached(cache_dir, tokenizer, [model_type.encode()], work)
    if found is None:
        return None
    return (
        f"AutoTokenizer of transformers {version('transformers')} will read the exported tokenizer "
        f"by the class {found['class']}, as for every {model_type} model, which differs from this "
        f"run: {_format_ids(found)}. Load it with "
        "PreTrainedTokenizerFast.from_pretrained(DIR) instead"
    )


def _make_probes(tokenizer: Tokenizer) -> tuple[str, ...]:
    names = [token.content for token in tokenizer.inner.get_added_tokens_decoder().values()]
    names = names if len(names) <= 8 else names[:4] + names[-4:]
    return (*_PROBES, *(text for name in names for text in (f"a{name} b", f"{name}a")))


def has_class_by_family(family: str | None) -> bool:
    """Return whether transformers uses the same tokenizer class for every model of a family."""
    return family in _BY_FAMILY


def cut_as_qwen2(inner: tokenizers.Tokenizer) -> None:
    """Make a tokenizer normalize and split texts like transformers' Qwen 2 class."""
    from transformers import Qwen2Tokenizer

    with quiet_transformers():
        frame = Qwen2Tokenizer().backend_tokenizer
    inner.normalizer, inner.pre_tokenizer = frame.normalizer, frame.pre_tokenizer


def _may_use_special_class(folder: Path) -> bool:
    """Return whether transformers may use a class that does not read tokenizer.json unchanged."""
    told, config = (_read_object_or_empty(folder / name) for name in (_CONFIG, CONFIG_FILE))
    named = told.get("tokenizer_class") or config.get("tokenizer_class")
    if named is None:  # then the model's type decides; without a type, this file is not read
        return config.get("model_type") is not None
    return named not in _GENERIC or config.get("model_type") in _BY_FAMILY


def _read_object_or_empty(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        told = json.loads(path.read_text(encoding="utf-8"))
        return told if isinstance(told, dict) else {}
    return {}


def _read_small_files(folder: Path) -> list[bytes]:
    """Return the names and contents of all files that a tokenizer class might read."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file())
    small = (path for path in files if path.stat().st_size <= _FILE_BYTES)
    return [part for path in small for part in (os.fsencode(path.name), _read_bytes_or_empty(path))]


def _read_bytes_or_empty(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


def _run_cached(
    cache_dir: Path, tokenizer: Tokenizer, key: list[bytes], work: "partial[dict[str, Any] | None]"
) -> dict[str, Any] | None:
    """Run `work` in a separate process, or return its cached result, because it takes seconds.

    Cached results are distinguished by the tokenizer, the installed versions and `key`. Returns
    None if `work` fails.
    """
    digest = blake2b(digest_size=16)
    versions = (version(name).encode() for name in ("transformers", "tokenizers"))
    texts = "\0".join(_make_probes(tokenizer)).encode()
    for part in (tokenizer.fingerprint.encode(), texts, *versions, *key):
        digest.update(len(part).to_bytes(8, "little") + part)
    memo = cache_dir / "tokenizer_classes" / f"{digest.hexdigest()}.json"
    with suppress(OSError, ValueError):
        kept = json.loads(memo.read_text(encoding="utf-8"))
        if isinstance(kept, dict) and (kept.keys() >= {"class", "text"} or not kept):
            return kept or None
    try:
        found = call_isolated(work, _PROBE_CPU_S, _PROBE_BYTES)
    except BadInputError:  # unknown: it failed, or took too much time or memory
        return None
    keep_memo(memo, json.dumps(found or {}))
    return found


def _find_export_difference(
    tokenizer: Tokenizer, model_type: str, probes: tuple[str, ...]
) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tokenizer.save(folder)
        (folder / CONFIG_FILE).write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
        return _find_difference(folder, tokenizer, probes)


def _find_difference(
    folder: Path, tokenizer: Tokenizer, probes: tuple[str, ...]
) -> dict[str, Any] | None:
    """Return the first of the `probes` for which transformers gives different token IDs, or None.

    Raises BadInputError if transformers cannot load the tokenizer, or if it fails on a text and no
    other text has different token IDs.
    """
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            theirs = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # raised by any library below
            raise BadInputError(
                f"{folder}: transformers cannot read the tokenizer: {str(error).rstrip('.')}. "
                "Check that tokenizer.json and tokenizer_config.json are complete, or fetch the "
                "folder again."
            ) from None
        failed = None
        for text in probes:
            try:
                found = _compare_ids(text, tokenizer, theirs)
            except Exception as error:  # no difference
                failed = BadInputError(f"{folder}: transformers cannot encode {text!r}: {error}")
                continue
            if found is not None:
                return found
    if failed is not None:
        raise failed
    return None


def _compare_ids(text: str, tokenizer: Tokenizer, theirs: Any) -> dict[str, Any] | None:
    """Return both tokenizers' ids of a text if they differ with or without special tokens."""
    pairs = (
        (tokenizer.encode(text), theirs(text, add_special_tokens=False)["input_ids"]),
        (tokenizer.inner.encode(text).ids, theirs(text)["input_ids"]),
    )
    for here, there in pairs:
        if here != there:
            return {"class": type(theirs).__name__, "text": text, "here": here, "there": there}
    return None


def _format_ids(difference: Mapping[str, Any]) -> str:
    here, there = (shorten(str(difference[side]), 60) for side in ("here", "there"))
    return f"{difference['text']!r} is {here} here and {there} there"
