"""Memory for intermediate results: naive model parallelism against pipelines.

    python benchmarks/intermediate.py            # records results/intermediate.json
    python benchmarks/intermediate.py --quick    # a quick check, records nothing

One batch passes through 2 and 4 stages of equal layers, split into one micro-batch for each of two
stages per rank (mp: not split). On each rank, this counts exactly what forwards keep for backwards,
and the peak of all tensors of forward and backward in addition to weights. With full checkpointing,
forwards keep only the blocks' inputs, and the peak shows the difference.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from idle import microbatches

SPEC = {"family": "llama", "layers": 8, "hidden": 192, "heads": 4, "ffn": 512, "vocab": 512,
        "max_positions": 256}  # fmt: skip
BATCH, SEQ_LEN = 32, 128


def worker(out: Path) -> None:
    """Run one rank of a job: a batch under every schedule, with and without checkpointing."""
    import torch
    from strategy_run import gather_from_ranks

    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.launch.launcher_env import ranks_from
    from outpace.planner.pipeline.schedules import orders
    from outpace.records.pipelines import SCHEDULES

    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    assert ranks is not None
    found = []
    with process_groups(ranks, torch.device("cpu"), 300.0) as groups:
        for strategy, schedule in SCHEDULES.items():
            count = microbatches(strategy, ranks.world_size)
            todo = orders(strategy, ranks.world_size, count)
            for checkpointing in ("none",) if schedule.splits_backward else ("none", "full"):
                said = gather_from_ranks(groups, measure(strategy, count, checkpointing, groups))
                found.append({
                    "strategy": strategy, "checkpointing": checkpointing, "microbatches": count,
                    "stages_per_rank": schedule.stages_per_rank, "ranks": said,
                    "in_flight": [most_in_flight(order) for order in todo],
                })  # fmt: skip
    if ranks.rank == 0:
        (out / "found.json").write_text(json.dumps(found))


def most_in_flight(order) -> int:
    """Return the largest number of forwards whose activations a rank keeps at once."""
    kept = most = 0
    for action in order:
        kept += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, kept)
    return most


def measure(strategy, count: int, checkpointing, groups) -> dict[str, int]:
    """Measure on this rank, in bytes; twice, since the first batch also creates the schedule."""
    import torch
    from saved_bytes import SavedBytes

    from outpace.nn.loss import LanguageModelObjective
    from outpace.nn.model_options import apply_checkpointing
    from outpace.nn.transformer import Transformer
    from outpace.parallel import LayoutRequest, StepHooks, apply
    from outpace.records.model import ModelSpec
    from outpace.records.plan import Plan
    from outpace.trace.allocations import Allocations

    ranks = groups.ranks.world_size
    plan = Plan(strategy=strategy, pp=ranks, pp_microbatches=count, micro_batch=BATCH // count,
                checkpointing=checkpointing)  # fmt: skip
    spec = ModelSpec.parse(SPEC, "intermediate")
    objective = LanguageModelObjective(Transformer(spec), "plain")
    if checkpointing != "none":
        apply_checkpointing(objective.model, checkpointing)
    layout = apply(LayoutRequest(objective, plan, groups.ranks, torch.device("cpu")))
    tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens}
    saved = SavedBytes(layout.model.parameters())
    with saved:
        layout.gradients([batch], StepHooks())
    gradients = sum(p.grad.nbytes for p in layout.model.parameters() if p.grad is not None)
    for parameter in layout.model.parameters():
        parameter.grad = None
    with Allocations() as allocated:
        layout.gradients([batch], StepHooks())
    return {
        "saved_bytes": saved.peak_bytes,
        "peak_bytes": allocated.peak_bytes,
        "gradient_bytes": gradients,
    }


def run(processes: int) -> list[dict[str, Any]]:
    """Run a job on this machine; return kept values per token and layer, in model widths."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={processes}", __file__, "--worker", folder]  # fmt: skip
        subprocess.run(command, check=True)
        found: list[dict[str, Any]] = json.loads((Path(folder) / "found.json").read_text())
    for one in found:
        samples = [kept * BATCH // one["microbatches"] for kept in one["in_flight"]]
        layers = SPEC["layers"] // (processes * one["stages_per_rank"])
        unit = 4 * SEQ_LEN * SPEC["hidden"] * layers  # bytes of a sample on a stage, fp32
        one["widths"] = [
            rank["saved_bytes"] / (unit * size)
            for rank, size in zip(one["ranks"], samples, strict=True)
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 processes; nothing is recorded")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.worker)
        return
    from recording import save

    worlds = {}
    for processes in (2,) if asked.quick else (2, 4):
        found = worlds[str(processes)] = run(processes)
        for one in found:
            saved, peak = (
                [round(rank[key] / 2**20, 1) for rank in one["ranks"]]
                for key in ("saved_bytes", "peak_bytes")
            )
            print(processes, f"{one['strategy']:12} {one['checkpointing']:5}", "in flight",
                  one["in_flight"], "saved", saved, "peak", peak, "widths",
                  [round(x, 1) for x in one["widths"]], flush=True)  # fmt: skip
    if not asked.quick:
        shape = {"model": SPEC, "batch": BATCH, "seq_len": SEQ_LEN}
        print(save("intermediate", {"shape": shape, "worlds": worlds}))


if __name__ == "__main__":
    main()
