"""Tables of docs/results/seeds.md: the claims of documents, predictions and measurements.

Each table comes from results/seeds_NAME.json, which benchmarks/seeds records.
"""

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pages import stand, table

PICTURE = Path(__file__).parent.parent / "docs" / "results" / "seeds-loss.svg"
_COLORS = {"ddp fp32": "#4c72b0", "ring fp32": "#dd8452", "ddp bf16": "#55a868",
           "ring bf16": "#c44e52"}  # fmt: skip
_LAST = 10  # number of steps whose mean is the end of a curve


def said(result: dict[str, Any]) -> str:
    """Write each claim and its hardware."""
    return "".join(
        f"> *{claim['document']}*: {claim['says']} Hardware: {claim['hardware'].rstrip('.')}.\n\n"
        for claim in result["claims"]
    )


def ratio(value: float, low: float, high: float) -> str:
    """Format a value with its 95 % interval."""
    return f"{value:.2f} ({low:.2f} – {high:.2f})"


def slow_link(result: dict[str, Any]) -> str:
    """Write DP and DDP on a fast and a slow link."""
    (claim,), predicted, measured = result["claims"], result["predicted"], result["measured"]
    told, base = claim["figures"]["seconds"], "DDP, fast"
    rows = [
        [name, f"{seconds:.0f} s", f"{seconds / told[base]:.2f}",
         f"{predicted[name]['seconds']:.0f} s",
         f"{predicted[name]['seconds'] / predicted[base]['seconds']:.2f}"]
        for name, seconds in told.items()
    ]  # fmt: skip
    head = [f"{claim['figures']['steps']} steps", "document", "DDP, fast = 1", "planner",
            "DDP, fast = 1"]  # fmt: skip
    text = table(head, rows)
    for name, one in measured["models"].items():
        rows = [
            [way, f"{took['total_s']:.1f} s", f"{took['median_s'] * 1000:.0f} ms",
             ratio(took["ratio"], took["low"], took["high"])]
            for way, took in one["rows"].items()
        ]  # fmt: skip
        tokens = f"{one['global_batch']} × {one['seq_len']} tokens"
        text += f"\nMeasured, {name}, {one['steps']} steps of {tokens}:\n\n"
        text += table(["", "all steps", "median", "DDP, fast = 1 (95 %)"], rows)
    lacking = measured["no_slow_link"]
    link = f"The slow link carries {measured['mbit_per_s']:,} Mbit/s."
    return f"{text}\n{link if lacking is None else f'No slow link here: {lacking}.'}\n"


def shares(values: list[float]) -> str:
    """Format shares of devices, in order."""
    return ", ".join(f"{value:.0%}" for value in values)


def utilisation(result: dict[str, Any]) -> str:
    """Write devices' shares and their sums."""
    (claim,), measured = result["claims"], result["measured"]
    told = claim["figures"]
    rows = [
        ["document", name, shares(told["devices"][name]), f"{total:.2f} of {told['of']}"]
        for name, total in told["total"].items()
    ]
    rows += [
        [f"planner, {machine}", name, shares(one["devices"]), f"{one['total']:.2f} of {told['of']}"]
        for machine, ways in result["predicted"].items()
        for name, one in ways.items()
    ]
    rows += [
        ["measured", name, shares(one["devices"]), f"{one['total']:.2f} of {measured['of']}"]
        for name, one in measured["rows"].items()
    ]
    return table(["", "way", "each device", "sum"], rows) + (
        "\nSPS is a single parameter server (DP), DPS distributed parameter servers (DDP).\n"
    )


def loss_curves(result: dict[str, Any]) -> str:
    """Write where curves begin and end, how much they differ, and times."""
    measured = result["measured"]
    curves = [
        [name, f"{losses[0]:.3f}", f"{losses[len(losses) // 2]:.3f}",
         f"{statistics.fmean(losses[-_LAST:]):.3f}"]
        for name, losses in measured["curves"].items()
    ]  # fmt: skip
    apart = [[name, f"{share:.2e}"] for name, share in measured["apart"].items()]
    times = [
        [batch, f"`{way}`", f"{one['median_s'] * 1000:.1f} ms", ratio(*one["of_ddp"]),
         ratio(*one["of_fp32"]), f"{one['peak_bytes'] / 2**20:.1f} MiB"]
        for batch, ways in measured["times"].items()
        for way, one in ways.items()
    ]  # fmt: skip
    told = result["claims"][0]["figures"]["speedup"]
    predicted = [
        [name, f"{one['fp32']['step_s'] * 1000:.0f} ms", f"{one['fp16']['step_s'] * 1000:.0f} ms",
         f"{one['speedup']:.2f}",
         f"{one['fp16']['needs_bytes'] / one['fp32']['needs_bytes']:.2f}"]
        for name, one in result["predicted"].items()
    ]  # fmt: skip
    return "\n".join((
        table(["curve", "first loss", "halfway", f"mean of the last {_LAST}"], curves),
        table(["curves", "largest relative difference of the loss"], apart),
        f"Mixed precision, document: {told['ddp']} times as fast for DDP, {told['ring']} for "
        "Horovod. The planner, for either:\n",
        table(["", "step, fp32", "fp16", "times as fast", "memory, fp32 = 1"], predicted),
        "Measured, in turn:\n",
        table(["batch", "way", "median step", "relative to DDP (95 %)",
               "relative to fp32 (95 %)", "peak of tensors"], times),
        f"![Loss by step, for each batch]({PICTURE.name})\n",
    ))  # fmt: skip


def mixed_memory(result: dict[str, Any]) -> str:
    """Write the published table next to the traced one, and measured peaks with their account."""
    told = result["claims"][0]["figures"]["mib"]
    rows = [
        [batch, *(map(str, (*told[batch], told[batch][0] - told[batch][1])) if batch in told
                  else "–––"),
         f"{one['fp32']:,.0f}", f"{one['fp16']:,.0f}", f"{one['saved']:,.0f}"]
        for batch, one in result["predicted"].items()
    ]  # fmt: skip
    head = ["batch", "document, fp32", "fp16", "saved", "traced, fp32", "fp16", "saved"]
    peaks, kinds = [], []
    for batch, row in result["measured"]["rows"].items():
        sizes = [row[precision]["peak_bytes"] / 2**20 for precision in ("fp32", "bf16")]
        traced = [sum(row[precision]["account"].values()) / 2**20 for precision in ("fp32", "bf16")]
        peaks.append([batch, *(f"{size:.1f}" for size in (*sizes, sizes[0] - sizes[1], *traced))])
        for precision in ("fp32", "bf16"):
            account = row[precision]["account"]
            kinds.append([batch, precision, ", ".join(
                f"{kind} {size / 2**20:.1f}" for kind, size in account.items() if size >= 2**19
            )])  # fmt: skip
    return "\n".join((
        table(head, rows),
        'In MiB. "Traced" is the memory that the allocator reserves; the document\'s figures are '
        "from nvidia-smi. Measured here, MiB of live tensors:\n",
        table(["batch", "fp32", "bf16", "saved", "traced, fp32", "bf16"], peaks),
        "Memory at the peak, MiB by kind:\n",
        table(["batch", "precision", "account"], kinds),
    ))  # fmt: skip


def pipelines(result: dict[str, Any]) -> str:
    """Write utilisation by ranks and by micro-batches."""
    rows = [
        [ranks, "naive" if one["strategy"] == "mp" else "GPipe", str(one["microbatches"]),
         one["stages"], f"{one['formula']:.3f}",
         f"{one['utilisation']:.3f} ({one['low']:.3f} – {one['high']:.3f})"]
        for ranks, found in result["measured"]["worlds"].items()
        for one in found
    ]  # fmt: skip
    predicted = [
        ["naive" if one["plan"]["strategy"] == "mp" else "GPipe", count, f"{one['formula']:.3f}",
         f"{one['utilisation']:.3f}", f"{one['tokens_per_s']:,.0f}"]
        for count, one in result["predicted"].items()
    ]  # fmt: skip
    machine = next(iter(result["predicted"].values()))["machine"]
    return (
        table(["n", "", "m", "stages", "formula", "measured (95 %)"], rows)
        + f"\nThe planner, on {machine}, n = 4:\n\n"
        + table(["", "m", "formula", "utilisation", "tokens/s"], predicted)
    )


def ring(result: dict[str, Any]) -> str:
    """Write bytes and time of a ring and of a server."""
    predicted, measured = result["predicted"], result["measured"]
    buffer, rate = measured["buffer_bytes"], measured["link_bytes_per_s"]
    rows = []
    for ranks, ways in measured["ranks"].items():
        factors = {"ring": 2 * (int(ranks) - 1) / int(ranks), "server": 2 * (int(ranks) - 1)}
        for name, one in ways.items():
            low, high = one["quartiles_s"]
            # A server receives everything and then sends everything; a ring does both at the same
            # time.
            link_s = factors[name] * buffer / rate
            rows.append([
                ranks, name, f"{one['busiest_bytes'] / 2**20:.2f} MiB",
                f"{one['busiest_bytes'] / buffer:.2f} Ψ", f"{one['all_bytes'] / buffer:.2f} Ψ",
                "–" if measured["no_network"] else f"{link_s * 1000:.0f} ms",
                f"{one['median_s'] * 1000:.0f} ms ({low * 1000:.0f} – {high * 1000:.0f})",
            ])  # fmt: skip
    nodes = [
        [count, f"{one['ring_s']:.2f} s", f"{one['server_s']:.2f} s"]
        for count, one in predicted["nodes"].items()
    ]
    link = measured["no_network"] or f"links of {measured['mbit_per_s']} Mbit/s"
    head = ["n", "", "busiest rank sends", "in Ψ", "all ranks send", "time on the link",
            "measured (quartiles)"]  # fmt: skip
    return (
        table(head, rows)
        + f"\nΨ is a buffer of {buffer / 2**20:g} MiB; {link}. The planner, GPT-2's gradients "
        + f"({predicted['gradient_bytes'] / 1e6:.0f} MB) over {predicted['network']}:\n\n"
        + table(["nodes", "ring", "one server"], nodes)
    )


def checkpointing(result: dict[str, Any]) -> str:
    """Write throughput lost, and regained by a larger batch."""
    measured = result["measured"]
    low, high = result["claims"][0]["figures"]["lost"]
    rows = []
    for case, modes in result["predicted"].items():
        for mode, one in modes.items():
            rows.append([f"planner, {case}", mode, f"{one['lost']:.0%}", str(one["batch"]),
                         f"{one['needs_bytes'] / 2**30:.1f} GiB",
                         f"{one['with_larger']:+.0%}"])  # fmt: skip
    for mode, one in measured["modes"].items():
        larger = measured["larger"].get(mode, {})
        gained = larger.get("with_larger")
        rows.append([
            "measured", mode, f"{one['lost']:.0%}",
            str(larger.get("batch", measured["shape"]["batch"])),
            f"{one['peak_bytes'] / 2**30:.2f} GiB", "–" if gained is None else f"{gained:+.0%}",
        ])  # fmt: skip
    head = ["", "recomputed", "throughput lost, same batch", "largest batch", "memory",
            "throughput with that batch"]  # fmt: skip
    return (
        f"Document: {low:.0%} to {high:.0%} of throughput is lost.\n\n"
        + table(head, rows)
        + "\nPredicted memory is that of the largest batch, measured memory that of the same "
        + "batch; the measured largest batch is the one that fits under the plain step's peak.\n"
    )


def loader(result: dict[str, Any]) -> str:
    """Write loaders' tokens/s, the machines' consumption, and copy times."""
    measured = result["measured"]
    rows = [
        [one["loader"], str(one["workers"]), str(one.get("prefetch", "–")),
         "not stable enough" if one["tokens_per_s"] is None else f"{one['tokens_per_s']:,.0f}"]
        for one in measured["rows"]
    ]  # fmt: skip
    eaten, copies = [], []
    for machine, one in result["predicted"].items():
        eaten.append([machine, f"{one['step_s'] * 1000:.1f} ms", f"{one['tokens_per_s']:,.0f}"])
        for what, seconds in one["copies_s"].items():
            copies.append([machine, what, f"{one['link_bytes_per_s'] / 1e9:.1f} GB/s",
                           f"{seconds * 1000:.3f} ms"])  # fmt: skip
    notes = "".join(f"{note}\n" for note in (*measured["advice"], *measured["notes"]))
    return "\n".join((
        table(["loader", "workers", "prefetch", "tokens/s, measured"], rows),
        f"{notes}\nThe planner, GPT-2 with DDP:\n",
        table(["machine", "step", "tokens/s consumed"], eaten),
        table(["machine", "copied from page-locked memory", "link", "time"], copies),
    ))  # fmt: skip


def optimizers(result: dict[str, Any]) -> str:
    """Write the time of a step for each form, measured and predicted."""
    rows = []
    for name, one in result["measured"].items():
        for form, case in one["optimizers"].items():
            low, high = case["quartiles"]
            rows.append([
                f"measured, {name}: {one['tensors']:,} tensors, {one['values'] / 1e6:.1f} M",
                f"`{form}`", f"{case['median_s'] * 1000:.2f} ms",
                f"{case['ratio']:.2f} ({low:.2f} – {high:.2f})",
            ])  # fmt: skip
    for name, forms in result["predicted"].items():
        base = forms["adamw-for-loop"]
        rows += [
            [f"planner, TITAN RTX, {name}", f"`{form}`", f"{seconds * 1000:.2f} ms",
             f"{seconds / base:.2f}"]
            for form, seconds in forms.items()
        ]  # fmt: skip
    return table(["", "implementation", "step", "for-loop = 1 (quartiles)"], rows)


def tiles(result: dict[str, Any]) -> str:
    """Write the cost of sizes that are slightly off."""
    measured = result["measured"]
    rows = [
        [one["of"], f"{one['m']} × {one['n']} × {one['k']}", f"{one['seconds'] * 1e6:.0f} µs",
         f"{one['flops_per_s'] / 1e12:.0f} TFLOP/s"]
        for one in result["predicted"]["rows"]
    ]  # fmt: skip
    columns = [
        [size, f"{one['median_s'] * 1e3:.3f} ms",
         ratio(one["for_its_work"], one["low"], one["high"])]
        for size, one in measured["columns"].items()
    ]  # fmt: skip
    others = [
        [what, size, f"{one['median_s'] * 1e3:.2f} ms",
         ratio(one["for_its_work"], one["low"], one["high"])]
        for what, sizes in (("inner dimension", measured["depths"]), ("heads", measured["heads"]))
        for size, one in sizes.items()
    ]  # fmt: skip
    steps = measured["steps"]
    found = (
        "No steps stand out from the noise."
        if steps is None
        else f"Time rises by {steps['rise']:.1%} in steps of {steps['tile']}, which explains "
        f"{steps['explained']:.0%} of the variance that a straight line leaves."
    )
    return "\n".join((
        "The planner, A100, bf16, m × n × k:\n",
        table(["example of", "matmul", "time", "rate"], rows),
        f"Measured, {measured['rows']} × n × {measured['depth']}, fp32. {found}\n",
        table(["n", "median", "time per FLOP, the first = 1 (95 %)"], columns),
        table(["", "size", "median", "time per FLOP, the first = 1 (95 %)"], others),
    ))  # fmt: skip


def draw_curves(result: dict[str, Any]) -> None:
    """Draw docs/results/seeds-loss.svg: losses by step, by batch; the same bytes each time."""
    from pictures import GRID, write_svg

    curves = result["measured"]["curves"]
    batches = list(dict.fromkeys(name.split(", ")[1] for name in curves))
    traces, titles = [], []
    layout: dict[str, Any] = {
        "grid": {"rows": 1, "columns": len(batches), "pattern": "coupled"},
        "yaxis": {"title": {"text": "loss, nats a byte"}, **GRID},
    }
    for place, batch in enumerate(batches, 1):
        axis = "x" if place == 1 else f"x{place}"
        layout[f"xaxis{axis[1:]}"] = {"title": {"text": "step"}, **GRID}
        titles.append({"text": batch, "xref": f"{axis} domain", "yref": "paper", "x": 0.5,
                       "y": 1.0, "yanchor": "bottom", "showarrow": False})  # fmt: skip
        for way, color in _COLORS.items():
            losses = curves[f"{way}, {batch}"]
            dash = "dash" if way.startswith("ring") else "solid"
            traces.append({
                "type": "scatter", "mode": "lines", "name": way, "legendgroup": way,
                "showlegend": place == 1, "xaxis": axis, "yaxis": "y",
                "x": list(range(1, len(losses) + 1)), "y": losses,
                "line": {"color": color, "width": 1.4, "dash": dash},
            })  # fmt: skip
    write_svg(PICTURE, traces, {**layout, "annotations": titles}, (840, 340))


def whole(body: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    """Return claims, tables, and what is measured instead of what this machine cannot do."""
    return lambda result: f"{said(result)}{body(result)}\n{result['instead']}\n"


def recorded(text: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    """Return the record with machine and date."""
    return lambda result: text(result) + stand(result)


TABLES: Mapping[str, Callable[[dict[str, Any]], str]] = {
    f"seeds_{body.__name__}": whole(body)
    for body in (
        slow_link, utilisation, loss_curves, mixed_memory, pipelines, ring, checkpointing, loader,
        optimizers, tiles,
    )
}  # fmt: skip
WRITERS = {name: recorded(text) for name, text in TABLES.items()}
