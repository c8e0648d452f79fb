"""Optimizers: tensor by tensor, many tensors together, and in one kernel.

    python benchmarks/seeds/s09_optimizers.py            # records results/seeds_optimizers.json
    python benchmarks/seeds/s09_optimizers.py --quick    # small; records nothing

AdamW's three forms run a step in turn, over 2,000 small tensors and over those of a model
(benchmarks/optimizers.py has all optimizers).
"""

from typing import Any

from claims import FIT, Claim, Experiment, run

NAMES = ("adamw-for-loop", "adamw-foreach", "adamw-fused")
ROUNDS = 30
MACHINE = "titan-rtx"
# As many small tensors as benchmarks/optimizers.py has.
SMALL = {"family": "gpt2", "layers": 166, "hidden": 64, "heads": 1, "vocab": 512,
         "max_positions": 128}  # fmt: skip

CLAIM = Claim(
    document=FIT,
    says="torch.optim._multi_tensor should speed up optimizers significantly where there are lots "
    "of small tensors, and should eventually become the default. (It has: foreach.)",
    hardware="none in this passage; we assume the document's own, a TITAN RTX",
    figures={},
)


def predict(quick: bool) -> dict[str, Any]:
    """Predict the seconds of an optimizer's step on the device."""
    from predictions import model, step

    from outpace.planner.model.outline import outline
    from outpace.records.model import ModelSpec

    models = {"small": outline(ModelSpec.parse(SMALL, "seeds"), "small"), "gpt2": model("gpt2")}
    return {
        name: {
            optimizer: step(of, MACHINE, {"optimizer": optimizer}, 128, 1)["parts_s"]["optimizer_s"]
            for optimizer in NAMES
        }
        for name, of in models.items()
    }


def measure(quick: bool) -> dict[str, Any]:
    """Measure each form's steps, in turn."""
    from optimizers import SETS, measured

    names = ("small",) if quick else tuple(SETS)
    return {name: measured(SETS[name], 2 if quick else ROUNDS, "cpu", NAMES) for name in names}


EXPERIMENT = Experiment(
    "optimizers", (CLAIM,), predict, measure,
    instead="On a CPU, no kernels are launched: a for-loop is slower only because of Python.",
)  # fmt: skip

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
