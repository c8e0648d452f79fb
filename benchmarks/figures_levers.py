"""Tables of the cost and savings of memory options, from results/NAME.json by functions' names."""

import itertools
import math
import statistics
from typing import Any

from pages import stand, table


def memory_accuracy(result: dict[str, Any]) -> str:
    """Write traced next to measured peaks, with the largest errors first."""
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
        f"\n{result['cases']} configurations: the trace is off by "
        f"{result['mean_absolute_error']:.2%} on average (target {result['target_mean']:.0%}), and "
        f"by {result['worst_error']:.2%} at most (target {result['target_worst']:.0%}). Measured "
        f"peaks below 300 MiB: {', '.join(result['below_300_mib']) or 'none'}. Configurations that "
        f"failed: {', '.join(result['failed']) or 'none'}.\n"
    )
    if result.get("left_out"):
        about += f"Left out: {', '.join(result['left_out'])}.\n"
    head = ["configuration", "traced", "measured", "off by", "process grew by"]
    return table(head, lines) + about + stand(result)


def memory_shown(result: dict[str, Any]) -> str:
    """Write what the command prints for the example in docs/guides/memory.md."""
    case, large = result["cases"]["readme"], result["cases"]["70b"]
    shown = "\n".join(case["shown"]).strip("\n")
    seconds = (f"{statistics.median(one['seconds']):.0f} s" for one in (case, large))
    about = "\nThe command took {}; 70 billion parameters on 256 GPUs take {} (`{}`).\n".format(
        *seconds, large["words"]
    )
    return f"```sh\n{case['words']}\n```\n\n```text\n{shown}\n```\n" + about + stand(result)


def memory_loss(result: dict[str, Any]) -> str:
    """Write peak memory and time of the loss, chunked and plain."""
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


def mixed_precision_traced(result: dict[str, Any]) -> str:
    """Write the published table next to the derived ones."""
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
        f"At batch {size}, 16 bits save {one['traced_mib']:,.0f} MiB in the trace; the published "
        f"saving is {one['published_mib']:,} MiB ({one['off']:+.0%}, "
        f"{'within' if one['reached'] else 'not within'} the {result['tolerance']:.0%} allowed).\n"
        for size, one in result["verdicts"].items()
    )
    rest = ", ".join(f"{name}: {mib:,.0f}" for name, mib in result["beyond_reserve_mib"].items())
    return (
        table(head, rows)
        + f'\nAll values are in MiB. "Traced" is what the allocator has reserved. {verdicts}'
        + "Published reading minus traced reserved memory in MiB, by batch and precision: "
        + f"{rest}.\n"
        + stand(result)
    )


def mixed_precision_cpu(result: dict[str, Any]) -> str:
    """Write peaks on this machine, measured and traced, and what fits within limits."""
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
        + "\nAll values are in MiB. The largest of these batches whose tensors fit in memory:\n\n"
        + table(["limit", "fp32", "bf16"], fits)
        + stand(result)
    )


def mixed_precision_speed(result: dict[str, Any]) -> str:
    """Compare bf16 with fp32, by strategy."""
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
    head = ["strategy", "step, fp32", "bf16", "speedup", "95 % interval", "peak, fp32",
            "bf16"]  # fmt: skip
    return (
        table(head, rows)
        + f"\nInstructions or units of this hardware for 16-bit matmuls: {units}.\n"
        + stand(result)
    )


def checkpointing_price(result: dict[str, Any]) -> str:
    """Write time and memory of recomputation, and the batch that it allows."""
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
        f"Within the peak memory of batch {result['shape']['batch']} without recomputation, {mode} "
        f"recomputation allows a batch of {one['batch']}, at "
        f"{one['time_per_sample_over_plain']:.2f} × the time per sample.\n"
        for mode, one in result["larger_batch"].items()
    )
    head = ["strategy", "checkpointing", "step", "none = 1", "95 % interval", "throughput lost",
            "peak"]  # fmt: skip
    return f"{table(head, rows)}\n{bought}{stand(result)}"


def forward_backward(result: dict[str, Any]) -> str:
    """Write times by kind of module, and bytes of element-wise ones in multiples of the input."""
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
    """Write results with the cache on and off."""
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
    """Write formats, swamping, loss scale and bytes."""
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
        table(["format", "2048 + 0.5", "a sum of ones stops growing at",
               "10,000 × 0.001, one by one", "by torch.sum"], lost),
        f"Loss scale of an fp16 run, from 2^{math.log2(scale['scale'][0]):.0f}, growing after "
        f"{scale['growth_interval']} good steps; {sum(scale['skipped'])} of {len(scale['scale'])} "
        "steps were skipped:\n",
        table(["before step", "scale", "why"], changes),
        table(["sum of two tensors", "bytes per element", "moved", "time"], moved),
    )) + stand(result)  # fmt: skip


def convergence(result: dict[str, Any]) -> str:
    """Write held-out losses next to AdamW's."""
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
        table(["case", "loss", "difference from AdamW in fp32", "range over seeds"], rows)
        + f"\nMeans of {result['seeds']} seeds after {result['steps']} steps, in nats; {shape}. "
        + f"AdamW's losses differ by {result['spread_of_seeds']:.4f} between seeds.\n"
        + stand(result)
    )


def optimizers(result: dict[str, Any]) -> str:
    """Write the time of a step for each implementation."""
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


def offload(result: dict[str, Any]) -> str:
    """Write the time of offloading compared with the plain plan, and the memory that remains."""
    rows = []
    for name, case in result["cases"].items():
        seen, plain = case["memory"], case["plain_memory"]
        size = seen["parameter_bytes"]
        row = [name, f"{case['step_time_ratio']:.2f} ({case['low']:.2f} – {case['high']:.2f})"]
        for field in ("anonymous_bytes", "anonymous_after_forward_bytes"):
            change = seen[field] - plain[field]
            row.append(f"{change / 2**20:+,.0f} MiB ({change / size:+.1f} P)")
        rows.append(row)
    head = ["offloaded", "time, plain = 1", "anonymous memory between steps", "after the forward"]
    shape = ", ".join(f"{name} {size:,}" for name, size in result["shape"].items())
    parameters = next(iter(result["cases"].values()))["memory"]["parameter_bytes"]
    about = (
        f"\nMedian ratios of pairs of steps, 95 % intervals in brackets; {shape}; P = "
        f"{parameters / 2**20:,.0f} MiB of parameters.\n"
    )
    return table(head, rows) + about + stand(result)


def lora(result: dict[str, Any]) -> str:
    """Write time and memory of a step with all weights, adapters, and adapters on 4-bit weights."""
    full = result["cases"]["full"]["median_step_s"]
    rows = []
    for name, case in result["cases"].items():
        held = case["held_bytes"]
        sizes = [*held.values(), case["peak_bytes"]]
        rows.append(
            [
                name,
                f"{case['median_step_s'] * 1e3:,.0f} ms",
                f"{case['median_step_s'] / full:.2f}",
                *(f"{size / 2**20:,.1f} MiB" for size in sizes),
            ]
        )
    kinds = [kind.replace("_", " ") for kind in result["cases"]["full"]["held_bytes"]]
    head = ["trained", "step", "full = 1", *kinds, "peak of tensors"]
    shape = ", ".join(f"{name} {size:,}" for name, size in result["shape"].items())
    return table(head, rows) + f"\n{result['model']}, {shape}, fp32.\n" + stand(result)


def planner_memory(result: dict[str, Any]) -> str:
    """Write the planner's formula next to the trace: by strategy, and with the largest errors."""
    by_strategy: dict[str, list[float]] = {}
    for row in result["rows"]:
        by_strategy.setdefault(row["plan"]["strategy"], []).append(row["error"])
    lines = [
        [name, str(len(errors)), f"{statistics.fmean(map(abs, errors)):.2%}",
         f"{max(errors, key=abs):+.2%}"]
        for name, errors in by_strategy.items()
    ]  # fmt: skip
    furthest = sorted(result["rows"], key=lambda row: -abs(row["error"]))[:8]
    worst = [
        [f"{row['error']:+.2%}", f"{row['model']}, {row['seq_len']} tokens, {row['device']}",
         ", ".join(f"{key} {value}" for key, value in row["plan"].items())
         + (f", accumulation {row['accumulation']}" if row["accumulation"] > 1 else "")]
        for row in furthest
    ]  # fmt: skip
    speed = result["speed"]["plans_per_s"]
    about = (
        f"\n{result['cases']} plans of {result['models']} models, seed {result['seed']}: mean "
        f"error {result['mean_absolute_error']:.2%} (target {result['target_mean']:.0%}), largest "
        f"{result['worst_error']:.2%} (target {result['target_worst']:.0%}); "
        f"{result['beyond_target']} beyond that. {round(speed, -3):,.0f} plans per second on one "
        f"core. Plans that could not be traced: {len(result['refused'])}.\n"
    )
    return (
        table(["strategy", "plans", "mean", "furthest"], lines)
        + "\n"
        + table(["off by", "model", "plan"], worst)
        + about
        + stand(result)
    )


WRITERS = {
    writer.__name__: writer
    for writer in (
        autocast_cache, checkpointing_price, convergence, forward_backward, lora, low_precision,
        memory_accuracy, memory_loss, memory_shown, mixed_precision_cpu, mixed_precision_speed,
        mixed_precision_traced, offload, optimizers, planner_memory,
    )
}  # fmt: skip
