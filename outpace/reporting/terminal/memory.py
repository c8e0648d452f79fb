"""A rank's memory as a table for the terminal, and as one JSON document."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from outpace.records.hardware import Accelerator
from outpace.records.memory import KIND_MEANINGS, MemoryAccount
from outpace.records.plan import Plan
from outpace.records.units import show_bytes, show_count, show_size

_MODULES_SHOWN = 5


def document(
    traced: MemoryAccount,
    measured: MemoryAccount | None,
    *,
    plan: Plan,
    model: str,
    seq_len: int | None,
    global_batch: int,
    accelerator: Accelerator | None,
    next_command: str | None = None,
    hints: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the JSON of `outpace memory`, which begins with the fullest rank's peak by kind.

    `next_command` searches for plans that fit, and is null if this plan fits. If `traced` is an
    estimate, the number of the fullest rank and the moment of its peak are unknown.
    """
    estimated = traced.source == "estimated"
    capacity = None if accelerator is None else accelerator.usable_bytes
    fits = None if capacity is None else traced.device_bytes <= capacity
    return {
        "peak_memory_bytes": traced.peak_memory_bytes,
        "reserved_memory_bytes": traced.reserved_bytes,
        "library_memory_bytes": traced.library_bytes,
        "anatomy_bytes": dict(traced.peak.by_kind),
        "peak_at": None if estimated else {
            "step": traced.peak.step, "where": traced.peak.location,
            "operator": traced.peak.operator,
        },
        "rank": None if estimated else traced.rank,
        "world_size": traced.world_size,
        "device_memory_bytes": capacity,
        "fits": fits,
        "next_command": next_command if fits is False else None,
        "hints": list(hints),
        "model": model,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "identity": plan.identity(global_batch),
        "plan": plan.model_dump(mode="json"),
        "activations_by_module_bytes": dict(traced.activations_by_module),
        "flops": traced.flops,
        "bytes_moved": traced.bytes_moved,
        "traced": traced.model_dump(mode="json"),
        "measured": None if measured is None else measured.model_dump(mode="json"),
        "relative_error": relative_error(traced, measured),
    }  # fmt: skip


def relative_error(traced: MemoryAccount, measured: MemoryAccount | None) -> float | None:
    """Return the relative error of the traced peak; None without a measurement.

    The peak is compared with the bytes that the allocator handed out, or if these are unknown, with
    the bytes of live tensors.
    """
    if measured is None:
        return None
    return traced.peak_memory_bytes / _measured_bytes(measured) - 1


def _measured_bytes(measured: MemoryAccount) -> int:
    return measured.allocated_bytes or measured.peak_memory_bytes


def memory_table(
    plan: Plan,
    traced: MemoryAccount,
    measured: MemoryAccount | None,
    accelerator: Accelerator | None,
    about: str = "",
    next_command: str | None = None,
) -> Group:
    """Return a table of the memory at the peak by kind, traced and measured, with notes.

    `about` is a sentence that describes the training. `next_command` searches for plans that fit,
    for the case that this one does not.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("memory at the peak")
    table.add_column(traced.source, justify="right")
    table.add_column("", justify="right", style="dim")
    if measured is not None:
        table.add_column("measured", justify="right")
    table.add_column("", style="dim")
    total = traced.peak_memory_bytes
    for kind in KIND_MEANINGS:
        amount = traced.peak.by_kind.get(kind, 0)
        seen = 0 if measured is None else measured.peak.by_kind.get(kind, 0)
        if amount or seen:
            beside = [] if measured is None else [show_bytes(seen)]
            share = "" if kind == "offloaded" else f"{100 * amount / total:.0f} %"
            table.add_row(kind, show_bytes(amount), share, *beside, KIND_MEANINGS[kind])
    beside = [] if measured is None else [show_bytes(_measured_bytes(measured))]
    table.add_section()
    table.add_row(Text("tensors", style="bold"), Text(show_bytes(total), style="bold"), "", *beside,
                  "" if measured is None or measured.allocated_bytes is None
                  else "measured: including the kernels' workspaces")  # fmt: skip
    for name, field, what in (
        ("process", "resident_bytes", "growth of anonymous resident memory"),
        ("allocator", "reserved_bytes", "reserved for tensors, including gaps between them"),
        ("unseen", "unseen_bytes", "on the device, outside of the allocator"),
        ("libraries", "library_bytes", "CUDA's context and communication buffers, by formula"),
    ):
        taken = [getattr(one, field) for one in (traced, measured) if one is not None]
        if any(size is not None for size in taken):
            cells = ["" if size is None else show_bytes(size) for size in taken]
            table.add_row(name, cells[0], "", *cells[1:], what)
    notes = _note_lines(plan, traced, measured, accelerator, next_command)
    head = [Text(about)] if about else []
    return Group(*head, table, *map(Text, notes))


def step_in_words(plan: Plan, global_batch: int, seq_len: int | None) -> str:
    """Describe a step in words: batch, sequence length, and the plan's main options."""
    sequences = "" if seq_len is None else f"sequences of {seq_len:,} tokens; "
    recomputed = f", checkpointing {plan.checkpointing}" if plan.checkpointing != "none" else ""
    return (
        f"{plan.identity(global_batch).capitalize()}; {sequences}"
        f"{plan.strategy}, {plan.precision}, {plan.optimizer}{recomputed}."
    )


def _note_lines(
    plan: Plan,
    traced: MemoryAccount,
    measured: MemoryAccount | None,
    accelerator: Accelerator | None,
    next_command: str | None,
) -> list[str]:
    who = "One process"
    if traced.world_size > 1:
        which = "The fullest rank" if traced.source == "estimated" else f"Rank {traced.rank}"
        who = f"{which} of {traced.world_size} ({plan.mesh})"
    lines = [f"{who}: the peak is in the {traced.peak.location} of step {traced.peak.step}."]
    if traced.source == "estimated":
        lines = [
            f"{who}: by the planner's formula, because outpace does not train this model and "
            "cannot trace it."
        ]
    held = list(traced.activations_by_module.items())[:_MODULES_SHOWN]
    if held:
        parts = ", ".join(f"{name} {show_bytes(nbytes)}" for name, nbytes in held)
        lines.append(f"Largest activations: {parts}.")
    if accelerator is not None:
        room = accelerator.usable_bytes - traced.device_bytes
        verdict = f"{show_bytes(abs(room))} {'is left' if room >= 0 else 'too much'}"
        lines.append(
            f"Of the {show_bytes(accelerator.usable_bytes)} available to a process on one "
            f"{accelerator.name} with {show_size(accelerator.memory_bytes)}, allocator and "
            f"libraries use {show_bytes(traced.device_bytes)}: {verdict}; only a measurement shows "
            "the libraries' exact use."
        )
        if room < 0 and next_command is not None:
            lines.append(f"To find what fits, run {next_command}")
    lines.append(f"A step has {show_count(traced.flops, 'FLOP')} of matmuls on this rank.")
    error = relative_error(traced, measured)
    if error is not None:
        lines.append(f"The trace is off by {100 * error:+.2f} %.")
    return lines
