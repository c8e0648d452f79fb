"""Write the recorded figures into README.md and docs, between their markers.

    python benchmarks/figures.py            # rewrite
    python benchmarks/figures.py --check    # exit 1 when a page does not say what is recorded

A page holds `<!-- figures: NAME -->` and `<!-- end -->`; what is between comes from
results/NAME.json.
"""

import argparse
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", *(f"docs/{page}.md" for page in
         ("benchmarks", "folklore", "memory", "optimizers", "strategies")))  # fmt: skip
_MARKED = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def stand(result: dict[str, Any]) -> str:
    """When, where and with what a result was recorded."""
    machine, versions = result["machine"], result["versions"]
    dirty = " with uncommitted changes" if result["uncommitted_changes"] else ""
    return (
        f"\nRecorded {result['date'][:10]} at commit {str(result['commit'])[:10]}{dirty}: "
        f"{machine['host_cores']} cores of {machine['cpu']}, torch {versions['torch']}, "
        f"Python {versions['python']}. Command: `{' '.join(result['command'])}`.\n"
    )


def overhead(result: dict[str, Any]) -> str:
    """outpace's loop against a bare one."""
    rows = [
        [
            case,
            f"{r['median_bare_step_s'] * 1000:.1f} ms",
            f"{r['median_outpace_step_s'] * 1000:.1f} ms",
            f"{r['ratio']:.4f}",
            f"{r['low']:.4f} – {r['high']:.4f}",
            f"{sum(map(len, r['rounds_s']))}",
            "yes" if r["narrow_enough"] else "no",
            f"{'yes' if r['reached'] else 'no'} (≤ {r.get('target', result.get('target'))})",
        ]
        for case, r in result["cases"].items()
    ]
    head = [
        "case",
        "bare step",
        "outpace step",
        "ratio",
        "95 % interval",
        "pairs",
        "narrow enough",
        "upper bound",
    ]
    return table(head, rows) + stand(result)


def tokenise(result: dict[str, Any]) -> str:
    """Data preparation against datasets.map."""
    tokens = result["tokens"]
    rows = [
        [who, f"{seconds:.1f} s", f"{tokens / seconds / 1e6:.2f} M"]
        for who, seconds in (
            ("outpace", tokens / result["median_ours_tokens_per_s"]),
            (
                f"`datasets.map`, batches of {result['batch_size']}",
                tokens / result["median_theirs_tokens_per_s"],
            ),
        )
    ]
    ratios = result["pair_ratios"]
    head = [f"{result['processes']} processes, {result['tokenizer']}", "median", "tokens/s"]
    return (
        table(head, rows)
        + f"\nRatio of each of {len(ratios)} pairs: median {result['ratio']:.2f}, "
        + f"{min(ratios):.2f} to {max(ratios):.2f} (target ≥ {result['target']}); "
        + f"{result['bytes'] / 1e6:.0f} MB in {result['documents']:,} documents, "
        + f"{tokens / 1e6:.1f} M tokens.\n"
        + stand(result)
    )


def memory_accuracy(result: dict[str, Any]) -> str:
    """Traced against measured peaks, the furthest off first."""
    rows = sorted(result["rows"].items(), key=lambda pair: -abs(pair[1]["error"]))
    lines = [
        [
            name,
            f"{row['traced_bytes'] / 2**20:,.1f} MiB",
            f"{row['measured_bytes'] / 2**20:,.1f} MiB",
            f"{row['error']:+.2%}",
            "n/a" if row["resident_bytes"] is None else f"{row['resident_bytes'] / 2**20:,.0f} MiB",
        ]
        for name, row in rows
    ]
    about = (
        f"\n{result['cases']} configurations: off by {result['mean_absolute_error']:.2%} in the "
        f"mean (target {result['target_mean']:.0%}), by {result['worst_error']:.2%} at most "
        f"(target {result['target_worst']:.0%}).\n"
    )
    head = ["configuration", "traced", "measured", "off by", "process grew by"]
    return table(head, lines) + about + stand(result)


def memory_loss(result: dict[str, Any]) -> str:
    """Peak memory and time of the loss, chunked against plain."""
    rows = []
    for precision, case in result["cases"].items():
        for kind in ("plain", "chunked"):
            tensors, resident = (
                statistics.median(run["bytes"] for run in case[peak][kind]) / 2**20
                for peak in ("tensors_peak", "resident_peak")
            )
            seconds = statistics.median(case["time"]["seconds"][kind])
            rows.append(
                [precision, kind, f"{tensors:,.0f} MiB", f"{resident:,.0f} MiB", f"{seconds:.2f} s"]
            )
    shape = ", ".join(f"{name} {size:,}" for name, size in result["shape"].items())
    head = ["precision", "loss", "peak of tensors", "peak resident", "median time"]
    return table(head, rows) + f"\nForward and backward of the loss: {shape}.\n" + stand(result)


def quickstart(result: dict[str, Any]) -> str:
    """What scripts/quickstart ends with."""
    shown = "\n".join(result["shown"]).strip("\n")
    return f"```text\n{shown}\n```\n\nIt took {result['seconds']:.0f} s.\n" + stand(result)


def strategies(result: dict[str, Any]) -> str:
    """All strategies beside each other, a table for each number of processes."""
    head = [
        "strategy", "mesh", "step", "quartiles", "sent, all ranks", "busiest sends", "idle",
        "busiest time", "memory", "busiest memory",
    ]  # fmt: skip
    pages = []
    for processes, world in result["worlds"].items():
        rows = [
            [
                f"`{name}`",
                one["mesh"],
                f"{one['step_time_s'] * 1000:.0f} ms",
                " – ".join(f"{quartile * 1000:.0f}" for quartile in one["quartiles_s"]),
                f"{one['sent_bytes'] / 2**20:.1f} MiB",
                f"{one['sent_bytes_busiest'] / 2**20:.1f} MiB",
                f"{one['idle_share']:.0%}",
                f"{one['busy_busiest_over_mean']:.2f}",
                f"{one['peak_bytes'] / 2**20:.0f} MiB",
                f"{one['peak_busiest_over_mean']:.2f}",
            ]
            for name, one in world["strategies"].items()
        ]
        ring = world["ring_over_ddp"]
        left_out = "".join(
            f"Left out: `{name}`: {why.rstrip('.')}.\n" for name, why in world["refused"].items()
        )
        pages.append(
            f"{processes} processes:\n\n{table(head, rows)}\n"
            f"Step of `ring` over `ddp`, alternating: {ring['ratio']:.3f} "
            f"({ring['low']:.3f} – {ring['high']:.3f}; target ≤ {ring['target']}).\n{left_out}\n"
        )
    shape = result["shape"]
    model = ", ".join(f"{key} {value}" for key, value in shape["model"].items())
    return (
        "".join(pages)
        + f"Medians of {result['rounds']} rounds; global batch {shape['global_batch']} × "
        + f"{shape['seq_len']} tokens, fp32; {model}.\n"
        + stand(result)
    )


def idle(result: dict[str, Any]) -> str:
    """Pipelines: measured, formula, play."""
    head = ["processes", "schedule", "m", "stages", "measured", "range", "formula", "play",
            "replay"]  # fmt: skip
    rows = [
        [
            processes,
            f"`{one['strategy']}`",
            str(one["microbatches"]),
            one["shape"],
            f"{one['measured']:.3f}",
            f"{one['low']:.3f} – {one['high']:.3f}",
            *("–" if one[key] is None else f"{one[key]:.3f}" for key in ("formula", "played")),
            f"{one['replayed']:.3f}",
        ]
        for processes, found in result["worlds"].items()
        for one in found
    ]
    return table(head, rows) + "\nShares of all ranks' time in a step.\n" + stand(result)


def intermediate(result: dict[str, Any]) -> str:
    """What forwards keep for backwards, the fullest and the emptiest rank."""
    head = ["ranks", "schedule", "checkpointing", "m", "under way, by rank", "kept, by rank",
            "values a token and layer, in widths", "peak above weights, by rank"]  # fmt: skip
    rows = [
        [
            processes,
            f"`{one['strategy']}`",
            one["checkpointing"],
            str(one["microbatches"]),
            ", ".join(map(str, one["in_flight"])),
            ", ".join(f"{rank['saved_bytes'] / 2**20:.0f}" for rank in one["ranks"]) + " MiB",
            ", ".join(f"{widths:.1f}" for widths in one["widths"]),
            ", ".join(f"{rank['peak_bytes'] / 2**20:.0f}" for rank in one["ranks"]) + " MiB",
        ]
        for processes, found in result["worlds"].items()
        for one in found
    ]
    shape = result["shape"]
    model = ", ".join(f"{key} {value}" for key, value in shape["model"].items())
    about = f"\nBatch {shape['batch']} × {shape['seq_len']} tokens, fp32; {model}.\n"
    return table(head, rows) + about + stand(result)


def mixed_precision_traced(result: dict[str, Any]) -> str:
    """The published table beside the derived ones."""
    then, now = result["rules"]["torch-1.8"], result["rules"]["today"]
    rows = []
    for size, row in then.items():
        said = result["published_mib"].get(size)
        rows.append([
            size,
            *(map(str, (*said, said[0] - said[1])) if said else "–––"),
            *(f"{row[precision]['reserved_mib']:,.0f}" for precision in ("fp32", "fp16")),
            f"{row['reserved_saving_mib']:,.0f}",
            f"{row['allocated_saving_mib']:,.0f}",
            *(f"{now[size][f'{kind}_saving_mib']:,.0f}" for kind in ("reserved", "allocated")),
        ])  # fmt: skip
    head = ["batch", "published, fp32", "fp16", "saving", "traced, fp32", "fp16", "saving",
            "saving in tensors", "today: saving", "in tensors"]  # fmt: skip
    verdicts = "".join(
        f"Batch {size}: {one['traced_mib']:,.0f} MiB saved, published {one['published_mib']:,}, "
        f"{one['off']:+.0%}: {'within' if one['reached'] else 'not within'} "
        f"{result['tolerance']:.0%}.\n"
        for size, one in result["verdicts"].items()
    )
    rest = ", ".join(f"{name}: {mib:,.0f}" for name, mib in result["beyond_reserve_mib"].items())
    return (
        table(head, rows)
        + f"\nMiB; traced is what the allocator has reserved. {verdicts}"
        + f"Published reading less traced reserve, MiB, by batch and precision: {rest}.\n"
        + stand(result)
    )


def mixed_precision_cpu(result: dict[str, Any]) -> str:
    """Peaks on this machine, measured and traced, and what fits under limits."""
    rows = []
    for size, row in result["rows"].items():
        peaks = [row[precision] for precision in ("fp32", "bf16")]
        rows.append([
            size,
            *(f"{one['tensors_bytes'] / 2**20:,.0f}" for one in peaks),
            f"{(peaks[0]['tensors_bytes'] - peaks[1]['tensors_bytes']) / 2**20:,.0f}",
            *(f"{one['traced_bytes'] / 2**20:,.0f}" for one in peaks),
            *("–" if one["anonymous_bytes"] is None else f"{one['anonymous_bytes'] / 2**20:,.0f}"
              for one in peaks),
        ])  # fmt: skip
    head = ["batch", "tensors, fp32", "bf16", "saving", "traced, fp32", "bf16",
            "RssAnon, fp32", "bf16"]  # fmt: skip
    fits = [
        [f"{limit} GiB", *(str(batches[precision] or "none") for precision in ("fp32", "bf16"))]
        for limit, batches in result["largest_batch_by_limit_gib"].items()
    ]
    return (
        table(head, rows)
        + "\nMiB. The largest of these batches whose tensors fit:\n\n"
        + table(["limit", "fp32", "bf16"], fits)
        + stand(result)
    )


def mixed_precision_speed(result: dict[str, Any]) -> str:
    """bf16 against fp32 by strategy."""
    rows = [
        [
            f"`{name}`",
            *(f"{statistics.median(one[p]['seconds']) * 1000:.0f} ms" for p in ("fp32", "bf16")),
            f"{one['speedup']:.2f}",
            f"{one['low']:.2f} – {one['high']:.2f}",
            *(f"{one[p]['peak_bytes'] / 2**20:.0f} MiB" for p in ("fp32", "bf16")),
        ]
        for name, one in result["strategies"].items()
    ]
    units = "; ".join(f"{kind}: {unit or 'none'}" for kind, unit in result["units"].items())
    head = ["strategy", "step, fp32", "bf16", "times as fast", "95 % interval", "peak, fp32",
            "bf16"]  # fmt: skip
    return table(head, rows) + f"\nUnits of this hardware for {units}.\n" + stand(result)


def checkpointing_price(result: dict[str, Any]) -> str:
    """Time and memory of recomputation, and the batch that it buys."""
    rows = [
        [
            f"`{strategy}`",
            mode,
            f"{statistics.median(one['seconds']) * 1000:.0f} ms",
            f"{one['times_base']:.3f}",
            f"{one['low']:.3f} – {one['high']:.3f}",
            f"{one['throughput_loss']:.1%}",
            f"{one['peak_bytes'] / 2**20:.0f} MiB",
        ]
        for strategy, modes in result["cases"].items()
        for mode, one in modes.items()
    ]
    bought = "".join(
        f"Under the peak of batch {result['shape']['batch']} without recomputation, {mode} fits "
        f"batch {one['batch']}, at {one['time_per_sample_over_plain']:.2f} of the time a sample.\n"
        for mode, one in result["larger_batch"].items()
    )
    head = ["strategy", "checkpointing", "step", "of none", "95 % interval", "throughput lost",
            "peak"]  # fmt: skip
    return f"{table(head, rows)}\n{bought}{stand(result)}"


def forward_backward(result: dict[str, Any]) -> str:
    """Times by kind of module, and bytes of element-wise ones in multiples of the input."""
    rows, moved = [], []
    for name, one in result["modules"].items():
        forward, backward = (
            statistics.median(pair[side] for pair in one["seconds"]) * 1000 for side in (0, 1)
        )
        rows.append([one["kind"], name, f"{forward:.2f} ms", f"{backward:.2f} ms",
                     f"{one['ratio']:.2f}", f"{one['low']:.2f} – {one['high']:.2f}"])  # fmt: skip
        if "moved_inputs" in one:
            sides = ("forward_read", "forward_written", "backward_read", "backward_written")
            moved.append([name, *(f"{one['moved_inputs'][side]:g}" for side in sides)])
    head = ["kind", "module", "forward", "backward", "backward / forward", "95 % interval"]
    sides = ["module", "forward reads", "writes", "backward reads", "writes"]
    return (
        table(head, rows)
        + "\nBytes that element-wise operators move, in multiples of the input:\n\n"
        + table(sides, moved)
        + stand(result)
    )


def autocast_cache(result: dict[str, Any]) -> str:
    """The cache on and off."""
    rows = []
    for case, one in result["cases"].items():
        both = [one[key] for key in ("cached", "uncached")]
        rows.append([
            case,
            *(str(way["casts"]) for way in both),
            *(f"{way['peak_bytes'] / 2**20:.1f} MiB" for way in both),
            *(f"{statistics.median(way['seconds']) * 1000:.1f} ms" for way in both),
            f"{one['ratio']:.3f} ({one['low']:.3f} – {one['high']:.3f})",
        ])  # fmt: skip
    head = ["case", "casts, cache on", "off", "peak, on", "off", "step, on", "off",
            "off / on (95 %)"]  # fmt: skip
    return table(head, rows) + stand(result)


def low_precision(result: dict[str, Any]) -> str:
    """Formats, swamping, loss scale, bytes."""
    formats = [
        [
            name,
            f"{one['exponent_bits']} + {one['mantissa_bits']}",
            *(f"{one[key]:.4g}" for key in ("largest", "smallest_normal", "smallest")),
            *(f"{one['spacing'][at]:.4g}" if at in one["spacing"] else "–" for at in ("1", "2048")),
            "yes" if one["agrees_with_torch"] else "no",
        ]
        for name, one in result["formats"].items()
    ]
    lost = [
        [
            name,
            *(f"{one[key]:.7g}" for key in
              ("2048 + 0.5", "stuck_at", "10,000 times 0.001", "torch.sum of them")),
        ]
        for name, one in result["swamping"].items()
    ]  # fmt: skip
    scale = result["loss_scale"]
    changes = [
        [str(step), f"2^{math.log2(now):.0f}", "overflow" if now < before else "grown"]
        for step, (before, now) in enumerate(itertools.pairwise(scale["scale"]), 2)
        if now != before
    ]
    moved = [
        [name, f"{one['bytes_per_element']:.0f}", f"{one['bytes_per_s'] / 1e9:.1f} GB/s",
         f"{statistics.median(one['seconds']) * 1000:.2f} ms"]
        for name, one in result["bytes"].items()
    ]  # fmt: skip
    return "\n".join((
        table(["format", "exponent + mantissa bits", "largest", "smallest normal", "smallest",
               "spacing at 1", "at 2048", "torch.finfo agrees"], formats),
        table(["format", "2048 + 0.5", "a sum of ones stops at", "10,000 × 0.001, one by one",
               "by torch.sum"], lost),
        f"Loss scale of an fp16 training, from 2^{math.log2(scale['scale'][0]):.0f}, to grow after "
        f"{scale['growth_interval']} good steps; {sum(scale['skipped'])} of {len(scale['scale'])} "
        "steps were left out:\n",
        table(["before step", "scale", "why"], changes),
        table(["sum of two tensors", "bytes an element", "moved", "time"], moved),
    )) + stand(result)  # fmt: skip


def convergence(result: dict[str, Any]) -> str:
    """Held-out losses beside AdamW's."""
    rows = []
    for name, case in result["cases"].items():
        if "left_out" in case:
            rows.append([f"`{name}`", "–", "–", case["left_out"]])
            continue
        apart = case["differences"]
        rows.append(
            [
                f"`{name}`",
                f"{statistics.fmean(case['losses']):.4f}",
                f"{case['mean_difference']:+.4f}",
                f"{min(apart):+.4f} to {max(apart):+.4f}",
            ]
        )
    shape = ", ".join(f"{name} {value}" for name, value in result["shape"].items())
    return (
        table(["case", "loss", "from AdamW in fp32", "by seed"], rows)
        + f"\nMeans of {result['seeds']} seeds after {result['steps']} steps, in nats; {shape}. "
        + f"AdamW's own losses are {result['spread_of_seeds']:.4f} apart.\n"
        + stand(result)
    )


def optimizers(result: dict[str, Any]) -> str:
    """A step of each implementation."""
    head = ["optimizer"]
    for name, one in result["sets"].items():
        head += [f"{name}: {one['tensors']:,} tensors, {one['values'] / 1e6:.1f} M", "for-loop = 1"]
    rows = []
    for optimizer in next(iter(result["sets"].values()))["optimizers"]:
        row = [f"`{optimizer}`"]
        for one in result["sets"].values():
            case = one["optimizers"][optimizer]
            low, high = case["quartiles"]
            row += [
                f"{case['median_s'] * 1e3:.2f} ms",
                f"{case['ratio']:.2f} ({low:.2f} – {high:.2f})",
            ]
        rows.append(row)
    about = f"\nMedians of {result['rounds']} rounds, quartiles in brackets; fp32.\n"
    return table(head, rows) + about + stand(result)


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "autocast_cache": autocast_cache,
    "checkpointing_price": checkpointing_price,
    "forward_backward": forward_backward,
    "convergence": convergence,
    "convergence_gpu": convergence,
    "idle": idle,
    "intermediate": intermediate,
    "low_precision": low_precision,
    "memory_accuracy": memory_accuracy,
    "memory_accuracy_gpu": memory_accuracy,
    "memory_loss": memory_loss,
    "mixed_precision_cpu": mixed_precision_cpu,
    "mixed_precision_speed": mixed_precision_speed,
    "mixed_precision_traced": mixed_precision_traced,
    "optimizers": optimizers,
    "optimizers_gpu": optimizers,
    "overhead": overhead,
    "overhead_engines": overhead,
    "quickstart": quickstart,
    "strategies": strategies,
    "tokenise": tokenise,
}


def fill(text: str) -> str:
    """The page with every marked part made anew."""

    def made(match: re.Match[str]) -> str:
        path = RESULTS / f"{match[2]}.json"
        if not path.exists():
            return f"{match[1]}Not recorded yet.\n{match[3]}"
        return match[1] + WRITERS[match[2]](json.loads(path.read_text())) + match[3]

    return _MARKED.sub(made, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = []
    for name in PAGES:
        page = ROOT / name
        filled = fill(page.read_text(encoding="utf-8"))
        if filled != page.read_text(encoding="utf-8"):
            stale.append(name)
            if not arguments.check:
                page.write_text(filled, encoding="utf-8")
    if arguments.check and stale:
        print(f"{', '.join(stale)}: run python benchmarks/figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
