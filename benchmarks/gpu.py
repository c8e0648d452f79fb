"""What one GPU does: outpace beside what it could do, what was predicted, and peers.

    python benchmarks/gpu.py            # records results/gpu.json; at most 8 minutes on an H100
    python benchmarks/gpu.py --quick    # small shapes on any device, records nothing

The machine is probed first (products and memory), then each model is trained for a few steps with
`outpace train --memory`: tokens/s, MFU, the share of the best matrix product (MAMF), the most that
the allocator gave out beside the trace's prediction, a step's time beside the planner's by the
probe. Trainer and a plain loop train some of them on the same shapes. What the time does not
suffice for is said to be left out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import race  # noqa: E402
import watching  # noqa: E402
from recording import save  # noqa: E402

from outpace.records.machine import Machine  # noqa: E402
from outpace.report.predicted import predict  # noqa: E402
from outpace.report.run_source import read_run  # noqa: E402

BUDGET_S = 460.0
STEPS = 13  # three of them to warm up
PEERS = {"plain loop": ("plain", ()), "plain loop, compiled": ("plain", ("--compile",)),
         "Trainer": ("trainer", ()), "Trainer, compiled": ("trainer", ("--compile",))}  # fmt: skip
# On an H200: of MAMF in bf16 from 1B up; tokens/s beside Trainer, compiled; memory, time.
SHARE, FASTER, MEMORY, TIME = 0.60, 1.10, 0.03, 0.08


@dataclass(frozen=True)
class Shape:
    """A model with a batch, how it is trained, and who else trains it."""

    model: str
    seq_len: int
    batch: int
    variants: Sequence[str]
    more: Sequence[str] = ()
    peers: Sequence[str] = ()
    config: dict[str, Any] = field(default_factory=dict)  # of transformers, where peers need it


VARIANTS = {
    "eager": (),
    "compiled": ("--compile",),
    "fp8": ("--precision", "fp8", "--compile"),
}
_LLAMA_1B = {
    "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip
_GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# The most telling first: what time does not suffice for is at the end.
SHAPES = (
    Shape("llama-3.2-1b", 2048, 4, ("eager", "compiled", "fp8"),
          peers=("Trainer, compiled", "plain loop, compiled"), config=_LLAMA_1B),
    Shape("gpt2", 1024, 16, ("eager", "compiled"), peers=tuple(PEERS), config=_GPT2),
    Shape("gpt2-xl", 1024, 8, ("eager", "compiled")),
    Shape("llama-3.2-3b", 2048, 2, ("compiled",), ("--optimizer", "adamw-8bit")),
    Shape("llama-3.1-8b", 2048, 2, ("compiled",),
          ("--optimizer", "adamw-8bit", "--precision", "bf16-pure", "--checkpointing", "full")),
    Shape("llama-3.1-8b", 2048, 2, ("eager",),
          ("--offload-optimizer", "cpu", "--precision", "bf16-pure", "--optimizer", "adamw-bf16",
           "--checkpointing", "full")),
)  # fmt: skip
SMALL = (Shape("outpace-tiny", 64, 2, ("eager",), peers=("plain loop",),
               config={**_GPT2, "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 64,
                       "vocab_size": 512}),)  # fmt: skip


def probed(folder: Path) -> Machine:
    """Products and memory of the machine."""
    out = folder / "machine.json"
    subprocess.run([sys.executable, "-m", "outpace", "probe", "matmul", "memory", "--quick",
                    "--out", str(out)], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    return Machine.load(out)


def write_data(shape: Shape, folder: Path) -> Path:
    """Random tokens: as nanoGPT has them, and as peers read them."""
    import numpy as np

    chance = np.random.default_rng(0)
    count = shape.batch * (STEPS + 2) * (shape.seq_len + 1)
    tokens = chance.integers(0, min(shape.config.get("vocab_size", 50257), 2**16), count)
    folder.mkdir(parents=True, exist_ok=True)
    tokens.astype(np.uint16).tofile(folder / "tokens.bin")
    rows = tokens[: shape.batch * STEPS * (shape.seq_len + 1)].reshape(-1, shape.seq_len + 1)
    (folder / "batches").mkdir(exist_ok=True)
    np.save(folder / "batches" / "tokens.npy", rows[:, :-1])
    np.save(folder / "batches" / "targets.npy", rows[:, 1:])
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(shape.config))
    (folder / "case.json").write_text(json.dumps({
        "architecture": "AutoModelForCausalLM", "batch": shape.batch, "seq_len": shape.seq_len,
        "lr": 3e-4, "betas": (0.9, 0.95), "clip": 1.0, "precision": "bf16",
    }))  # fmt: skip
    return folder / "tokens.bin"


def trained(shape: Shape, variant: str, folder: Path, machine: Machine) -> dict[str, Any]:
    """One run of outpace, beside its predictions."""
    out = folder / f"run-{variant}"
    words = [sys.executable, "-m", "outpace", "train", "--model", shape.model, "--init", "random",
             "--data", str(write_data(shape, folder)), "--seq-len", str(shape.seq_len),
             "--dropout", "0", "--global-batch", str(shape.batch), "--steps", str(STEPS),
             "--precision", "bf16", *VARIANTS[variant], *shape.more, "--measure-only", "--memory",
             "--sample-tokens", "0", "--eval-batches", "1", "--out", str(out)]  # fmt: skip
    if words.count("--precision") > 1:  # what comes last was meant
        del words[words.index("--precision") : words.index("--precision") + 2]
    began_s = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"variant": variant, "more": list(shape.more),
                           "took_s": time.monotonic() - began_s}  # fmt: skip
    if done.returncode != 0:
        return {**row, "failure": done.stderr.strip()[-500:]}
    run = read_run(out)
    assert run.measurement is not None
    found, best = run.measurement, _best(machine, run.record.plan.precision)
    rate, predicted = found.model_flops_per_s, predict(run.record, 1, machine)
    row |= {
        "step_time_s": found.step_time_s, "tokens_per_s": found.tokens_per_s, "mfu": found.mfu,
        "of_best_product": None if best is None or rate is None else rate / best,
        "predicted_step_time_s": None if isinstance(predicted, str)
        else predicted.planned.estimate.step_time_s,
        "steps_s": run.steps["step_time_s"].tolist(),
    }  # fmt: skip
    if run.memory is not None and run.memory.traced is not None:
        row["traced_bytes"] = run.memory.traced.peak_memory_bytes
        measured = run.memory.measured
        row["allocated_bytes"] = None if measured is None else measured.allocated_bytes
    return row


def _best(machine: Machine, precision: str) -> float | None:
    """The best product in bf16, beside which fp8 is seen, too; of fp32 its own."""
    dtype = "fp32" if precision == "fp32" else "bf16"
    figure = None if machine.probed is None else machine.probed.best_rate(dtype)
    return None if figure is None else figure.value


def raced(shape: Shape, peer: str, folder: Path, cuda: bool) -> dict[str, Any]:
    """A peer on the same shape."""
    program, flags = PEERS[peer]
    log = folder / "peer.jsonl"
    words = [sys.executable, str(HERE / "peers" / "programs" / f"{program}.py"), str(folder),
             str(STEPS), str(log), *flags, *(["--cuda"] if cuda else [])]  # fmt: skip
    seen = watching.watch(words, log, {"HF_HUB_OFFLINE": "1"}, 300.0)
    if seen.exit_code != 0 or len(seen.steps_s) <= race.WARMUP:
        return {"failure": seen.said.strip()[-500:]}
    times = race.step_times_s(seen.steps_s)
    # Of steps that are shorter than the time between two looks, most seem to take none.
    step_s = median(times) or sum(times) / len(times)
    return {"step_time_s": step_s, "tokens_per_s": shape.batch * shape.seq_len / step_s,
            "steps_s": times}  # fmt: skip


def all_rows(shapes: Sequence[Shape], folder: Path, cuda: bool) -> dict[str, Any]:
    """Everything that the time suffices for."""
    began_s = time.monotonic()
    machine, rows, left_out = probed(folder), [], []
    for number, shape in enumerate(shapes):
        where = folder / str(number)
        row: dict[str, Any] = {"model": shape.model, "seq_len": shape.seq_len,
                               "batch": shape.batch, "runs": [], "peers": {}}  # fmt: skip
        for variant in shape.variants:
            if time.monotonic() - began_s > BUDGET_S:
                left_out.append(f"{shape.model}, {variant}")
                continue
            row["runs"].append(trained(shape, variant, where, machine))
            print(shape.model, row["runs"][-1], file=sys.stderr, flush=True)
        for peer in shape.peers:
            if time.monotonic() - began_s > BUDGET_S:
                left_out.append(f"{shape.model}, {peer}")
                continue
            row["peers"][peer] = raced(shape, peer, where, cuda)
            print(shape.model, peer, row["peers"][peer], file=sys.stderr, flush=True)
        rows.append(row)
    best = _best(machine, "bf16")
    probe = None if machine.probed is None else machine.probed.model_dump(mode="json")
    return {"rows": rows, "left_out": left_out, "best_product_flops_per_s": best,
            "took_s": time.monotonic() - began_s, "probe": probe}  # fmt: skip


def main() -> None:
    """Measure, and record what a GPU did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    import torch

    cuda = torch.cuda.is_available()
    if not cuda and not quick:
        raise SystemExit("There is no CUDA device here. --quick shows that it works, without one.")
    with tempfile.TemporaryDirectory() as folder:
        found = all_rows(SMALL if quick else SHAPES, Path(folder), cuda)
    shown = {key: value for key, value in found.items() if key != "probe"}
    print(json.dumps(shown, indent=1))
    if not quick:
        print(save("gpu", found))


if __name__ == "__main__":
    main()
