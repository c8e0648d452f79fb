"""A comparison in a terminal: the verdict first, then each arm's step time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from outpace.records.comparison import ArmResult, Comparison, remaining_arms
from outpace.records.measurement import PARTS
from outpace.records.units import show_bytes, show_count, show_seconds, show_share
from outpace.reporting.terminal.table import NarrowTable


@dataclass(frozen=True)
class Column:
    """A figure shown for arms: an attribute of the arms or of their verdicts, and its format."""

    name: str
    attribute: str
    show: Callable[[Any], str]

    def value(self, arm: ArmResult) -> Any:
        """Return the arm's figure; None if unknown."""
        owner = arm if hasattr(arm, self.attribute) else arm.verdict
        return getattr(owner, self.attribute, None)

    def text(self, arm: ArmResult) -> str:
        """Return the arm's figure as text."""
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
# Throughput, traffic and utilisation of arms.
_LOAD = (
    Column("samples/s", "samples_per_s", lambda value: f"{value:,.1f}"),
    Column("sent a step", "sent_bytes", show_bytes),
    Column("idle", "idle_share", show_share),
    Column("GPU busy", "device_utilisation", show_share),
    Column("cores busy", "core_utilisation", show_share),
)


# Notes on columns with unclear names.
_NOTES = {
    "ratio": "ratio: to {first}; the median of the {rounds}' ratios, not the ratio of the medians.",
    "sent a step": "sent: bytes sent by all ranks in a step, counted in the warm-up.",
    "idle": "idle: share of time in which ranks' main threads waited for others or for data.",
    "GPU busy": "GPU busy: mean over the GPUs of the run. For GPUs, idle means that no kernel "
    "ran; waiting for a collective is a kernel.",
    "cores busy": "cores busy: share of all cores of the hosts, whoever used them.",
}


def headline(comparison: Comparison) -> str | None:
    """Say which of three or more arms is claimed to be the fastest, if any; None for fewer.

    Only differences from the first are tested.
    """
    first, *others = comparison.arms
    known = {
        one.arm: one.verdict
        for one in others
        if one.verdict is not None and one.verdict.slowdown is not None
    }
    if len(known) < 2 or comparison.experiment.metric is not None:
        return None
    tested = f"Only differences to {first.arm} are tested."
    faster = [name for name, verdict in known.items() if verdict.claimed_faster]
    slower = [name for name, verdict in known.items() if verdict.claimed_slower]
    if len(slower) == len(known):
        return f"Fastest: {first.arm}, claimed against every other arm."
    ratios = {first.arm: 1.0} | {name: 1 + (one.slowdown or 0.0) for name, one in known.items()}
    best = min(ratios, key=lambda name: ratios[name])
    if best in faster:
        gain = show_share(1 - ratios[best])
        return f"Fastest: {best}, {gain} faster than {first.arm}. {tested}"
    claims = f"{', '.join(faster)}: claimed to be faster than {first.arm}" if faster else ""
    if slower and not faster:
        claims = f"{', '.join(slower)}: claimed to be slower than {first.arm}"
    ahead = "" if best == first.arm else f", {show_share(1 - ratios[best])} ahead of {first.arm}"
    said = ["No arm is claimed to be the fastest", f"By the median ratio it is {best}{ahead}"]
    return ". ".join([*said, *([claims] if claims else []), tested])


def opening(comparison: Comparison) -> list[str]:
    """Return the first sentences: the differences between finished runs, then the verdict."""
    head = headline(comparison)
    lines = [
        f"{line}." if ". " in line and not line.endswith(".") else line
        for line in verdict_lines(comparison)
    ]
    return [*comparison.differences, *([head] if head else []), *lines]


def verdict_lines(comparison: Comparison) -> list[str]:
    """Return a sentence for each arm compared with the first."""
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
    left_out = _excluded_arms(comparison)
    lines += [f"{name} was dropped after some rounds: {why}" for name, why in left_out.items()]
    own = _failure(comparison, comparison.arms[0])
    return [f"{first} failed: {own}", *lines] if own is not None else lines


def _failure(comparison: Comparison, arm: ArmResult) -> str | None:
    """Return the reason why an arm has no figures at all."""
    own = [one for one in comparison.outcomes if one.arm == arm.arm]
    if not own or any(one.value is not None for one in own):
        return None
    return own[-1].failure


def _excluded_arms(comparison: Comparison) -> dict[str, str | None]:
    """Return why arms with figures were excluded because too many of their runs failed."""
    kept = {arm.name for arm in remaining_arms(comparison.experiment, comparison.outcomes)}
    found: dict[str, str | None] = {}
    for one in comparison.outcomes:
        if one.arm not in kept and one.value is None:
            found[one.arm] = one.failure
    return {
        arm.arm: found[arm.arm]
        for arm in comparison.arms
        if arm.arm in found and _failure(comparison, arm) is None
    }


def comparison_text(comparison: Comparison) -> RenderableType:
    """Format a comparison for a terminal."""
    said = opening(comparison)
    parts: list[RenderableType] = [Text(), *(Text(line, style="bold") for line in said)]
    parts += [Text(), *_arms(comparison, _FIGURES)]
    if any(arm.parts for arm in comparison.arms):
        parts += [Text(), _parts(comparison)]
    if _known_columns(comparison, _LOAD):
        parts += [Text(), *_arms(comparison, _LOAD)]
    notes = [comparison.losses] if comparison.losses else []
    notes += comparison.differing
    if (shared := shared_cores_note(comparison)) is not None:
        notes.append(shared)
    parts += [Text(), *(Text(note) for note in (*notes, stop_sentence(comparison)))]
    return Group(*parts)


def stop_sentence(comparison: Comparison) -> str:
    """Say how much was run, and why the comparison stopped."""
    if not comparison.experiment.in_turn:
        return f"Nothing was run: {comparison.stopped}."
    rounds = 1 + max((one.round for one in comparison.outcomes), default=-1)
    count = "1 round" if rounds == 1 else f"{rounds} rounds"
    return f"{count} in {show_seconds(comparison.took_s)}: {comparison.stopped}."


def _arms(comparison: Comparison, of: Sequence[Column]) -> Iterator[RenderableType]:
    """Tabulate the arms: columns with any known value, and remarks about them."""
    kept = _known_columns(comparison, of)
    figures = {one.name: [one.text(arm) for arm in comparison.arms] for one in kept}
    yield NarrowTable("", [Text(arm.arm) for arm in comparison.arms], figures)
    notes = column_notes(comparison, kept)
    if notes:
        yield Text(notes, style="dim")


def column_notes(comparison: Comparison, of: Sequence[Column]) -> str:
    """Return notes on columns whose names are not self-explanatory."""
    first = comparison.arms[0].arm
    words = {"first": first, "rounds": rounds_of(comparison)}
    return " ".join(_NOTES[one.name].format(**words) for one in of if one.name in _NOTES)


def shared_cores_note(comparison: Comparison) -> str | None:
    """Return a note if other processes used the arms' cores; otherwise None."""
    used = [one.other_cores for one in comparison.arms if one.other_cores is not None]
    if not used or not comparison.experiment.in_turn:
        return None  # for finished runs, `differences` reports it
    least, most = f"{min(used):.1f}", f"{max(used):.1f}"
    cores = least if least == most else f"{least} to {most}"
    return (
        f"Other processes kept {cores} cores busy meanwhile (median of an arm's runs), so "
        "steps took longer and vary more than they would alone. Compare again when they are "
        "done."
    )


def rounds_of(comparison: Comparison) -> str:
    """Return the word for rounds; for finished runs, the word for parts."""
    return "rounds" if comparison.experiment.in_turn else "parts"


def columns(comparison: Comparison) -> list[Column]:
    """Return the columns that have any known value."""
    return _known_columns(comparison, (*_FIGURES, *_LOAD))


def _known_columns(comparison: Comparison, of: Sequence[Column]) -> list[Column]:
    return [
        column for column in of if any(column.value(arm) is not None for arm in comparison.arms)
    ]


def _parts(comparison: Comparison) -> RenderableType:
    """Return a table of a step's parts by arm."""
    known = [(arm.arm, arm.parts) for arm in comparison.arms if arm.parts is not None]
    figures = {
        part: [show_seconds(getattr(own, f"{part}_s")) for _, own in known] for part in PARTS
    }
    return NarrowTable("of a step", [Text(name) for name, _ in known], figures)
