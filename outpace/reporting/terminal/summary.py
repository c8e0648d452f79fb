"""The summary at the end of a run."""

import shlex

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outpace.records.measurement import PARTS, Evaluation, Measurement, TimeParts
from outpace.records.units import show_bytes, show_count, show_seconds, show_share
from outpace.reporting.bottleneck import BottleneckInputs, bottleneck
from outpace.reporting.terminal.bar import bar
from outpace.reporting.terminal.utilisation import averages_table

_BAR_CELLS = 30
_MOST_WORDS = 24  # characters of a proposed prompt


def runtime_name(measurement: Measurement) -> str:
    """Return the label of the training time, which in a resumed run starts at the last resume."""
    started = measurement.start_step
    return f"training since step {started:,}" if started else "training time"


def first_step_name(measurement: Measurement) -> str:
    """Return the label of the time to a run's first step, or a resumed run's first new step."""
    return f"time to step {measurement.start_step + 1:,}"


def summary(measurement: Measurement) -> RenderableType:
    """Format the result of a run: losses, speed, time by part, a sample and the run's path.

    This needs at least 80 columns. Generated text and paths are shown literally, never interpreted
    as markup.
    """
    above = Table.grid(padding=(0, 4))
    above.add_row(_losses_table(measurement), _speed_table(measurement))
    parts: list[RenderableType] = [Text(), Padding(above, (0, 2))]
    if measurement.worse_than_unigrams is not None:
        parts.append(Padding(Text(f"{measurement.worse_than_unigrams}."), (1, 2, 0, 2)))
    if measurement.parts.total_s > 0:
        parts += [Text(), Padding(_time_table(measurement.parts), (0, 2))]
        if measurement.start_step:
            since = f"Times and rates are of the steps after step {measurement.start_step:,}."
            parts += [Padding(Text(since, style="dim"), (0, 2))]
        parts += [
            Padding(Text(sentence), (1, 2, 0, 2)) for sentence in _advice_sentences(measurement)
        ]
    if measurement.utilisation:
        parts += [Text(), Padding(averages_table(measurement.utilisation), (0, 2))]
    if measurement.step_time_check is not None:
        style = "yellow" if measurement.step_time_check.slower else "green"
        line = Text(
            f"{measurement.step_time_check.verdict}: {measurement.step_time_check.words}.",
            style=style,
        )
        parts += [Text(), Padding(line, (0, 2))]
    if measurement.sample:
        parts += [Text(), _sample_panel(measurement.sample)]
    parts += [Text(), _next_commands(measurement)]
    return Group(*parts)


def evaluation_table(evaluation: Evaluation) -> RenderableType:
    """Show the loss, other metrics and speed on held-out data."""
    table = _pairs_table("Evaluation")
    what = target_of(evaluation)
    unit = "" if what == "target" else f" nats per {what}"
    table.add_row("loss", f"{evaluation.loss:.4f}{unit}")
    for name, value in shown_metrics(evaluation):
        table.add_row(name, value)
    table.add_row(f"{what}s", f"{evaluation.tokens:,}")
    if evaluation.left_over_tokens:
        table.add_row("left over, too few for a sample", f"{evaluation.left_over_tokens:,}")
    if evaluation.seq_len is not None:
        table.add_row("sequence length", f"{evaluation.seq_len:,}")
    table.add_row("speed", show_whole(evaluation.tokens_per_s, f"{what}s/s"))
    if evaluation.step:  # only runs have steps
        table.add_row("after step", f"{evaluation.step:,}")
    return Padding(table, (1, 2))


def target_of(evaluation: Evaluation | None) -> str:
    """Return what the loss is averaged over: "sample" (classifiers), "token", else "target"."""
    if evaluation is None:
        return "token"
    if evaluation.metrics:
        return "sample"
    return "token" if evaluation.perplexity is not None else "target"


def shown_metrics(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return the names and values of an evaluation's metrics, without its loss."""
    if not evaluation.metrics:
        known = evaluation.perplexity
        return [] if known is None else [("perplexity", _format_perplexity(known))]
    names = {"f1": "F1"}
    return [(names.get(name, name), f"{value:.4f}") for name, value in evaluation.metrics.items()]


def _pairs_table(title: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold"
    )
    table.add_column(Text(title), style="dim", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    return table


def _losses_table(measurement: Measurement) -> Table:
    first, last = measurement.initial_eval, measurement.final_eval
    # A custom model without tokens may have any loss.
    in_nats = measurement.tokens is not None or (last is not None and last.metrics)
    table = _pairs_table(f"Loss, nats per {target_of(last)}" if in_nats else "Loss")
    table.add_row("first step", _format_loss(measurement.first_loss))
    table.add_row("last step", _format_loss(measurement.final_loss))
    if first is not None:
        table.add_row("validation before", _format_loss(first.loss))
    if last is not None:
        table.add_row("validation after", Text(_format_loss(last.loss), style="bold green"))
        for name, value in shown_metrics(last) if in_nats else ():
            table.add_row(name, value)
    if measurement.unigram_entropy is not None:
        table.add_row("unigram entropy", _format_loss(measurement.unigram_entropy))
    return table


def _speed_table(measurement: Measurement) -> Table:
    table = _pairs_table("Speed and memory")
    if measurement.tokens_per_s is None:
        rate = show_whole(measurement.samples_per_s, "samples/s")
    else:
        rate = show_whole(measurement.tokens_per_s, "tokens/s")
    table.add_row("median throughput", Text(rate, style="bold green"))
    table.add_row("model FLOP/s", show_count(measurement.model_flops_per_s, "FLOP/s"))
    table.add_row("MFU", show_share(measurement.mfu))
    table.add_row("peak memory", show_bytes(measurement.peak_memory_bytes))
    if measurement.cache_freed_bytes is not None:
        table.add_row("cache freed a step", show_bytes(measurement.cache_freed_bytes))
    table.add_row("median step", show_seconds(measurement.step_time_s))
    table.add_row("steps", f"{measurement.steps:,}")
    if measurement.tokens is not None:
        table.add_row("tokens", show_whole(measurement.tokens))
    table.add_row(runtime_name(measurement), show_seconds(measurement.train_runtime))
    if measurement.first_step_s is not None:
        table.add_row(first_step_name(measurement), show_seconds(measurement.first_step_s))
    if measurement.compile_s:
        table.add_row("of it, compiling", show_seconds(measurement.compile_s))
    if measurement.world_size > 1:
        table.add_row("processes", f"{measurement.world_size:,}")
    if measurement.skipped_steps:
        table.add_row("skipped steps", f"{measurement.skipped_steps:,}")
    return table


def _time_table(parts: TimeParts) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold"
    )
    table.add_column("Where the time went", style="dim", no_wrap=True)
    table.add_column("", width=_BAR_CELLS, no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("per step", justify="right", no_wrap=True)
    for part in PARTS:
        seconds = getattr(parts, f"{part}_s")
        share = seconds / parts.total_s
        drawn = Text(bar(share, _BAR_CELLS), style="cyan")
        table.add_row(part, drawn, show_share(share), show_seconds(seconds))
    return table


def _advice_sentences(measurement: Measurement) -> list[str]:
    seen = BottleneckInputs(
        measurement.parts,
        measurement.device,
        measurement.strategy,
        measurement.world_size,
        measurement.utilisation,
        measurement.mfu,
        len(measurement.utilisation),
    )
    found = bottleneck(seen)
    return [] if found is None else [found.advice]


def show_whole(count: float | None, unit: str = "") -> str:
    """Format a count or rate in full if it is below 1e9: 22222.2 -> '22,222'. None -> 'n/a'."""
    if count is None or abs(count) >= 1e9:
        return show_count(count, unit)
    return f"{count:,.0f} {unit}".rstrip()


def _sample_panel(text: str) -> Padding:
    panel = Panel(
        Text(text.strip("\n"), overflow="fold"),
        title="[bold]Sample[/bold]",
        title_align="left",
        border_style="dim",
        box=box.ROUNDED,
    )
    return Padding(panel, (0, 1))


def _next_commands(measurement: Measurement) -> Padding:
    run = measurement.run
    line = Text().append("Run  ", style="bold").append(run, style="cyan")
    if measurement.sample is not None:
        asked = (
            "--chat 'Hello'" if measurement.task == "chat" else _shell_prompt(measurement.sample)
        )
        line.append(f"\n     outpace generate --run {run} {asked}", style="dim")
    elif measurement.final_eval is not None:
        line.append(f"\n     outpace eval --run {run}", style="dim")
    line.append(f"\n     outpace report {run}", style="dim")
    return Padding(line, (0, 2, 1, 2))


def _shell_prompt(sample: str) -> str:
    """Return a sample's first words, quoted for a shell, as a prompt; 'def ' if there are none."""
    line = next((line for line in sample.splitlines() if line.strip()), "def ")
    begin = " ".join(line.split()[:2])
    return shlex.quote("def " if begin.startswith("def ") else begin[:_MOST_WORDS])


def _format_loss(loss: float | None) -> str:
    return "n/a" if loss is None else f"{loss:.4f}"


def _format_perplexity(perplexity: float) -> str:
    return f"{perplexity:,.1f}" if perplexity < 1e6 else f"{perplexity:.2e}"
