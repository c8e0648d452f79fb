"""Activation checkpointing: the slowdown, the memory, and throughput with the larger batch.

    python benchmarks/seeds/s07_checkpointing.py          # records results/seeds_checkpointing.json
    python benchmarks/seeds/s07_checkpointing.py --quick  # small; records nothing

Steps without recomputation, with selective and with full recomputation take turns in one process
with one thread; then comes the largest batch whose peak does not exceed the plain one's.
benchmarks/checkpointing_price.py does the same for longer and under three strategies.
"""

import statistics
from typing import Any

from claims import THROUGHPUT, Claim, Experiment, run

BATCH, ROUNDS = 4, 10
SEQ_LEN = 1024
# Model, machine, number of its devices, and precision of matmuls: cases in which the plain batch
# fills the device, only one sample fits, and every step waits for a slow link.
CASES = (
    ("gpt2-xl", "a100-sxm-80-gb", 1, "bf16"),
    ("llama-3.2-1b", "titan-rtx", 1, "fp16"),
    ("gpt2-large", "2x-titan-rtx", 2, "fp16"),
)
MOST = 512

CLAIM = Claim(
    document=THROUGHPUT,
    says="Activation checkpointing costs 20 to 25 % of throughput, but since it frees a huge "
    "amount of memory, the batch can be larger and the throughput better overall.",
    hardware="none next to the figure; we assume the 80 GB A100, on which BLOOM was trained, "
    "and the TITAN RTX of another document (one, and two without NVLink)",
    figures={"lost": [0.20, 0.25]},
)


def predict(quick: bool) -> dict[str, Any]:
    """Predict the throughput lost at the plain batch, and gained with the largest that fits."""
    found = {}
    for case in CASES:
        modes = {mode: most_that_fit(case, mode) for mode in ("none", "selective", "full")}
        plain = modes["none"]
        for mode, one in modes.items():
            alike = at(case, mode, plain["batch"])
            one["lost"] = 1 - alike["tokens_per_s"] / plain["tokens_per_s"]
            one["with_larger"] = one["tokens_per_s"] / plain["tokens_per_s"] - 1
        name, machine, _, precision = case
        found[f"{name} on {machine}, {precision}"] = modes
    return found


def at(case: tuple[str, str, int, str], mode: str, batch: int) -> dict[str, Any]:
    """Estimate a step with this batch on each device."""
    from predictions import model, step

    name, machine, devices, precision = case
    plan = {"strategy": "ddp" if devices > 1 else "single", "dp_replicate": devices,
            "micro_batch": batch, "precision": precision, "checkpointing": mode}  # fmt: skip
    of = model(name, dropout=False)
    return {"batch": batch, **step(of, machine, plan, SEQ_LEN, batch * devices, kernel="fused")}


def most_that_fit(case: tuple[str, str, int, str], mode: str) -> dict[str, Any]:
    """Return the step of the largest batch that fits on a device; one sample always does here."""
    fits, too_many = 1, MOST
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        one = at(case, mode, middle)
        if one["needs_bytes"] <= one["memory_bytes"]:
            fits = middle
        else:
            too_many = middle
    return at(case, mode, fits)


def measure(quick: bool) -> dict[str, Any]:
    """Measure the cost at one batch, and the gain of the larger one."""
    from checkpointing_price import SEQ_LEN as MEASURED_SEQ_LEN
    from checkpointing_price import SPEC, bought, contest
    from contests import compared
    from contests import run as contend

    rounds, batch = (2, 1) if quick else (ROUNDS, BATCH)
    modes = contend(contest("single", batch), 1, rounds)
    compared(modes, "none")
    for one in modes.values():
        one["lost"] = 1 - 1 / one["times_base"]
    larger = {} if quick else bought(modes["none"]["peak_bytes"], max(3, rounds // 2), batch)
    plain_s = statistics.median(modes["none"]["seconds"]) / batch
    for one in larger.values():
        one["with_larger"] = plain_s / one["median_s_per_sample"] - 1
    shape = {"model": SPEC, "batch": batch, "seq_len": MEASURED_SEQ_LEN}
    return {"modes": modes, "larger": larger, "shape": shape}


EXPERIMENT = Experiment(
    "checkpointing", (CLAIM,), predict, measure,
    instead="One process on a CPU, which is as fast with small batches as with large ones, so it "
            "cannot show what a larger batch gains on a GPU.",
)  # fmt: skip

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
