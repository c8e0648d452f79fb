"""Baseline, single parameter server, distributed: utilisation of devices.

    python benchmarks/seeds/s02_utilisation.py            # records results/seeds_utilisation.json
    python benchmarks/seeds/s02_utilisation.py --quick    # small; records nothing

Two processes, with one thread each, run a step of each way in turn. A rank is busy while its main
thread computes or waits for a core; its shares of the step add up to the utilisation, out of 2.
"""

import statistics
from typing import Any

from claims import PRETRAINING, Claim, Experiment, run

MACHINES = ("4x-gtx-1080-ti", "4x-v100")
SEQ_LEN, EACH = 1024, 2
SPEC = {"family": "gpt2", "layers": 8, "hidden": 192, "heads": 3, "vocab": 2048,
        "max_positions": 128}  # fmt: skip
WAYS = {
    "Baseline": {"strategy": "single"},
    "SPS": {"strategy": "dp"},
    "SPS, dedicated server": {"strategy": "ps"},
    "DPS": {"strategy": "ddp"},
}

CLAIM = Claim(
    document=PRETRAINING,
    says="Utilisation of 4 GPUs: one alone 0.94, a single parameter server (nn.DataParallel) "
    "0.55, distributed parameter servers (DistributedDataParallel) 3.71.",
    hardware="not stated next to the table; earlier slides show nvidia-smi with four GTX 1080 "
    "Ti, and later ones ask for V100. GPT-2; batch and length are not stated: we assume "
    "2 samples of 1,024 tokens per device",
    figures={
        "of": 4,
        "total": {"Baseline": 0.94, "SPS": 0.55, "DPS": 3.71},
        "devices": {
            "Baseline": [0.85, 0, 0, 0],
            "SPS": [0.17, 0.13, 0.11, 0.14],
            "DPS": [0.94, 0.94, 0.89, 0.94],
        },
    },
)


def predict(quick: bool) -> dict[str, Any]:
    """Predict the three ways on 4 devices, from the parts of the planner's steps."""
    from predictions import model, step

    found: dict[str, Any] = {}
    for machine in MACHINES:
        rows = found[machine] = {}
        for name, strategy, devices in (("Baseline", "single", 1), ("SPS", "dp", 4),
                                        ("DPS", "ddp", 4)):  # fmt: skip
            plan = {"strategy": strategy, "dp_replicate": devices, "micro_batch": EACH}
            one = step(model("gpt2"), machine, plan, SEQ_LEN, EACH * devices)
            # Only the first device runs the optimizer if it is the leader.
            idle = one["parts_s"]["optimizer_s"] / one["step_s"] if strategy == "dp" else 0.0
            shares = [one["busy_share"]] + [one["busy_share"] - idle] * (devices - 1)
            rows[name] = {**one, "devices": shares, "total": sum(shares)}
    return found


def measure(quick: bool) -> dict[str, Any]:
    """Measure the share of each rank's step in which it is busy, for two processes."""
    import contests

    rounds, layers = (2, 1) if quick else (20, SPEC["layers"])
    contest = contests.Contest({**SPEC, "layers": layers}, 16, 128, WAYS)
    took = contests.run(contest, 2, rounds)
    rows = {}
    for name, one in took.items():
        shares = [
            statistics.median(
                min(busy / seconds, 1.0) for busy, seconds in zip(rank, one["seconds"], strict=True)
            )
            for rank in one["busy_s"]
        ]
        rows[name] = {"devices": shares, "total": sum(shares), **one}
    return {"of": 2, "rows": rows, "shape": {"model": SPEC, "global_batch": 16, "seq_len": 128}}


EXPERIMENT = Experiment(
    "utilisation", (CLAIM,), predict, measure,
    instead="\"Busy\" is the processor time of a rank's main thread. nvidia-smi counts a GPU as "
            "busy while any kernel runs, even one that waits for other GPUs.",
)  # fmt: skip

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
