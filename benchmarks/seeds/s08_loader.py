"""The data loader: batches per second by number of workers, and the use of pinning.

    python benchmarks/seeds/s08_loader.py            # records results/seeds_loader.json
    python benchmarks/seeds/s08_loader.py --quick    # small; records nothing

`outpace probe loader` times outpace's own loader, which reads prepared tokens, torch's over the
same tokens, and torch's over text that its workers tokenize, in turn.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from claims import FIT, Claim, Experiment, run

BUDGET_S, QUICK_BUDGET_S = 40, 3
SEQ_LEN, EACH = 1024, 4
MACHINES = {"2x-titan-rtx-nv2": "fp32", "hgx-h100": "bf16"}
_LONG = 8  # bytes of a token, and of its target
_IMAGES_BYTES = 256 * 3 * 224 * 224 * 4

CLAIM = Claim(
    document=FIT,
    says="By default everything happens in the main process, which may not read data fast enough. "
    "pin_memory=True leads to much faster transfers from CPU to GPU; num_workers=4 preloads; very "
    "many workers need not be better.",
    hardware="none in this passage; we assume the document's own, 2 × TITAN RTX, and eight H100",
    figures={"workers": 4},
)


def predict(quick: bool) -> dict[str, Any]:
    """Predict the tokens that machines consume in GPT-2's training, and copies from pinned RAM."""
    from predictions import model, step

    from outpace.catalog.node_names import find_node
    from outpace.planner.calibration.cluster import of_catalog

    found: dict[str, Any] = {}
    for machine, precision in MACHINES.items():
        node = find_node(machine)
        plan = {"strategy": "ddp", "dp_replicate": node.devices, "micro_batch": EACH,
                "precision": precision}  # fmt: skip
        one = step(model("gpt2"), machine, plan, SEQ_LEN, EACH * node.devices, kernel="fused")
        rate = of_catalog(node, 1).device.host_bytes_per_s
        tokens_bytes = 2 * _LONG * EACH * SEQ_LEN
        found[machine] = {
            **one,
            "link_bytes_per_s": rate,
            "copies_s": {
                f"{EACH} × {SEQ_LEN:,} tokens and targets": tokens_bytes / rate,
                "256 images of 3 × 224 × 224 in fp32": _IMAGES_BYTES / rate,
            },
        }
    return found


def measure(quick: bool) -> dict[str, Any]:
    """Return the probe's figures on loading, each with its interval."""
    from outpace.records.machine import Machine

    budget_s = QUICK_BUDGET_S if quick else BUDGET_S
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "machine.json"
        command = [sys.executable, "-m", "outpace", "probe", "loader", "--quick", "--budget",
                   str(budget_s), "--seq-len", str(SEQ_LEN), "--micro-batch", str(EACH),
                   "--device", "cpu", "--out", str(out)]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        probed = Machine.load(out).probed
    assert probed is not None
    rows = [
        {**figure.key.of, "tokens_per_s": figure.value, "low": figure.low, "high": figure.high,
         "unstable": figure.unstable}
        for figure in probed.figures
        if (figure.key.kind, figure.key.what) == ("loader", "tokens")
    ]  # fmt: skip
    advice = [one.text for one in probed.advice if one.about == "loader"]
    notes = [note for note in probed.notes if note.startswith("loader: ")]
    return {"rows": rows, "advice": advice, "notes": notes, "seq_len": SEQ_LEN,
            "micro_batch": EACH}  # fmt: skip


EXPERIMENT = Experiment(
    "loader", (CLAIM,), predict, measure,
    instead="Pinned memory is for copies to a GPU, and this machine has none. So this measures "
            "how fast batches are made, by number of workers and by how much work is left for "
            "them. With a GPU, the probe also times pinning.",
)  # fmt: skip

if __name__ == "__main__":
    run(EXPERIMENT, __doc__)
