"""A comparison in a terminal: the verdict first, then what each arm took."""

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outpace.records.comparison import ArmResult, Comparison
from outpace.records.measurement import PARTS
from outpace.records.units import show_bytes, show_count, show_seconds, show_share

Show = Callable[[ArmResult], str]
_LOAD_NOTE = (
    "sent: by all ranks in a step, counted in the warm-up. idle: share of time in which ranks' "
    "main threads waited for others or for data; of GPUs, in which no kernel ran (waiting for an "
    "exchange is one). busy: mean over the GPUs of the run, and over all cores of its hosts, "
    "whoever used them."
)


def verdict_lines(comparison: Comparison) -> list[str]:
    """A sentence for each arm against the first."""
    first = comparison.arms[0].arm
    words = ("slower", "faster")
    if comparison.experiment.metric is not None:
        words = ("higher", "lower")
    lines = []
    for one in comparison.arms[1:]:
        failure = _failure(comparison, one)
        if failure is not None:
            lines.append(f"{one.arm} failed: {failure}")
        elif one.verdict is not None:
            lines.append(one.verdict.words(one.arm, first, words))
    own = _failure(comparison, comparison.arms[0])
    return [f"{first} failed: {own}", *lines] if own is not None else lines


def _failure(comparison: Comparison, arm: ArmResult) -> str | None:
    """Why an arm has no figure at all."""
    own = [one for one in comparison.outcomes if one.arm == arm.arm]
    if not own or any(one.value is not None for one in own):
        return None
    return own[-1].failure


def shown(comparison: Comparison, where: str | None = None) -> RenderableType:
    """For a terminal of 80 columns or more."""
    parts: list[RenderableType] = [Text()]
    parts += [Text(line, style="bold") for line in verdict_lines(comparison)]
    parts += [Text(), _arms(comparison, _figures())]
    if any(arm.parts for arm in comparison.arms):
        parts += [Text(), _parts(comparison)]
    load = _arms(comparison, _LOAD)
    if load.columns[1:]:
        parts += [Text(), load, Text(_LOAD_NOTE, style="dim")]
    notes = [comparison.losses] if comparison.losses else []
    notes += comparison.differing
    rounds = 1 + max((one.round for one in comparison.outcomes), default=-1)
    notes.append(f"{rounds} rounds in {show_seconds(comparison.took_s)}: {comparison.stopped}.")
    parts += [Text(), *(Text(note) for note in notes)]
    if where is not None:
        parts.append(Text(f"kept in {where}; again: {shlex.join(comparison.command)}"))
    return Group(*parts)


def _arms(comparison: Comparison, of: Mapping[str, Show]) -> Table:
    """A row an arm; of the columns those in which anything is known."""
    kept = _filled(comparison, of)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in kept:
        table.add_column(name, justify="right")
    for arm in comparison.arms:
        table.add_row(Text(arm.arm), *(show(arm) for show in kept.values()))
    return table


def _known(name: str, show: Callable[[Any], str]) -> Show:
    return lambda arm: "–" if getattr(arm, name) is None else show(getattr(arm, name))


# What arms send, and how busy they keep what they have.
_LOAD: Mapping[str, Show] = {
    "sent a step": _known("sent_bytes", show_bytes),
    "idle": _known("idle_share", show_share),
    "GPU busy": _known("device_utilisation", show_share),
    "cores busy": _known("core_utilisation", show_share),
}


def columns(comparison: Comparison) -> dict[str, Show]:
    """Name -> what it shows of an arm, of those that anything is known of."""
    return _filled(comparison, {**_figures(), **_LOAD})


def _filled(comparison: Comparison, of: Mapping[str, Show]) -> dict[str, Show]:
    return {
        name: show for name, show in of.items() if any(show(arm) != "–" for arm in comparison.arms)
    }


def _figures() -> dict[str, Show]:

    def ratio(arm: ArmResult) -> str:
        if arm.verdict is None or arm.verdict.slowdown is None:
            return "–"
        return f"{1 + arm.verdict.slowdown:.3f}"

    def interval(arm: ArmResult) -> str:
        if arm.verdict is None or arm.verdict.low is None or arm.verdict.high is None:
            return "–"
        return f"{1 + arm.verdict.low:.3f}–{1 + arm.verdict.high:.3f}"

    return {
        "metric": _known("metric", lambda value: f"{value:.6g}"),
        "step": _known("step_time_s", show_seconds),
        "ratio": ratio,
        "95 %": interval,
        "tokens/s": _known("tokens_per_s", lambda value: f"{value:,.0f}"),
        "FLOP/s": _known("model_flops_per_s", show_count),
        "MFU": _known("mfu", show_share),
        "memory": _known("peak_memory_bytes", show_bytes),
        "loss": _known("final_loss", lambda value: f"{value:.4f}"),
        "per M tokens": _known("price_per_million_tokens", lambda value: f"{value:.4g}"),
    }


def _parts(comparison: Comparison) -> RenderableType:
    """Where a step's time goes, by arm."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("of a step")
    for part in PARTS:
        table.add_column(part, justify="right")
    for arm in comparison.arms:
        if arm.parts is not None:
            each = [getattr(arm.parts, f"{part}_s") for part in PARTS]
            table.add_row(Text(arm.arm), *(show_seconds(value) for value in each))
    return table
