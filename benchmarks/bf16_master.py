"""Test of whether a bf16 residual stream over fp32 master weights trains as well as autocast.

    python benchmarks/bf16_master.py
    python benchmarks/bf16_master.py --steps 20 --seeds 1       # a quick check, not recorded

outpace-tiny trains on Python's own source in fp32, in bf16 by autocast over fp32 weights ("bf16"),
and with weights and residual stream in bf16, rounded from fp32 master weights ("bf16-master"). For
each seed, all start from the same weights and use the same batches.

The rule, fixed before the first run: bf16-master is within the noise of autocast if the mean over
seeds of its difference from autocast with the same seed is at most the spread (largest minus
smallest) of autocast's own figures over the seeds. This must be true of the held-out loss after the
last step and of the training loss, averaged over the last 50 steps.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recording import save

import outpace

REFERENCE, CANDIDATE = "bf16", "bf16-master"
PRECISIONS = ("fp32", REFERENCE, CANDIDATE)
SHAPE = {"model": "outpace-tiny", "seq_len": 64, "global_batch": 8, "micro_batch": 8}
STEPS, SEEDS, LAST = 300, 3, 50

Run = dict[str, Any]  # losses of all steps, mean of the last ones, held-out loss
FIGURES = ("last_loss", "held_out_loss")


def train(precision: str, seed: int, steps: int, device: str, folder: Path) -> Run:
    """Return every step's training loss, and the held-out loss at the end."""
    measured = outpace.train(
        **SHAPE, precision=precision, data="stdlib", steps=steps, seed=seed, device=device,
        out=folder / "run", sample_tokens=0, eval_batches=32, progress=False,
    )  # fmt: skip
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [round(json.loads(line)["loss"], 5) for line in lines]
    assert measured.final_eval is not None
    return {
        "losses": losses,
        "last_loss": statistics.fmean(losses[-LAST:]),
        "held_out_loss": measured.final_eval.loss,
    }


def verdict(runs: Mapping[str, list[Run]]) -> dict[str, Any]:
    """Apply the rule above: return differences, spreads, and whether all are within them."""
    found: dict[str, Any] = {}
    for figure in FIGURES:
        known = [run[figure] for run in runs[REFERENCE]]
        apart = [run[figure] - one for run, one in zip(runs[CANDIDATE], known, strict=True)]
        spread = max(known) - min(known)
        found[figure] = {
            "differences": apart,
            "mean_difference": statistics.fmean(apart),
            "spread_over_seeds": spread,
            "within": abs(statistics.fmean(apart)) <= spread,
        }
    return {**found, "within_noise": all(found[figure]["within"] for figure in FIGURES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args()
    runs: dict[str, list[Run]] = {precision: [] for precision in PRECISIONS}
    for seed in range(asked.seeds):
        for precision in PRECISIONS:
            with tempfile.TemporaryDirectory() as folder:
                run = train(precision, seed, asked.steps, asked.device, Path(folder))
            runs[precision].append(run)
            print(seed, precision, *(run[figure] for figure in FIGURES), flush=True)
    judged = verdict(runs)
    print(json.dumps(judged))
    if (asked.steps, asked.seeds) == (STEPS, SEEDS):
        result = {
            "shape": SHAPE, "steps": asked.steps, "seeds": asked.seeds, "device": asked.device,
            "verdict": judged, "runs": runs,
        }  # fmt: skip
        suffix = "" if asked.device == "cpu" else "_gpu"
        print(save(f"bf16_master{suffix}", result))


if __name__ == "__main__":
    main()
