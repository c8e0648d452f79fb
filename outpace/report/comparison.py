"""A comparison in a terminal: the verdict first, then what each arm took."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outpace.records.comparison import ArmResult, Comparison, left
from outpace.records.measurement import PARTS
from outpace.records.units import show_bytes, show_count, show_seconds, show_share

_LOAD_NOTE = (
    "sent: by all ranks in a step, counted in the warm-up. idle: share of time in which ranks' "
    "main threads waited for others or for data; of GPUs, in which no kernel ran (waiting for an "
    "exchange is one). busy: mean over the GPUs of the run, and over all cores of its hosts, "
    "whoever used them."
)


@dataclass(frozen=True)
class Column:
    """A figure of arms: an attribute of theirs, or of their verdicts, and how it is shown."""

    name: str
    attribute: str
    show: Callable[[Any], str]

    def value(self, arm: ArmResult) -> Any:
        """None where it is not known."""
        owner = arm if hasattr(arm, self.attribute) else arm.verdict
        return getattr(owner, self.attribute, None)

    def text(self, arm: ArmResult) -> str:
        """As a person reads it."""
        value = self.value(arm)
        return "–" if value is None else self.show(value)


_FIGURES = (
    Column("metric", "metric", lambda value: f"{value:.6g}"),
    Column("step", "step_time_s", show_seconds),
    Column("ratio", "slowdown", lambda value: f"{1 + value:.3f}"),
    Column("95 %", "interval", lambda ends: f"{1 + ends[0]:.3f}–{1 + ends[1]:.3f}"),
    Column("tokens/s", "tokens_per_s", lambda value: f"{value:,.0f}"),
    Column("FLOP/s", "model_flops_per_s", show_count),
    Column("MFU", "mfu", show_share),
    Column("memory", "peak_memory_bytes", show_bytes),
    Column("loss", "final_loss", lambda value: f"{value:.4f}"),
    Column("per M tokens", "price_per_million_tokens", lambda value: f"{value:.4g}"),
)
# What arms get through and send, and how busy they keep what they have.
_LOAD = (
    Column("samples/s", "samples_per_s", lambda value: f"{value:,.1f}"),
    Column("sent a step", "sent_bytes", show_bytes),
    Column("idle", "idle_share", show_share),
    Column("GPU busy", "device_utilisation", show_share),
    Column("cores busy", "core_utilisation", show_share),
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
    left_out = _left_out(comparison)
    lines += [f"{name} was left out after some rounds: {why}" for name, why in left_out.items()]
    own = _failure(comparison, comparison.arms[0])
    return [f"{first} failed: {own}", *lines] if own is not None else lines


def _failure(comparison: Comparison, arm: ArmResult) -> str | None:
    """Why an arm has no figure at all."""
    own = [one for one in comparison.outcomes if one.arm == arm.arm]
    if not own or any(one.value is not None for one in own):
        return None
    return own[-1].failure


def _left_out(comparison: Comparison) -> dict[str, str | None]:
    """Of arms that have a figure and failed too often, before or after it, why they did."""
    kept = {arm.name for arm in left(comparison.experiment, comparison.outcomes)}
    found: dict[str, str | None] = {}
    for one in comparison.outcomes:
        if one.arm not in kept and one.value is None:
            found[one.arm] = one.failure
    return {
        arm.arm: found[arm.arm]
        for arm in comparison.arms
        if arm.arm in found and _failure(comparison, arm) is None
    }


def shown(comparison: Comparison) -> RenderableType:
    """For a terminal of 80 columns or more."""
    parts: list[RenderableType] = [Text()]
    parts += [Text(line, style="bold") for line in verdict_lines(comparison)]
    parts += [Text(), _arms(comparison, _FIGURES)]
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
    return Group(*parts)


def _arms(comparison: Comparison, of: Sequence[Column]) -> Table:
    """A row an arm; of the columns those in which anything is known."""
    kept = _filled(comparison, of)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in kept:
        table.add_column(column.name, justify="right")
    for arm in comparison.arms:
        table.add_row(Text(arm.arm), *(column.text(arm) for column in kept))
    return table


def columns(comparison: Comparison) -> list[Column]:
    """Those that anything is known of."""
    return _filled(comparison, (*_FIGURES, *_LOAD))


def _filled(comparison: Comparison, of: Sequence[Column]) -> list[Column]:
    return [
        column for column in of if any(column.value(arm) is not None for arm in comparison.arms)
    ]


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
