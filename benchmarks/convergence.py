"""Comparison of optimizers and precisions with AdamW in fp32, trained on Python's own source.

    python benchmarks/convergence.py
    python benchmarks/convergence.py --steps 20 --seeds 1       # a quick check, not recorded

Each case trains outpace-tiny from the same weights and on the same batches as AdamW with the same
seed; held-out losses at the end are compared. Optimizers other than AdamW use the learning rate
that outpace gives them by default. The spread of AdamW's own losses over seeds shows how much a
difference means.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recording import save

import outpace
from outpace.records.errors import BadInputError, DivergedError

REFERENCE = "adamw"
CASES: Mapping[str, Mapping[str, Any]] = {
    REFERENCE: {},
    "adamw-bf16": {"optimizer": "adamw-bf16"},
    "adamw-8bit": {"optimizer": "adamw-8bit"},
    "adamw-4bit": {"optimizer": "adamw-4bit"},
    "adafactor": {"optimizer": "adafactor"},
    "muon": {"optimizer": "muon"},
    "sgd": {"optimizer": "sgd"},
    "bf16": {"precision": "bf16"},
    "bf16-pure": {"precision": "bf16-pure"},
    "bf16-pure, adamw-8bit": {"precision": "bf16-pure", "optimizer": "adamw-8bit"},
    "bf16-pure, adamw-4bit": {"precision": "bf16-pure", "optimizer": "adamw-4bit"},
    "O1": {"precision": "O1"},
    "O2": {"precision": "O2"},
    "O3": {"precision": "O3"},
    "fp8": {"precision": "fp8"},
}
# fp16 matmuls take over 100 times as long on a CPU, which has none in fp8.
GPU_ONLY = ("O1", "O2", "O3", "fp8")
SHAPE = {"model": "outpace-tiny", "seq_len": 128, "global_batch": 8}
STEPS, SEEDS = 400, 3


def final_loss(case: Mapping[str, Any], seed: int, steps: int, device: str, folder: Path) -> float:
    """Return the held-out loss of a run."""
    settings = {"precision": "fp32", **SHAPE, **case}
    measured = outpace.train(
        **settings, data="stdlib", steps=steps, seed=seed, device=device, out=folder / "run",
        sample_tokens=0, eval_batches=32, progress=False,
    )  # fmt: skip
    assert measured.final_eval is not None
    loss: float = measured.final_eval.loss
    return loss


def losses(name: str, steps: int, seeds: int, device: str) -> list[float] | str:
    """Return the loss for each seed, or the reason why there are none."""
    if name in GPU_ONLY and device == "cpu":
        return "on a GPU only"
    found = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found.append(final_loss(CASES[name], seed, steps, device, Path(folder)))
            except (BadInputError, DivergedError) as error:
                return str(error)
    return found


def compared(all_losses: Mapping[str, list[float] | str]) -> dict[str, Any]:
    """Return each case's differences from AdamW with the same seed."""
    reference = all_losses[REFERENCE]
    assert not isinstance(reference, str)
    cases: dict[str, Any] = {}
    for name, found in all_losses.items():
        if isinstance(found, str):
            cases[name] = {"left_out": found}
            continue
        apart = [one - known for one, known in zip(found, reference, strict=True)]
        cases[name] = {
            "losses": found,
            "differences": apart,
            "mean_difference": statistics.fmean(apart),
        }
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="cases, separated by semicolons")
    asked = parser.parse_args()
    names = [REFERENCE, *filter(None, asked.only.split(";"))] if asked.only else list(CASES)
    all_losses: dict[str, list[float] | str] = {}
    for name in names:
        found = losses(name, asked.steps, asked.seeds, asked.device)
        all_losses[name] = found
        print(name, found, flush=True)
    cases = compared(all_losses)
    recorded = (asked.steps, asked.seeds, asked.only) == (STEPS, SEEDS, "")
    if recorded:
        reference = all_losses[REFERENCE]
        assert not isinstance(reference, str)
        result = {
            "shape": SHAPE, "steps": asked.steps, "seeds": asked.seeds, "device": asked.device,
            "spread_of_seeds": max(reference) - min(reference), "cases": cases,
        }  # fmt: skip
        suffix = "" if asked.device == "cpu" else "_gpu"
        print(save(f"convergence{suffix}", result))


if __name__ == "__main__":
    main()
