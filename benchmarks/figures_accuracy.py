"""Tables and scatter plots of docs/results/accuracy.md, from planner_accuracy.py's results."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import stand, table

DOCS = Path(__file__).parent.parent / "docs" / "results"
FAR = 0.3
# Causes of errors above FAR: a source with a condition on its rows, and an explanation.
_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#8c8c8c")
_CAUSES: tuple[tuple[str, Callable[[dict[str, Any]], bool], str], ...] = (
    ("vtrain-single, 8 ranks of tp",
     lambda row: row["source"] == "vtrain-single" and "TP 8" in row["plan"],
     "every layer waits for the host there; these took 3.7 to 5.0 ms, while layers with more work "
     "took 2.7 to 3.4 ms: the time to launch a layer differs between profiles (see below)"),
    ("fp8 with unstated settings",
     lambda row: row["source"] == "megatron-examples-llama",
     "sharding and recomputation are not stated; Transformer Engine keeps fp8 weights, outpace "
     "casts at every use"),
    ("short sequences and small models on FSDP",
     lambda row: row["source"] == "llm-foundry" and _share(row, "host_s") > 0.05,
     "bound by the host: the planner assumes the same time per operator for all hosts"),
    ("long sequences",
     lambda row: row["source"] == "llm-foundry" and _share(row, "attention_s") > 0.2,
     "bound by attention: the Triton kernel's share of FlashAttention-2's rate is published as a "
     "range, 1.3 to 2.5"),
    ("sharded over nodes, network not stated",
     lambda row: row["source"] == "llm-foundry",
     "eight HDR cards per node are assumed; a slower network would not hide gathers behind so "
     "small a micro-batch. Not verified"),
)  # fmt: skip
_OTHERWISE = "not explained"
# Causes of errors in peak memory, by source.
_MEMORY_CAUSES = {
    "megatron-lm-golden":
        "older runs of one test, on other machines, use as much memory as if attention scores were "
        "materialised; newer runs do not, and no column tells them apart; two other tests use "
        "features without a column: a fused loss and distillation.",
    "litgpt-resource-tables":
        "not explained.",
}  # fmt: skip


def _share(row: dict[str, Any], part: str) -> float:
    return float(row["parts_s"].get(part, 0.0)) / float(row["predicted_s"])


def cause(row: dict[str, Any]) -> tuple[str, str]:
    """Return the cause of a row's error: a name and a sentence."""
    for name, holds, why in _CAUSES:
        if holds(row):
            return name, why
    return _OTHERWISE, "no term stands out"


def error(row: dict[str, Any]) -> float:
    """Return the error of a step's time."""
    return float(row["predicted_s"]) / float(row["measured_s"]) - 1


def accuracy(result: dict[str, Any]) -> str:
    """Write every target with its error, next to one constant's, and whether it is met."""
    missed = [one for one in result["scores"] if not one["reached"]]
    rows = [_row(one) for one in sorted(result["scores"], key=lambda one: bool(one["reached"]))]
    head = ["on", "figure", "rows", "planner", "target", "one constant", "met"]
    text = (
        f"{len(missed)} of {len(result['scores'])} targets are missed; they are listed first.\n\n"
    )
    return text + table(head, rows) + "\n" + _residuals(result) + _titans(result) + stand(result)


def _row(one: dict[str, Any]) -> list[str]:
    more = one["figure"] in ("plans/s of estimate()", "best among the first three")
    sign = "≥" if more else "≤"
    return [
        one["on"],
        one["figure"],
        f"{one['rows']:,}",
        _figure(one, one["value"]),
        f"{sign} {_figure(one, one['target'])}",
        "–" if one["constant"] is None else _figure(one, one["constant"]),
        "yes" if one["reached"] else "**no**",
    ]


def _figure(one: dict[str, Any], value: float) -> str:
    figure = one["figure"]
    if "plans/s" in figure:
        return f"{value:,.0f}"
    if figure.endswith(", core s"):
        return f"{value:.1f} s"
    if figure.startswith("wrong"):
        return f"{value:.0f}"
    return f"{value:.1%}"


def _residuals(result: dict[str, Any]) -> str:
    spread = result["residuals"]
    rows = [[source, f"{share:.0%}"] for source, share in spread["left_out"].items()]
    return (
        f"The 90 % interval of {spread['rows']:,} measured times is {spread['low']:.2f} to "
        f"{spread['high']:.2f} times the prediction. If it is set from all other sources, it "
        "covers the following share of each:\n\n"
        + table(["left out", "covered"], rows)
        + f"\nThe mean over sources is {spread['coverage']:.1%}; of all rows, "
        f"{spread['coverage_of_rows']:.1%} are covered.\n\n"
    )  # fmt: skip


def _titans(result: dict[str, Any]) -> str:
    rows = [
        [name, f"{one['predicted_s']:.1f} s", f"{one['measured_s']:.1f} s"]
        for name, one in result["titans"].items()
    ]
    return "Two TITAN RTX, GPT-2, 200 steps:\n\n" + table(["", "predicted", "measured"], rows)


def far(result: dict[str, Any]) -> str:
    """Write the rows with errors above FAR, by cause."""
    kinds: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in result["rows"]:
        if abs(error(row)) > FAR:
            kinds[cause(row)].append(row)
    rows = [
        [name, str(len(own)), f"{min(map(error, own)):+.0%} to {max(map(error, own)):+.0%}", why,
         ", ".join(str(row["row"]) for row in own)]
        for (name, why), own in sorted(kinds.items(), key=lambda item: -len(item[1]))
    ]  # fmt: skip
    count = sum(map(len, kinds.values()))
    text = f"{count} of {len(result['rows']):,} step times.\n\n"
    memory = [
        one for one in result["memory"]
        if one["measured_bytes"] and abs(one["predicted_bytes"] / one["measured_bytes"] - 1) > FAR
    ]  # fmt: skip
    by = defaultdict(list)
    for one in memory:
        by[one["source"]].append(one["predicted_bytes"] / one["measured_bytes"] - 1)
    rest = "".join(
        f"\nThe predicted peaks of {len(own)} rows of {source} are off by {min(own):+.0%} to "
        f"{max(own):+.0%}: "
        f"{_MEMORY_CAUSES[source]}\n"
        for source, own in by.items()
    )
    head = ["cause", "rows", "errors", "why", "row_id"]
    return text + table(head, rows) + rest


def pieces(result: dict[str, Any]) -> str:
    """Write that vtrain-single consists of pieces, and which of them determine its picks."""
    found = result["pieces"]
    line, parts = found["linear"], found["pieces"]
    example = line["example"]
    *shape, micro_batch = (f"{name} {float(value):g}" for name, value in example[:7])
    counts, times = zip(*example[7:], strict=True)
    head = ["hidden", "tp", "micro-batch", "published", "planner", "", "regret"]
    rows = [
        [str(one["hidden"]), str(one["tp"]), str(one["micro_batch"]),
         f"{one['published_s'] * 1e3:.3f} ms", f"{one['predicted_s'] * 1e3:.3f} ms",
         f"{one['predicted_s'] / one['published_s'] - 1:+.0%}", f"{one['regret'][0]:.2%}"]
        for one in parts
    ]  # fmt: skip

    def told(name: str) -> str:
        return "{:.1%} on average, {:.1%} at the 95th percentile".format(*found[name])

    one, two = ("hidden {}, tp {}, micro-batch {}".format(*worst) for worst in found["worst"])
    took = _listed([f"{seconds * 1e3:.3f}" for seconds in times])
    return (
        f"With {micro_batch} ({', '.join(shape)}), steps of {_listed(counts)} micro-batches take "
        f"{took} ms. None of "
        f"{line['checked']} further counts is more than {line['worst_s'] * 1e6:.0f} µs off the "
        f"line through the first two. The rows are built from {len(parts)} timings of a layer and "
        "micro-batch; the last column is the mean regret of a planner that takes this time from "
        "outpace's planner and knows everything else exactly:\n\n"
        + table(head, rows)
        + f"\nRegret with predicted layers and everything else exact: {told('all_else_known')}. "
        f"With exact layers and everything else predicted: {told('layers_known')}. With everything "
        f"exact except {one}: {told('all_but_worst_known')}; except that one and {two}: "
        f"{told('all_but_two_known')}. With only these two exact: "
        f"{told('predicted_but_two_known')}.\n"
    )


def _listed(items: Any) -> str:
    *some, last = map(str, items)
    return f"{', '.join(some)} and {last}"


def left_out(result: dict[str, Any]) -> str:
    """Write the rows without a prediction, with reasons."""
    rows = [[one["source"], str(one["rows"]), one["why"]] for one in result["left_out"]]
    return table(["source", "rows", "why"], rows)


def measured(result: dict[str, Any]) -> str:
    """Write a probed machine's steps: targets, regrets and errors by kind of plan."""
    head = ["on", "figure", "rows", "planner", "target", "one constant", "met"]
    text = table(head, [_row(one) for one in result["scores"]])
    groups = [
        [name, f"{own:.1%}", f"{other:.1%}"] for name, (own, other) in result["regrets"].items()
    ]
    text += "\n" + table(["model on processes", "regret of the pick", "of any"], groups)
    kinds: defaultdict[str, list[float]] = defaultdict(list)
    for row in result["rows"]:
        took = statistics.median(row["steps_s"])
        kinds[row["plan"]["strategy"]].append(row["predicted_s"] / took - 1)
    by = [
        [name, str(len(own)), f"{statistics.median(own):+.1%}",
         f"{statistics.fmean(map(abs, own)):.1%}", f"{max(own, key=abs):+.0%}"]
        for name, own in kinds.items()
    ]  # fmt: skip
    text += "\n" + table(["strategy", "steps", "median", "mean error", "worst"], by)
    spread = result["residuals"]
    known = [
        f"{one['standard_error']:.1%} on {world} ({one['steps']} steps each)"
        for world, one in result.get("noise", {}).items()
    ]
    if known:
        text += f"\nStandard errors of the median steps, by processes: {_listed(known)}.\n"
    return (
        text + f"\nThe 90 % interval is {spread['low']:.2f} to {spread['high']:.2f} times the "
        f"prediction; if it is set from all other groups, it covers {spread['coverage']:.1%} of "
        f"each on average.\n\n{stand(result)}"
    )


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "planner_accuracy": accuracy,
    "planner_measured": measured,
    "planner_accuracy--far": far,
    "planner_accuracy--left-out": left_out,
    "planner_accuracy--pieces": pieces,
}


def draw(result: dict[str, Any]) -> None:
    """Draw docs/results/accuracy-time.svg and accuracy-memory.svg: predicted over measured."""
    times: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in result["rows"]:
        times[row["source"]].append((row["measured_s"], row["predicted_s"]))
    _scatter(times, "measured step (s)", "predicted (s)", DOCS / "accuracy-time.svg")
    sizes: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in result["memory"]:
        if one["measured_bytes"]:
            name = one["source"] if one["source"] != "litgpt-resource-tables" else "litgpt, LoRA"
            sizes[name].append((one["measured_bytes"] / 2**30, one["predicted_bytes"] / 2**30))
    _scatter(sizes, "measured peak (GiB)", "predicted (GiB)", DOCS / "accuracy-memory.svg")


def _scatter(kinds: dict[str, list[tuple[float, float]]], across: str, up: str, path: Path) -> None:
    """Draw a logarithmic plot with lines for equality and 30 % off; its bytes are reproducible."""
    from pictures import GRID, write_svg

    values = [value for pairs in kinds.values() for pair in pairs for value in pair]
    ends = [min(values) / 1.3, max(values) * 1.3]
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "showlegend": False, "x": ends,
         "y": [end * factor for end in ends],
         "line": {"color": "#444444" if factor == 1 else "#bbbbbb", "width": 1,
                  "dash": "solid" if factor == 1 else "dash"}}
        for factor in (1, 1 - FAR, 1 + FAR)
    ]  # fmt: skip
    for color, (name, pairs) in zip(_COLORS, kinds.items(), strict=False):
        xs, ys = zip(*pairs, strict=True)
        size = max(3.0, 6 / math.sqrt(len(pairs)) + 3)
        traces.append({
            "type": "scatter", "mode": "markers", "name": f"{name} ({len(pairs)})", "x": xs,
            "y": ys, "marker": {"color": color, "size": size, "opacity": 0.7},
        })  # fmt: skip
    span = [math.log10(end) for end in ends]
    axis = {"type": "log", "range": span, "exponentformat": "power", "dtick": 1, **GRID}
    layout = {"xaxis": {"title": {"text": across}, **axis},
              "yaxis": {"title": {"text": up}, **axis},
              "title": {"text": "dashed: 30 % off", "font": {"size": 12}, "x": 0.1},
              "legend": {"x": 0.02, "y": 0.98, "font": {"size": 10}}}  # fmt: skip
    write_svg(path, traces, layout, (640, 560))
