"""A comparison in a terminal: the verdict first, then what each arm took."""

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outpace.records.comparison import ArmResult, Comparison
from outpace.records.measurement import PARTS
from outpace.records.units import show_bytes, show_count, show_seconds, show_share

Show = Callable[[ArmResult], str]


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
    parts += [Text(), _table(comparison)]
    if any(arm.parts for arm in comparison.arms):
        parts += [Text(), _parts(comparison)]
    notes = [comparison.losses] if comparison.losses else []
    notes += comparison.differing
    rounds = 1 + max((one.round for one in comparison.outcomes), default=-1)
    notes.append(f"{rounds} rounds in {show_seconds(comparison.took_s)}: {comparison.stopped}.")
    parts += [Text(), *(Text(note) for note in notes)]
    if where is not None:
        parts.append(Text(f"kept in {where}; again: {' '.join(comparison.command)}"))
    return Group(*parts)


def _table(comparison: Comparison) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = _columns(comparison)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for arm in comparison.arms:
        table.add_row(Text(arm.arm), *(show(arm) for show in columns.values()))
    return Padding(table, (0, 0))


def _columns(comparison: Comparison) -> dict[str, Show]:
    """Name -> what it shows of an arm, of those that anything is known of."""

    def ratio(arm: ArmResult) -> str:
        if arm.verdict is None or arm.verdict.slowdown is None:
            return "–"
        return f"{1 + arm.verdict.slowdown:.3f}"

    def interval(arm: ArmResult) -> str:
        if arm.verdict is None or arm.verdict.low is None or arm.verdict.high is None:
            return "–"
        return f"{1 + arm.verdict.low:.3f}–{1 + arm.verdict.high:.3f}"

    def known(name: str, show: Callable[[Any], str]) -> Show:
        return lambda arm: "–" if getattr(arm, name) is None else show(getattr(arm, name))

    found: dict[str, Show] = {
        "metric": known("metric", lambda value: f"{value:.6g}"),
        "step": known("step_time_s", show_seconds),
        "ratio": ratio,
        "95 %": interval,
        "tokens/s": known("tokens_per_s", lambda value: f"{value:,.0f}"),
        "FLOP/s": known("model_flops_per_s", show_count),
        "MFU": known("mfu", show_share),
        "memory": known("peak_memory_bytes", show_bytes),
        "loss": known("final_loss", lambda value: f"{value:.4f}"),
        "per M tokens": known("price_per_million_tokens", lambda value: f"{value:.4g}"),
    }
    return {
        name: show
        for name, show in found.items()
        if any(show(arm) != "–" for arm in comparison.arms)
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
