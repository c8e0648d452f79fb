"""Write the recorded figures into README.md and docs, between their markers, and measured steps.

    python benchmarks/figures.py            # rewrite
    python benchmarks/figures.py --check    # exit 1 if a page is out of date

A page contains `<!-- figures: NAME -->` and `<!-- end -->`; the text in between comes from
results/NAME.json (for NAME--PART, from another part of it) or from data/NAME.csv.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures_accuracy
import figures_compare
import figures_faults
import figures_finals
import figures_gpu
import figures_kinds
import figures_levers
import figures_performance
import figures_probe
import figures_seeds
import figures_versions
import figures_zoo
import measured_steps
from pages import stand, table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DATA = ROOT / "benchmarks" / "data"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_MARKED = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def overhead(result: dict[str, Any]) -> str:
    """Compare outpace's loop with a bare one."""
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
        "interval narrow enough",
        "target met by its upper end",
    ]
    return table(head, rows) + stand(result)


def host_time(result: dict[str, Any]) -> str:
    """Compare a step's host time with transformers' own."""
    rows = [
        [
            case,
            f"{r['median_transformers_s'] * 1000:.1f} ms",
            f"{r['median_outpace_s'] * 1000:.1f} ms",
            f"{r['ratio']:.2f}",
            f"{r['low']:.2f} – {r['high']:.2f}",
            f"{r['operators']['transformers']:,} / {r['operators']['outpace']:,}",
            "yes" if r["reached"] else "no",
        ]
        for case, r in result["cases"].items()
    ]
    head = ["case", "transformers", "outpace", "ratio", "95 % interval",
            "operators, transformers / outpace",
            f"ratio ≤ {result['targets']['ratio']}"]  # fmt: skip
    own, most = result["bookkeeping"], result["targets"]["bookkeeping_ms"]
    said = f"\nBookkeeping of a step: {own['median_s'] * 1000:.3f} ms (target: ≤ {most}).\n"
    return table(head, rows) + said + stand(result)


def tokenise(result: dict[str, Any]) -> str:
    """Compare data preparation with datasets.map."""
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
        + f"\noutpace is faster by a median factor of {result['ratio']:.2f} over {len(ratios)} "
        + f"pairs ({min(ratios):.2f} to {max(ratios):.2f}; target ≥ {result['target']}). The file "
        + f"has {result['bytes'] / 1e6:.0f} MB, {result['documents']:,} documents and "
        + f"{tokens / 1e6:.1f} M tokens.\n"
        + stand(result)
    )


def quickstart(result: dict[str, Any]) -> str:
    """Write the last output of scripts/quickstart."""
    shown = "\n".join(result["shown"]).strip("\n")
    took = f"The whole script took {result['seconds']:.0f} s.\n"
    return f"```text\n{shown}\n```\n\n{took}" + stand(result)


def quickstart_short(result: dict[str, Any]) -> str:
    """Write the first tables of the last output of scripts/quickstart."""
    text = "\n".join(result["shown"]).strip("\n")
    shown = re.split(r"\n  Forwards? and backward", text, maxsplit=1)[0]
    return f"```text\n{shown.rstrip()}\n```\n" + stand(result)


def strategies(result: dict[str, Any]) -> str:
    """Compare all strategies, in one table per number of processes."""
    head = [
        "strategy", "mesh", "step", "quartiles", "sent, all ranks", "busiest sends", "idle",
        "busiest time", "memory", "busiest memory", "utilisation",
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
                utilisation(one.get("utilisation")),
            ]
            for name, one in world["strategies"].items()
        ]
        ring = world["ring_over_ddp"]
        left_out = "".join(
            f"Not run: `{name}`. {why.rstrip('.')}.\n" for name, why in world["refused"].items()
        )
        pages.append(
            f"{processes} processes:\n\n{table(head, rows)}\n"
            f"Step time of `ring` relative to `ddp`, with alternating steps: {ring['ratio']:.3f} "
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


def utilisation(loads: list[dict[str, Any]] | None) -> str:
    """Write each device's average utilisation over a run; each core's if there is no device."""
    if not loads:
        return "not recorded yet"
    shares = [
        share
        for load in loads
        for share in [one["utilisation"] for one in load["devices"]] or load["host"]["cores"]
    ]
    return ", ".join("n/a" if share is None else f"{share:.0%}" for share in shares)


def idle(result: dict[str, Any]) -> str:
    """Write the idle time of pipelines: measured, by formula and simulated."""
    head = ["processes", "schedule", "m", "stages", "measured", "range", "formula",
            "simulated", "replay"]  # fmt: skip
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
    about = (
        "\nIdle time as a share of all ranks' time in a step; m is the number of micro-batches.\n"
    )
    return table(head, rows) + about + stand(result)


def report(result: dict[str, Any]) -> str:
    """Write how long a long run's page takes to create and to draw."""
    rows = [
        [what, *(f"{f(result[name]):.2f} s" for f in (statistics.median, min, max))]
        for what, name in (
            ("written by `outpace report`", "made_s"),
            ("opened in Chromium, until the visible part is drawn", "seen_s"),
            ("both", "s"),
            ("opened in Chromium, until all figures are drawn", "drawn_s"),
        )
    ]
    return (
        table([f"a run of {result['steps']:,} steps", "median", "fastest", "slowest"], rows)
        + f"\n{result['metrics_bytes'] / 1e6:.0f} MB of metrics give a page of "
        + f"{result['page_bytes'] / 1e6:.1f} MB; {result['spikes_drawn']} of {result['spikes']} "
        + "spikes are drawn. Target: every page is written and visible within "
        + f"{result['target_s']:.0f} s; "
        + f"{'reached' if result['reached']['time'] else 'not reached'}.\n"
        + stand(result)
    )


def intermediate(result: dict[str, Any]) -> str:
    """Write what forwards keep for backwards, on the fullest and the emptiest rank."""
    head = ["ranks", "schedule", "checkpointing", "m", "micro-batches in flight, by rank",
            "kept, by rank", "values per token and layer, in multiples of the width",
            "peak above weights, by rank"]  # fmt: skip
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


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    **figures_accuracy.WRITERS,
    **figures_compare.WRITERS,
    **figures_faults.WRITERS,
    **figures_levers.WRITERS,
    **figures_finals.WRITERS,
    **figures_gpu.WRITERS,
    **figures_kinds.WRITERS,
    **figures_performance.WRITERS,
    **figures_probe.WRITERS,
    **figures_seeds.WRITERS,
    **figures_zoo.WRITERS,
    "convergence_gpu": figures_levers.convergence,
    "memory_accuracy_gpu": figures_levers.memory_accuracy,
    "optimizers_gpu": figures_levers.optimizers,
    "idle": idle,
    "torch_versions": figures_versions.torch_versions,
    "intermediate": intermediate,
    "host_time": host_time,
    "overhead": overhead,
    "overhead_engines": overhead,
    "quickstart": quickstart,
    "quickstart--short": quickstart_short,
    "report": report,
    "strategies": strategies,
    "tokenise": tokenise,
}


def fill(text: str) -> str:
    """Return the page with every marked part rewritten."""

    def made(match: re.Match[str]) -> str:
        name = match[2].partition("--")[0]
        if name in figures_gpu.DATA:
            return match[1] + figures_gpu.DATA[name](DATA / f"{name}.csv") + match[3]
        path = RESULTS / f"{name}.json"
        if not path.exists():
            return f"{match[1]}Not recorded yet.\n{match[3]}"
        return match[1] + WRITERS[match[2]](json.loads(path.read_text())) + match[3]

    return _MARKED.sub(made, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = []
    for page in PAGES:
        filled = fill(page.read_text(encoding="utf-8"))
        if filled != page.read_text(encoding="utf-8"):
            stale.append(str(page.relative_to(ROOT)))
            if not arguments.check:
                page.write_text(filled, encoding="utf-8")
    made, kept = measured_steps.text(), measured_steps.KEPT
    if not kept.exists() or kept.read_text(encoding="utf-8") != made:
        stale.append(kept.name)
        if not arguments.check:
            kept.write_text(made, encoding="utf-8")
    if arguments.check and stale:
        print(f"{', '.join(stale)}: run python benchmarks/figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
