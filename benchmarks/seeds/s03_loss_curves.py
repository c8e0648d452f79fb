"""DDP and ring all-reduce: loss curves at batch 8 and 16, before and after mixed precision.

    python benchmarks/seeds/s03_loss_curves.py            # records results/seeds_loss_curves.json
    python benchmarks/seeds/s03_loss_curves.py --quick    # small; records nothing

Each curve is a run of `outpace train` on two processes: a small GPT-2 on the bytes of Python's own
source. Times are those of steps of all four ways in turn, in one job per batch size. The picture is
docs/results/seeds-loss.svg.
"""

import ast
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from claims import PRETRAINING, Claim, Experiment, run

BATCHES, STRATEGIES, PRECISIONS = (8, 16), ("ddp", "ring"), ("fp32", "bf16")
SEQ_LEN = 128
SPEC = {"family": "gpt2", "layers": 4, "hidden": 128, "heads": 2, "vocab": 256,
        "max_positions": SEQ_LEN}  # fmt: skip
STEPS, ROUNDS, TEXT_BYTES = 150, 16, 2_000_000

CLAIM = Claim(
    document=PRETRAINING,
    says="Loss curves of DistributedDataParallel and Horovod at batch 8 and 16; DDP is faster on "
    "one node. With Apex (fp16 and fp32) DDP is 2 times as fast and Horovod 4 times, and batches "
    "take half of the memory.",
    hardware="not stated; tensor cores are needed (V100 and later). We assume four V100, and "
    "four GTX 1080 Ti, which have none. The curves are pictures from which no figures "
    "can be read",
    figures={"batches": BATCHES, "speedup": {"ddp": 2, "ring": 4}, "memory": 0.5},
)


def predict(quick: bool) -> dict[str, Any]:
    """Predict GPT-2 on four devices, in fp32 and in fp16 by autocast; a ring sends as DDP does."""
    from predictions import model, step

    found: dict[str, Any] = {}
    for machine in ("4x-v100", "4x-gtx-1080-ti"):
        for batch in BATCHES:
            rows = {}
            for precision in ("fp32", "fp16"):
                plan = {"strategy": "ddp", "dp_replicate": 4, "micro_batch": batch // 4,
                        "precision": precision}  # fmt: skip
                rows[precision] = step(model("gpt2"), machine, plan, 1024, batch)
            speedup = rows["fp32"]["step_s"] / rows["fp16"]["step_s"]
            found[f"{machine}, batch {batch}"] = {**rows, "speedup": speedup}
    return found


def measure(quick: bool) -> dict[str, Any]:
    """Measure curves, and times of steps that take turns."""
    steps, batches = (3, BATCHES[:1]) if quick else (STEPS, BATCHES)
    with tempfile.TemporaryDirectory() as folder:
        model, data = Path(folder) / "model.json", Path(folder) / "bytes.bin"
        model.write_text(json.dumps(SPEC))
        write_bytes(data)
        curves = {
            f"{strategy} {precision}, batch {batch}":
                curve(model, data, strategy, precision, batch, steps)
            for batch in batches
            for precision in PRECISIONS
            for strategy in STRATEGIES
        }  # fmt: skip
    return {
        "curves": curves,
        "apart": apart(curves),
        "times": {str(batch): times(batch, 2 if quick else ROUNDS) for batch in batches},
        "shape": {"model": SPEC, "seq_len": SEQ_LEN, "steps": steps},
    }


def write_bytes(path: Path) -> None:
    """Write Python's own source, one byte per token, as 16-bit numbers."""
    import numpy as np

    files = sorted(Path(ast.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:TEXT_BYTES]
    np.frombuffer(text, dtype=np.uint8).astype(np.uint16).tofile(path)


def curve(
    model: Path, data: Path, strategy: str, precision: str, batch: int, steps: int
) -> list[float]:
    """Return the loss of each step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            sys.executable, "-m", "outpace", "train", "--model", str(model), "--data", str(data),
            "--strategy", strategy, "--precision", precision, "--global-batch", str(batch),
            "--seq-len", str(SEQ_LEN), "--steps", str(steps), "--nproc", "2", "--device", "cpu",
            "--eval-batches", "1", "--sample-tokens", "0", "--measure-only", "--out", str(out),
            "--json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def apart(curves: dict[str, list[float]]) -> dict[str, float]:
    """Return the largest relative differences: of a ring from DDP, and of bf16 from fp32."""
    found = {}
    for name, losses in curves.items():
        for here, there in (("ddp", "ring"), ("fp32", "bf16")):
            other = name.replace(here, there)
            if other != name:
                pairs = zip(losses, curves[other], strict=True)
                found[f"{other} from {name}"] = max(abs(b / a - 1) for a, b in pairs)
    return found


def times(batch: int, rounds: int) -> dict[str, Any]:
    """Return each way's median step, and its speed relative to DDP and to its own fp32."""
    import contests
    from overhead import interval

    entries = {
        f"{strategy} {precision}": {"strategy": strategy, "precision": precision}
        for strategy in STRATEGIES
        for precision in PRECISIONS
    }
    took = contests.run(contests.Contest(SPEC, batch, SEQ_LEN, entries), 2, rounds)
    found = {}
    for name, one in took.items():
        strategy, precision = name.split()
        found[name] = {"median_s": statistics.median(one["seconds"]), "seconds": one["seconds"],
                       "peak_bytes": one["peak_bytes"]}  # fmt: skip
        for what, base in (("of_ddp", f"ddp {precision}"), ("of_fp32", f"{strategy} fp32")):
            pairs = zip(one["seconds"], took[base]["seconds"], strict=True)
            found[name][what] = interval([mine / its for mine, its in pairs])
    return found


EXPERIMENT = Experiment(
    "loss_curves", (CLAIM,), predict, measure,
    instead="bf16 instead of fp16: matmuls in fp16 are over 100 times slower on a CPU. outpace's "
            "own ring instead of Horovod: the same algorithm, without another library.",
)  # fmt: skip

if __name__ == "__main__":
    recorded = run(EXPERIMENT, __doc__)
    if recorded is not None:
        from figures_seeds import draw_curves

        draw_curves(recorded)
