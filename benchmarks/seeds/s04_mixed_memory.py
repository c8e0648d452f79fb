"""Memory in fp32 and in 16 bits by batch size, with its contents.

    python benchmarks/seeds/s04_mixed_memory.py            # records results/seeds_mixed_memory.json
    python benchmarks/seeds/s04_mixed_memory.py --quick    # small; records nothing

The documented case is traced without a GPU: the model's real code under fake tensors, with the
rules of the torch of that time (benchmarks/mixed_precision_memory.py). A small BERT is measured on
this machine: the peak of live tensors in a step of each batch, in a separate process, next to the
result of `outpace memory` for the same step, kind by kind.
"""

from typing import Any

from claims import FIT, Claim, Experiment, run

BATCHES, QUICK_BATCHES = (1, 8, 16, 32, 64), (2,)
PRECISIONS = ("fp32", "bf16")
SEQ_LEN = 128
SPEC = {"family": "bert", "layers": 4, "hidden": 256, "heads": 4, "vocab": 2048,
        "max_positions": SEQ_LEN}  # fmt: skip

CLAIM = Claim(
    document=FIT,
    says="bert-base-cased, sequences of 128, 2 GPUs: --fp16 saves 84, 178, 620 and 1,976 MiB of "
         "a GPU's memory at batches of 8, 16, 32 and 64. Weights are stored in both precisions, "
         "so only activations get smaller, and below batch 8 memory even grows. Memory is not "
         "halved, but training is twice as fast.",
    hardware="two GPUs of an unnamed kind; memory does not depend on the kind",
    figures={"mib": {"8": [4247, 4163], "16": [4971, 4793], "32": [6827, 6207],
                     "64": [10037, 8061]}},
)  # fmt: skip


def predict(quick: bool) -> dict[str, Any]:
    """Return what the allocator reserves in the documented training, in MiB."""
    import torch
    from mixed_precision_memory import LAYERS, trace_documented

    batches = (8,) if quick else (2, 8, 16, 32, 64)
    found = {}
    for batch in batches:
        fp32, fp16 = (
            trace_documented(batch, low, True, 1 if quick else LAYERS)["reserved_mib"]
            for low in (None, torch.float16)
        )
        found[str(batch)] = {"fp32": fp32, "fp16": fp16, "saved": fp32 - fp16}
    return found


def measure(quick: bool) -> dict[str, Any]:
    """Return peaks of live tensors on this machine, and the account of each."""
    import contests

    rows: dict[str, Any] = {}
    for batch in QUICK_BATCHES if quick else BATCHES:
        row = rows[str(batch)] = {}
        for precision in PRECISIONS:
            entry = {"strategy": "single", "precision": precision, "micro_batch": batch}
            contest = contests.Contest(SPEC, batch, SEQ_LEN, {precision: entry})
            row[precision] = {
                "peak_bytes": contests.run(contest, 1, 0)[precision]["peak_bytes"],
                "account": account_of(batch, precision),
            }
    return {"rows": rows, "shape": {"model": SPEC, "seq_len": SEQ_LEN}}


def account_of(batch: int, precision: str) -> dict[str, int]:
    """Return the traced bytes by kind at the peak."""
    from outpace.records.model import ModelSpec
    from outpace.records.plan import Plan
    from outpace.trace.account import account

    plan = Plan.parse({"micro_batch": batch, "precision": precision}, "seeds")
    found = account(ModelSpec.parse(SPEC, "seeds"), plan, seq_len=SEQ_LEN)
    return dict(found.peak.by_kind)


EXPERIMENT = Experiment(
    "mixed_memory", (CLAIM,), predict, measure,
    instead="bf16 instead of fp16, and bytes of live tensors instead of nvidia-smi, which also "
            "counts a context. A small BERT that predicts masked tokens, because the documented "
            "one would take minutes per step here.",
)  # fmt: skip

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
