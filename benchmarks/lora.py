"""Memory and time of a step: all weights, adapters (LoRA), adapters over 4 bits (QLoRA).

    python benchmarks/lora.py                    # records results/lora.json
    python benchmarks/lora.py --quick            # a tiny model, one round; records nothing

The weights are a preset's random ones, written once as a Hugging Face directory: a step's cost does
not depend on their values. Every case of every round is a separate process, in turns (full, lora,
qlora, qlora, lora, full). Memory is that of tensors: what exists between steps, by kind, and at the
peak of a step (on the CPU by the allocator's events in one more step; on CUDA the allocator's
peak).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora_rank": 16},
    "qlora": {"lora_rank": 16, "base": "nf4"},
}
WARM = 3


def make_base(model: str, folder: Path) -> None:
    """Write a preset's random weights as a Hugging Face directory, with random tokens in it."""
    import numpy as np

    from outpace.catalog.models import preset
    from outpace.interop.huggingface import write_model
    from outpace.nn.transformer import Transformer

    spec = preset(model)
    write_model(folder, spec, Transformer(spec).state_dict(), None)
    tokens = np.random.default_rng(0).integers(0, min(spec.vocab, 2**16), 200_000, dtype=np.uint16)
    for name in ("train.bin", "val.bin"):
        tokens.tofile(folder.parent / name)


def measure(case: str, base: Path, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Measure the seconds of each step, and bytes, in this process."""
    import torch

    from outpace.jobs.train.context import RunContext
    from outpace.jobs.train.job import prepare_run
    from outpace.records.settings import TrainSettings
    from outpace.trace.allocations import Allocations

    with tempfile.TemporaryDirectory() as out:
        asked = TrainSettings(
            **{**settings, **CASES[case]}, model=str(base), data=(str(base.parent / "train.bin"),),
            eval_data=(str(base.parent / "val.bin"),), cache_dir=base.parent / "cache",
            out=Path(out) / "run",
            steps=WARM + steps + 1, eval_batches=1, sample_tokens=0,
        )  # fmt: skip
        with prepare_run(asked, RunContext()) as ready:
            loop, seconds = ready.loop.iterate(), []
            for number in range(WARM + steps):
                began = time.perf_counter()
                next(loop)
                if number >= WARM:
                    seconds.append(time.perf_counter() - began)
            held = _held(ready.loop)
            if ready.job.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                next(loop)
                peak = torch.cuda.max_memory_allocated()
            else:
                with Allocations() as allocated:
                    next(loop)
                peak = sum(held.values()) + allocated.peak_bytes
    return {"step_s": seconds, "held_bytes": held, "peak_bytes": peak}


def _held(loop: Any) -> dict[str, int]:
    """Return the bytes that exist between steps, by kind."""
    parameters = list(loop.layout.model.parameters())
    states = [t for state in loop.optimizer.state.values() for t in state.values()]
    return {
        "frozen_weights": sum(p.nbytes for p in parameters if not p.requires_grad),
        "trained_weights": sum(p.nbytes for p in parameters if p.requires_grad),
        "optimizer_state": sum(t.nbytes for t in states),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny and once; nothing is recorded")
    parser.add_argument("--model", help="preset (default: qwen2-0.5b on CUDA, else outpace-small)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        settings = json.loads(arguments.settings)
        print(json.dumps(measure(arguments.case, arguments.base, settings, arguments.steps)))
        return
    import torch

    cuda = torch.cuda.is_available()
    model = arguments.model or ("qwen2-0.5b" if cuda else "outpace-small")
    settings: dict[str, Any] = {"seq_len": 256, "global_batch": 4}
    if arguments.quick:
        model, arguments.rounds, arguments.steps = "outpace-tiny", 1, 2
        settings = {"seq_len": 32, "global_batch": 2}
    measured: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        make_base(model, base)
        for number in range(arguments.rounds):
            for case in list(CASES)[:: -1 if number % 2 else 1]:
                words = ["--case", case, "--base", str(base), "--settings", json.dumps(settings),
                         "--steps", str(arguments.steps)]  # fmt: skip
                done = subprocess.run(
                    [sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE
                )
                measured[case].append(json.loads(done.stdout.splitlines()[-1]))
    result = {
        case: {
            "settings": CASES[case],
            "median_step_s": statistics.median(s for one in rounds for s in one["step_s"]),
            "held_bytes": rounds[0]["held_bytes"],
            "peak_bytes": max(one["peak_bytes"] for one in rounds),
            "rounds": rounds,
        }
        for case, rounds in measured.items()
    }
    for case, found in result.items():
        print(case, json.dumps({k: v for k, v in found.items() if k != "rounds"}), flush=True)
    if not arguments.quick:
        from recording import save

        print(save("lora", {"model": model, "shape": settings, "cases": result}))


if __name__ == "__main__":
    main()
