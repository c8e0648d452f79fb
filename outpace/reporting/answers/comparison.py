"""Answer of a comparison: the verdict first, then each arm's figures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outpace.records.comparison import ArmResult, Comparison, remaining_arms
from outpace.records.units import show_bytes, show_count, show_seconds, show_share
from outpace.reporting.charts.step_parts import parts_figure
from outpace.reporting.render.document import Answer, Cell, Chart, DataTable, Number, Paragraph


@dataclass(frozen=True)
class Column:
    """A column of the table of arms: an attribute of arms or their verdicts, and its format."""

    name: str
    attribute: str
    show: Callable[[Any], str]

    def value(self, arm: ArmResult) -> Any:
        """Return the arm's figure; None if unknown."""
        owner = arm if hasattr(arm, self.attribute) else arm.verdict
        return getattr(owner, self.attribute, None)

    def cell(self, arm: ArmResult) -> Number:
        """Return the arm's figure as a table cell. An interval is sorted by its lower end."""
        value = self.value(arm)
        shown = "–" if value is None else self.show(value)
        return Number(value[0] if isinstance(value, tuple) else value, shown)


_COLUMNS = (
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
    Column("samples/s", "samples_per_s", lambda value: f"{value:,.1f}"),
    Column("sent per step", "sent_bytes", show_bytes),
    Column("idle", "idle_share", show_share),
    Column("GPU busy", "device_utilisation", show_share),
    Column("cores busy", "core_utilisation", show_share),
)

# Explanations of column names.
_NOTES = {
    "ratio": "ratio: to {first}; the median of the {rounds}' ratios, not the ratio of the medians.",
    "sent per step": "sent: bytes sent by all ranks in a step, counted in the warm-up.",
    "idle": "idle: share of time in which ranks' main threads waited for others or for data.",
    "GPU busy": "GPU busy: mean over the GPUs of the run. For GPUs, idle means that no kernel ran; "
    "a collective that waits counts as a kernel.",
    "cores busy": "cores busy: share of all cores of the hosts, by any program.",
}


def headline(comparison: Comparison) -> str | None:
    """Return a sentence on which arm is the fastest; None for two arms, or if arms are commands.

    Arms are only tested against the first arm.
    """
    first, *others = comparison.arms
    known = {
        one.arm: one.verdict
        for one in others
        if one.verdict is not None and one.verdict.slowdown is not None
    }
    if len(known) < 2 or comparison.experiment.metric is not None:
        return None
    tested = f"Only differences from {first.arm} are tested."
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
    sentences = ["No arm is claimed to be the fastest", f"By the median ratio, it is {best}{ahead}"]
    return ". ".join([*sentences, *([claims] if claims else []), tested])


def opening(comparison: Comparison) -> list[str]:
    """Return the first sentences of the answer.

    They say how finished runs differ, which arm is the fastest, and how each compares with the
    first.
    """
    head = headline(comparison)
    lines = [
        f"{line}." if ". " in line and not line.endswith(".") else line
        for line in verdict_lines(comparison)
    ]
    return [*comparison.differences, *([head] if head else []), *lines]


def verdict_lines(comparison: Comparison) -> list[str]:
    """Return a sentence for each arm: how it compares with the first, or why it failed."""
    first = comparison.arms[0].arm
    words = ("slower", "faster")
    if comparison.experiment.metric is not None:
        words = ("higher", "lower")
    lines = []
    for one in comparison.arms[1:]:
        failure = _failure_without_result(comparison, one)
        if failure is not None:
            lines.append(f"{one.arm} failed: {failure}")
        elif one.verdict is not None:
            lines.append(one.verdict.words(one.arm, first, words))
    left_out = _excluded_arms(comparison)
    lines += [f"{name} was dropped after a few rounds: {why}" for name, why in left_out.items()]
    own = _failure_without_result(comparison, comparison.arms[0])
    return [f"{first} failed: {own}", *lines] if own is not None else lines


def _failure_without_result(comparison: Comparison, arm: ArmResult) -> str | None:
    """Return the last failure of an arm that ran, but never to the end; otherwise None."""
    own = [one for one in comparison.outcomes if one.arm == arm.arm]
    if not own or any(one.value is not None for one in own):
        return None
    return own[-1].failure


def _excluded_arms(comparison: Comparison) -> dict[str, str | None]:
    """Return the last failure of each arm that has results, but was given up after failures."""
    kept = {arm.name for arm in remaining_arms(comparison.experiment, comparison.outcomes)}
    failures: dict[str, str | None] = {}
    for one in comparison.outcomes:
        if one.arm not in kept and one.value is None:
            failures[one.arm] = one.failure
    return {
        arm.arm: failures[arm.arm]
        for arm in comparison.arms
        if arm.arm in failures and _failure_without_result(comparison, arm) is None
    }


def comparison_answer(comparison: Comparison) -> Answer:
    """Show which arms are faster or slower than the first, and the figures of each arm."""
    parts = step_parts(comparison)
    notes = [comparison.losses] if comparison.losses else []
    return Answer(
        tuple(opening(comparison)), tuple(_facts(comparison)),
        (
            *arms_parts(comparison), *([] if parts is None else [parts]),
            *(Paragraph(note) for note in (*notes, *comparison_notes(comparison))),
        ),
    )  # fmt: skip


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    if not comparison.experiment.in_turn:
        return []
    rounds = 1 + max((one.round for one in comparison.outcomes), default=-1)
    return [("rounds", str(rounds)), ("took", show_seconds(comparison.took_s)),
            ("why it ended", comparison.stopped)]  # fmt: skip


def arms_parts(comparison: Comparison) -> list[DataTable | Paragraph]:
    """Tabulate all known figures of each arm, with notes that explain the columns."""
    arms = comparison.arms
    known = [one for one in _COLUMNS if any(one.value(arm) is not None for arm in arms)]
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (arm.arm, *(one.cell(arm) for one in known)) for arm in arms
    )
    names = ("arm", *(one.name for one in known))
    table = DataTable("The arms", names, rows, {**dict(zip(names, names, strict=True)), "arm": ""})
    words = {"first": arms[0].arm, "rounds": rounds_name(comparison)}
    notes = " ".join(_NOTES[name].format(**words) for name in names if name in _NOTES)
    return [table, *([Paragraph(notes, style="dim")] if notes else [])]


def step_parts(comparison: Comparison) -> Chart | None:
    """Draw the parts of each arm's step; None if none is known."""
    parts = {arm.arm: arm.parts for arm in comparison.arms if arm.parts is not None}
    return parts_figure("Time of a step by part, at the median of runs", parts) if parts else None


def comparison_notes(comparison: Comparison) -> list[str]:
    """Return notes on unintended differences between arms, and on the use of shared cores."""
    shared = _shared_cores_note(comparison)
    return [*comparison.differing, *([] if shared is None else [shared])]


def _shared_cores_note(comparison: Comparison) -> str | None:
    used = [one.other_cores for one in comparison.arms if one.other_cores is not None]
    if not used or not comparison.experiment.in_turn:
        return None  # for finished runs, `differences` reports it
    least, most = f"{min(used):.1f}", f"{max(used):.1f}"
    cores = least if least == most else f"{least} to {most}"
    return (
        f"Other processes kept {cores} cores busy meanwhile (median of an arm's runs), so step "
        "times are longer and vary more. Compare again when they are done."
    )


def rounds_name(comparison: Comparison) -> str:
    """Return the name of an arm's measured values: "rounds", or "parts" of a finished run."""
    return "rounds" if comparison.experiment.in_turn else "parts"
