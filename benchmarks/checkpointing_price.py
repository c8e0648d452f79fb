"""The cost of activation checkpointing, and the larger batch that it allows.

    python benchmarks/checkpointing_price.py            # records results/checkpointing_price.json
    python benchmarks/checkpointing_price.py --quick    # a quick check, records nothing

The folklore: 20 to 25 % less throughput. Steps of the same model and batch without checkpointing,
with selective and with full checkpointing alternate in one job: in one process and in two (ddp,
zero3), with one thread each and no two ranks on one core. Each peak is of live tensors, including
weights and optimizer. Then, in one process, this finds the largest batch whose peak does not exceed
that of the plain batch, and compares the time per sample with that of the plain batch.
"""

import argparse
import statistics
from typing import Any

from contests import Contest, compared, run

SPEC = {"family": "llama", "layers": 8, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 704,
        "vocab": 2048, "max_positions": 256, "tied": True}  # fmt: skip
BATCH, SEQ_LEN = 8, 256
MODES = ("none", "selective", "full")
FOLKLORE = (0.20, 0.25)


def contest(strategy: str, batch: int, modes: tuple[str, ...] = MODES) -> Contest:
    """Return a contest of the modes; micro-batches are as large as possible."""
    ranks = 1 if strategy == "single" else 2
    entries = {
        mode: {"strategy": strategy, "checkpointing": mode, "micro_batch": batch // ranks}
        for mode in modes
    }
    return Contest(SPEC, batch, SEQ_LEN, entries)


def prices(rounds: int, batch: int) -> dict[str, Any]:
    """Return each mode's time relative to no checkpointing, and its peak."""
    cases = {}
    for strategy in ("single", "ddp", "zero3"):
        found = run(contest(strategy, batch), 1 if strategy == "single" else 2, rounds)
        compared(found, "none")
        for one in found.values():
            one["throughput_loss"] = 1 - 1 / one["times_base"]
        cases[strategy] = found
    return cases


def peak_of(mode: str, batch: int) -> int:
    """Return the peak of live tensors in bytes, measured in a separate job."""
    found = run(contest("single", batch, (mode,)), 1, 0)
    return int(found[mode]["peak_bytes"])


def largest_batch(mode: str, limit_bytes: int, start: int) -> tuple[int, int]:
    """Return the largest batch whose peak is at most `limit_bytes`, and its peak.

    Peaks grow linearly with the batch: extrapolate from two batches, then take steps of one until
    the next batch does not fit.
    """
    first, second = peak_of(mode, start), peak_of(mode, 2 * start)
    batch = max(start, start + int((limit_bytes - first) * start / (second - first)))
    peak = peak_of(mode, batch)
    while peak > limit_bytes:
        batch -= 1
        peak = peak_of(mode, batch)
    while (more := peak_of(mode, batch + 1)) <= limit_bytes:
        batch, peak = batch + 1, more
    return batch, peak


def bought(limit_bytes: int, rounds: int, batch: int) -> dict[str, Any]:
    """Return each mode's largest batch within the plain peak, and its seconds per sample."""
    found = {}
    for mode in MODES[1:]:
        size, peak = largest_batch(mode, limit_bytes, batch)
        took = run(contest("single", size, (mode,)), 1, rounds)[mode]["seconds"]
        found[mode] = {
            "batch": size,
            "peak_bytes": peak,
            "seconds": took,
            "median_s_per_sample": statistics.median(took) / size,
        }
    return found


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="2 rounds; nothing is recorded")
    asked = parser.parse_args()
    from recording import save

    rounds, batch = (2, 2) if asked.quick else (asked.rounds, BATCH)
    cases = prices(rounds, batch)
    for strategy, modes in cases.items():
        for mode, one in modes.items():
            print(f"{strategy:6} {mode:9} {statistics.median(one['seconds']) * 1000:7.1f} ms, "
                  f"{one['times_base']:.3f} ({one['low']:.3f} – {one['high']:.3f}) of none, "
                  f"throughput -{one['throughput_loss']:.1%}, "
                  f"peak {one['peak_bytes'] / 2**20:.0f} MiB", flush=True)  # fmt: skip
    plain = cases["single"]["none"]
    larger = bought(plain["peak_bytes"], max(2, rounds // 4), batch)
    plain_s = statistics.median(plain["seconds"]) / batch
    for mode, one in larger.items():
        one["time_per_sample_over_plain"] = one["median_s_per_sample"] / plain_s
        print(f"{mode}: batch {one['batch']} for {batch} under the same peak, "
              f"{one['time_per_sample_over_plain']:.3f} of the time a sample")  # fmt: skip
    if not asked.quick:
        shape = {"model": SPEC, "batch": BATCH, "seq_len": SEQ_LEN}
        print(save("checkpointing_price", {
            "shape": shape, "rounds": rounds, "folklore": FOLKLORE, "cases": cases,
            "larger_batch": larger,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
