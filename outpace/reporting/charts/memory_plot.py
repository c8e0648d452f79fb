"""Memory over a step as a picture: stacked by kind, the peak marked."""

from pathlib import Path
from typing import Any

from outpace.records.errors import BadInputError
from outpace.records.memory import KINDS, MemoryAccount
from outpace.records.units import show_bytes
from outpace.reporting.charts.palette import MEMORY

_FORMATS = (".png", ".svg", ".pdf")
_GIB, _MIB = 2**30, 2**20


def plot_memory(account: MemoryAccount, path: Path, limit_bytes: int | None = None) -> None:
    """Draw the second step's timeline. Raises BadInputError for what cannot be drawn."""
    if path.suffix not in _FORMATS:
        raise BadInputError(
            f"--plot {path}: {path.suffix or 'no suffix'} is no kind of picture that can be "
            f"written. Use {', '.join(_FORMATS)}."
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInputError("--plot needs matplotlib: pip install 'outpace[plot]'.") from None
    unit, name = (_GIB, "GiB") if account.peak_memory_bytes >= _GIB else (_MIB, "MiB")
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    moments = account.timeline
    here = [kind for kind in KINDS if kind != "offloaded"]  # a stack's height is the sum
    used = [kind for kind in here if any(moment.by_kind.get(kind) for moment in moments)]
    heights = [[moment.by_kind.get(kind, 0) / unit for moment in moments] for kind in used]
    colours = [MEMORY[KINDS.index(kind)] for kind in used]
    axes.stackplot(range(len(moments)), heights, labels=used, colors=colours, step="post")
    _mark_parts(axes, account)
    _mark_peak(axes, account, unit)
    if limit_bytes is not None and limit_bytes < 1.6 * account.peak_memory_bytes:
        axes.axhline(limit_bytes / unit, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"device {show_bytes(limit_bytes)}", (0, limit_bytes / unit), va="bottom")
    axes.set_xlim(0, len(moments) - 1)
    axes.set_ylim(0)
    axes.set_ylabel(f"memory of tensors ({name})")
    axes.set_xticks([])
    where = f"rank {account.rank} of {account.world_size}, " if account.world_size > 1 else ""
    axes.set_title(f"{where}one training step, {account.source}", loc="left")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _mark_parts(axes: Any, account: MemoryAccount) -> None:
    """Mark where forwards, backwards and the optimizer begin."""
    begin = 0
    parts = [moment.part for moment in account.timeline]
    for position in range(1, len(parts) + 1):
        if position < len(parts) and parts[position] == parts[begin]:
            continue
        if position - begin > 0.05 * len(parts):
            axes.text((begin + position) / 2, -0.02, parts[begin], ha="center", va="top",
                      transform=axes.get_xaxis_transform())  # fmt: skip
        if position < len(parts):
            axes.axvline(position, color="white", linewidth=0.8)
        begin = position


def _mark_peak(axes: Any, account: MemoryAccount, unit: int) -> None:
    totals = [moment.nbytes for moment in account.timeline]
    top = totals.index(max(totals))
    text = f"{show_bytes(totals[top])}\n{account.timeline[top].location}"
    axes.annotate(
        text, (top, totals[top] / unit), xytext=(0, 12), textcoords="offset points", ha="center",
        arrowprops={"arrowstyle": "-|>"},
    )  # fmt: skip
    axes.margins(y=0.2)
