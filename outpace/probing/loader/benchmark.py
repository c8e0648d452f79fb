"""Rates at which a user's data is loaded, by number of workers, prefetching and pinned memory.
outpace's loader is timed as training uses it, and torch's DataLoader with workers that tokenize
text, as in trainers without prepared tokens. Loaders stay open from round to round. Each call reads
more batches than the queues hold, so it measures how fast batches are made, not how fast a full
queue is emptied.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from outpace.data.loader import Loader, collate
from outpace.data.workers import starting_workers
from outpace.probing.hardware.machine import usable_cores
from outpace.probing.loader.advice import advise
from outpace.probing.loader.dataset import LoaderData, LoaderInput, prepare_input
from outpace.probing.loader.tokenise import scale_figure, tokenise_figures
from outpace.probing.timing.interleave import Turns, interleave_turns
from outpace.probing.timing.measure import Case, Effort, HostClock, measure, rounds_of
from outpace.probing.timing.section import ProbeSection
from outpace.records.figure import Figure, Key

PREFETCH = 2  # outpace's and torch's default
_OTHER_PREFETCH, _FULL_OTHER_PREFETCH = (4,), (1, 4, 8)
_QUICK_WORKERS = 4
# Worker counts (besides the largest) for which other settings are varied. They are few, since all
# loaders are open at the same time.
_CROSSED = (1, 2, 4, 8)
_ENDLESS = 1 << 40
_CALL_S = 0.015
_LOCATED = 32
_SAMPLE_S, _FULL_SAMPLE_S = 0.015, 0.03
# Shares of the time budget.
_RATES, _STARTS, _TOKENISING = 0.60, 0.10, 0.30

Progress = Callable[[float], None]
CPU = torch.device("cpu")


def probe_loader(
    data: LoaderData,
    quick: bool,
    budget_s: float,
    progress: Progress = lambda share: None,
    device: torch.device = CPU,
) -> Turns[ProbeSection]:
    """Measure data loading and tokenization, and recommend settings.

    Raises BadInputError for data that cannot be read.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outpace-probe-")))
        ready = prepare_input(data, folder, quick)
        bench = _LoaderBench(ready, data.micro_batch, device, quick, stack)
        found = yield from interleave_turns(
            bench.throughput(_RATES * budget_s, progress),
            bench.starts(_STARTS * budget_s),
            _time_tokenising(ready, quick, _TOKENISING * budget_s),
        )
    figures = [figure for part in found for figure in part]
    advice = advise(figures)
    notes = [*ready.notes, *bench.notes()]
    if not any(one.about == "loader" for one in advice):
        notes.append(
            "loader: the machine was not steady enough to recommend a number of workers; end "
            "other programs and probe again"
        )
    return ProbeSection(tuple(figures), advice, tuple(notes))


def _time_tokenising(ready: LoaderInput, quick: bool, budget_s: float) -> Turns[list[Figure]]:
    if ready.tokenizer is None or not ready.texts:
        return []
    counts = [count for count in _worker_counts(quick) if count]
    processes = sorted({1, counts[-1]}) if quick else counts
    return (yield from tokenise_figures(ready.texts, ready.tokenizer, processes, quick, budget_s))


def _worker_counts(quick: bool) -> list[int]:
    cores = usable_cores()
    most = min(cores, _QUICK_WORKERS) if quick else cores
    return sorted({0, most, *(1 << n for n in range(most.bit_length()) if 1 << n <= most)})


@contextmanager
def _one_thread_for_each_tokenizer() -> Iterator[None]:
    """Limit tokenizers to one thread, since workers run in parallel and forks would warn."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@dataclass(frozen=True)
class _Setting:
    """Settings of a loader: outpace's, torch's on the same tokens, or one that tokenizes text."""

    loader: str
    workers: int
    prefetch: int = PREFETCH
    pin: bool = False

    def key(self, what: str) -> Key:
        of: dict[str, str | int] = {"loader": self.loader, "workers": self.workers}
        if self.workers:
            of["prefetch"] = self.prefetch
        of["pin"] = "yes" if self.pin else "no"
        return Key(kind="loader", what=what, of=of)


@dataclass
class _OpenLoader:
    """A running loader. A call reads `batches` batches and returns the first one."""

    batches_of: Iterator[Any]
    close: Callable[[], None]
    device: torch.device
    batches: int = 1

    def __call__(self) -> Any:
        first = next(self.batches_of)
        for _ in range(self.batches - 1):
            next(self.batches_of)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return first


@dataclass
class _LoaderBench:
    ready: LoaderInput
    micro_batch: int
    device: torch.device
    quick: bool
    stack: ExitStack
    _reference: dict[str, Any] = field(default_factory=dict)
    _found: list[str] = field(default_factory=list)

    def settings(self) -> list[_Setting]:
        """Return the loader settings to time.

        outpace's loader is timed with every number of workers, and torch's with several numbers of
        workers and of prefetched batches. On a GPU, both are also timed with pinned memory. A quick
        probe times torch's loader only with the most workers, and pinned memory only for outpace's
        loader, without workers and with the most.
        """
        counts = _worker_counts(self.quick)
        most = counts[-1]
        crossed = [most] if self.quick else [n for n in counts if n in (*_CROSSED, most) and n]
        found = [_Setting("outpace", count) for count in counts]
        if self.ready.as_text is not None:
            text = counts if not self.quick else (counts[0], most)
            found += [_Setting("text", count) for count in text]
        other = _OTHER_PREFETCH if self.quick else _FULL_OTHER_PREFETCH
        torchs = [(count, prefetch) for count in crossed for prefetch in (PREFETCH, *other)]
        found += [_Setting("torch", *one) for one in torchs]
        if self.device.type == "cuda":
            pinned = (0, most) if self.quick else counts
            found += [_Setting("outpace", count, pin=True) for count in pinned]
            found += [] if self.quick else [_Setting("torch", *one, pin=True) for one in torchs]
        return found

    def notes(self) -> Iterator[str]:
        if self.device.type != "cuda":
            yield "loader: pinned memory is not timed, since there is no CUDA device to copy to"
        yield from dict.fromkeys(self._found)

    def throughput(self, budget_s: float, progress: Progress) -> Turns[list[Figure]]:
        """Measure samples/s and, if samples have a fixed number of tokens, tokens/s."""
        settings = self.settings()
        sample_s = _SAMPLE_S if self.quick else _FULL_SAMPLE_S
        with _one_thread_for_each_tokenizer():
            cases = [self._make_case(setting) for setting in settings]
        effort = Effort(budget_s, rounds_of(self.quick), sample_s)
        figures = yield from measure(cases, HostClock(), effort, progress)
        found = []
        for setting, figure in zip(settings, figures, strict=True):
            tokens = self._sample_tokens(setting)
            if tokens is not None:
                found.append(scale_figure(figure, "tokens", "tokens/s", tokens))
            found.append(figure)
        return found

    def _sample_tokens(self, setting: _Setting) -> float | None:
        if setting.loader == "text" and self.ready.as_text is not None:
            return self.ready.as_text.mean_tokens
        return self.ready.sample_tokens

    def _make_case(self, setting: _Setting) -> Case:
        running = self._open_loader(setting)
        self.stack.callback(running.close)
        wrong = self._find_error(setting, running())
        # Read more batches than the queues hold, because they fill up while other settings are
        # timed.
        waiting = setting.workers * (setting.prefetch + 1)
        running.batches = max(1, waiting)
        HostClock().seconds(running, 1)
        each_s = HostClock().seconds(running, 1) / running.batches
        running.batches = max(running.batches, round(_CALL_S / each_s))

        @contextmanager
        def alone_in_turn() -> Iterator[None]:
            with _one_thread_for_each_tokenizer():
                yield
            time.sleep(waiting * each_s)  # workers fill their queues before others are timed

        return Case(setting.key("samples"), "samples/s", lambda: running,
                    running.batches * self.micro_batch, lambda _: wrong, alone_in_turn)  # fmt: skip

    def _find_error(self, setting: _Setting, first: Any) -> str | None:
        """Return how `first` differs from the first batch of the loader's first run; None if equal.

        The samples of a user's data set may be random. If they differ, that is no error, but a note
        is added.
        """
        wrong = _describe_difference(first, self._reference.setdefault(setting.loader, first))
        if wrong is None or setting.loader == "text" or hasattr(self.ready.tokens, "locate"):
            return wrong
        if setting.loader == "outpace":
            self._found.append(
                "loader: the data set returns different samples with workers: it uses random "
                "numbers other than torch's, NumPy's and Python's"
            )
        return None

    def starts(self, budget_s: float) -> Turns[list[Figure]]:
        """Measure the seconds from opening a loader with workers until its first batch."""
        starter = _Starter(self._open_loader, _Setting("outpace", _worker_counts(self.quick)[-1]))
        case = Case(starter.setting.key("start"), "s", lambda: starter, within=starter.sample)
        effort = Effort(budget_s, rounds_of(self.quick), sample_s=0, wakes=False)
        return (yield from measure([case], HostClock(), effort))

    def _open_loader(self, setting: _Setting) -> _OpenLoader:
        if setting.loader == "outpace":
            loader = Loader(
                self.ready.tokens, seed=0, global_batch=self.micro_batch,
                micro_batch=self.micro_batch, rank=0, data_parallel=1, start_step=0,
                total_steps=_ENDLESS, workers=setting.workers, pin_memory=setting.pin,
                device=self.device,
            )  # fmt: skip
            return _OpenLoader((step[0] for step in loader), loader.close, self.device)
        dataset: Any = self.ready.tokens if setting.loader == "torch" else self.ready.as_text
        with starting_workers() as begin:
            running = iter(
                DataLoader(
                    dataset,
                    batch_sampler=_BatchKeys(dataset, self.micro_batch),
                    num_workers=setting.workers,
                    collate_fn=collate,
                    prefetch_factor=setting.prefetch if setting.workers else None,
                    pin_memory=setting.pin,
                    worker_init_fn=begin,
                )
            )
        close = getattr(running, "_shutdown_workers", _close_nothing)
        return _OpenLoader(self._copy_to_device(running), close, self.device)

    def _copy_to_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Copy batches to the device like outpace's loader; pinned memory makes this faster."""
        if self.device.type == "cpu":
            return batches
        to = partial(_move_leaf, self.device)
        return (tree_map(to, batch) for batch in batches)


def _close_nothing() -> None:
    pass


def _move_leaf(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf


@dataclass
class _Starter:
    """Function to time: each call opens a loader and waits for its first batch."""

    open: Callable[[_Setting], _OpenLoader]
    setting: _Setting
    opened: list[_OpenLoader] = field(default_factory=list)

    def __call__(self) -> None:
        running = self.open(self.setting)
        self.opened.append(running)
        running()

    @contextmanager
    def sample(self) -> Iterator[None]:
        """Run a measurement in this context, then stop its workers, which would disturb others."""
        try:
            with _one_thread_for_each_tokenizer():
                yield
        finally:
            while self.opened:
                self.opened.pop().close()


class _BatchKeys:
    """Endless batch sampler, in the order of training if the data set defines one (`locate`)."""

    def __init__(self, dataset: Any, micro_batch: int) -> None:
        self._dataset, self._micro_batch = dataset, micro_batch

    def __iter__(self) -> Iterator[list[Any]]:
        at_once = _LOCATED * self._micro_batch
        locate = getattr(self._dataset, "locate", None)
        for begin in range(0, _ENDLESS, at_once):
            places = np.arange(begin, begin + at_once)
            keys = locate(0, places) if locate else (places % len(self._dataset)).tolist()
            for first in range(0, at_once, self._micro_batch):
                yield keys[first : first + self._micro_batch]


def _describe_difference(batch: Any, reference: Any) -> str | None:
    both = zip(tree_leaves(batch), tree_leaves(reference), strict=True)
    for a, b in both:
        if isinstance(a, Tensor) and not torch.equal(a, b):
            return "its first batch differs from the one loaded without workers"
    return None
