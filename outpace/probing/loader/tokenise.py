"""Rates of tokenization, by the number of processes that encode text.

Text is encoded as `outpace train` does it, with a cache of words that fills up over time. Each
sample therefore starts with an empty cache, fills it with one part of the text, and is timed on
another part.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from outpace.data.parallel_encoding import Encoders
from outpace.data.tokenizer import Tokenizer
from outpace.probing.timing.interleave import Turns
from outpace.probing.timing.measure import Case, Effort, HostClock, measure, rounds_of
from outpace.records.figure import Figure, Key, Unit

Ids = np.ndarray[Any, np.dtype[np.uint32]]

_PART, _FULL_PART = 1 << 18, 1 << 20  # characters for each process
_PIECE = 1 << 15


def tokenise_figures(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    processes: Sequence[int],
    quick: bool,
    budget_s: float,
) -> Turns[list[Figure]]:
    """Measure tokens/s and bytes/s for each number of processes.

    One process means encoding in this process, with threads.
    """
    whole = "\n".join(texts)
    effort = Effort(budget_s, rounds_of(quick), sample_s=0)
    enough = [count for count in processes if len(whole) >= 2 * count * _PIECE or count == 1]
    with ExitStack() as stack:
        runs = [_TokeniserRun(tokenizer, whole, count, quick) for count in enough]
        for run in runs:
            stack.callback(run.close)
        found = yield from measure([run.case() for run in runs], HostClock(), effort)
    return [
        figure
        for run, by_tokens in zip(runs, found, strict=True)
        for figure in (by_tokens, scale_figure(by_tokens, "bytes", "B/s", run.bytes / run.tokens))
    ]


def scale_figure(figure: Figure, what: str, unit: Unit, factor: float) -> Figure:
    """Return a figure in another unit: its values times `factor`, as the quantity `what`."""

    def times(value: float | None) -> float | None:
        return None if value is None else value * factor

    return figure.model_copy(
        update={
            "key": figure.key.model_copy(update={"what": what}),
            "unit": unit,
            "value": times(figure.value),
            "low": times(figure.low),
            "high": times(figure.high),
            "rounds": tuple(tuple(v * factor for v in samples) for samples in figure.rounds),
        }
    )


class _TokeniserRun:
    """Measurement of encoding with a given number of processes.

    `tokens` and `bytes` are the amounts that one timed call encodes.
    """

    def __init__(self, tokenizer: Tokenizer, whole: str, processes: int, quick: bool) -> None:
        size = min((_PART if quick else _FULL_PART) * processes, len(whole) // 2)
        self._tokenizer, self._processes = tokenizer, processes
        self._parts = [_split_text(whole[:size]), _split_text(whole[size : 2 * size])]
        self.bytes = sum(len(text.encode()) for text in self._parts[1])
        self.tokens = sum(map(len, tokenizer.encode_batch(self._parts[1])))
        self._calls = 0
        self._open = ExitStack()
        self._encoders: Encoders | None = None

    def case(self) -> Case:
        key = Key(kind="tokenise", what="tokens", of={"processes": self._processes})
        return Case(key, "tokens/s", self._start_encoders, self.tokens, self._find_error)

    def _start_encoders(self) -> Callable[[], list[Ids]]:
        """Create encoders with an empty cache, and return the function whose calls are timed."""
        self.close()
        fresh = self._tokenizer.replace(self._tokenizer.inner, {})
        self._calls = 0
        self._encoders = self._open.enter_context(Encoders(fresh, self._processes, 0))
        return self._encode_next_part

    def _encode_next_part(self) -> list[Ids]:
        assert self._encoders is not None
        part = self._parts[min(self._calls, 1)]
        self._calls += 1
        if self._processes == 1:
            return self._encoders.submit(part).result()
        waiting = [self._encoders.submit([text]) for text in part]
        return [ids for future in waiting for ids in future.result()]

    def _find_error(self, encoded: list[Ids]) -> str | None:
        if encoded[0].tolist() == self._tokenizer.encode(self._parts[0][0]):
            return None
        return "its ids are not the tokenizer's"

    def close(self) -> None:
        self._open.close()


def _split_text(text: str) -> list[str]:
    return [text[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)] or [text]
