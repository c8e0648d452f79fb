"""One rank of the tests of DDP's options; rank 0 prints what they look at.

python tests/parallel/forked.py 2 tests/parallel/ddp_ranks.py
"""

import json
import os
import threading
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch.launcher_env import ranks_from
from outpace.parallel import LayoutRequest, StepHooks, apply
from outpace.records.plan import Plan
from outpace.training.collective_counter import CollectiveCounter

STEPS, START = 6, 2


class Matrices(nn.Module):
    """1.1 MB each, so that buckets of 1 MiB hold one; the bias is not compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(400, 350, bias=False), nn.Tanh(), nn.Linear(350, 400)
        ).double()

    def forward(self, batch):
        return self.model(batch).square().sum(), torch.tensor(len(batch))


def lay_out(ranks, **options):
    torch.manual_seed(0)
    plan = {"strategy": "ddp", "dp_replicate": ranks.world_size, "bucket_mib": 1, **options}
    return apply(LayoutRequest(Matrices(), Plan.parse(plan, "test"), ranks, torch.device("cpu")))


def inputs(rank: int, step: int, parts: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return list(torch.randn(4, 400, generator=drawn, dtype=torch.float64).chunk(parts))


def gradient(layout) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in layout.named_parameters()])


def collectives(ranks) -> dict[str, list[int]]:
    """All-reduces and bytes of a step in 1, 2 and 4 micro-batches, with and without no_sync."""
    found = {}
    for accumulating in ("no_sync", "every time"):
        layout = lay_out(ranks)
        if accumulating == "every time":
            layout.no_sync = nullcontext
        layout.gradients(inputs(ranks.rank, 0, 1), StepHooks())  # builds the buckets
        for parts in (1, 2, 4):
            with CollectiveCounter() as wire:
                layout.gradients(inputs(ranks.rank, 1, parts), StepHooks())
            found[f"{accumulating}, {parts}"] = [
                wire.tally.collectives["all_reduce"],
                wire.tally.bytes,
            ]
    return found


def low_rank(ranks) -> dict:
    """What PowerSGD applies and keeps back, against whole gradients, weights staying as they are.

    Every step's gradients are of the same weights; `kept` is the mean over ranks of the residuals.
    """
    whole = lay_out(ranks)
    layout = lay_out(ranks, compress_gradients="powersgd", powersgd_rank=4, powersgd_start=START)
    exact, applied, off = 0.0, 0.0, []
    for step in range(STEPS):
        for one in (whole, layout):
            one.model.zero_grad()
            one.gradients(inputs(ranks.rank, step, 2), StepHooks())
        exact, applied = exact + gradient(whole), applied + gradient(layout)
        off.append(float((gradient(layout) - gradient(whole)).abs().max()))
    state = layout.low_rank
    kept = torch.stack([error.sum() for error in state.error_dict.values()]).sum()
    dist.all_reduce(kept)
    same = [torch.zeros_like(applied) for _ in range(ranks.world_size)]
    dist.all_gather(same, applied)
    return {
        "off": off,
        "left_out": float((applied - exact).abs().max()),
        "balance": float((exact.sum() - applied.sum() - kept / ranks.world_size).abs()),
        "alike": all(torch.equal(one, same[0]) for one in same),
        "buckets": len(state.error_dict),
        "compression": state.compression_stats()[0],
    }


def marks(ranks) -> dict:
    """The parts of a step of two micro-batches, whose exchange ends when "backward" is marked."""
    plan = Plan.parse({"strategy": "ddp", "dp_replicate": ranks.world_size}, "test")
    # Of one machine alone DDP has a hook already, and takes no other.
    apart = ranks.model_copy(update={"local_world_size": 1})
    layout = apply(LayoutRequest(Matrices(), plan, apart, torch.device("cpu")))
    marked, parts = threading.Event(), []

    def mark(part: str) -> None:
        parts.append(part)
        if parts.count("backward") == 2:
            marked.set()

    def exchange(state, bucket):
        exchanged = torch.futures.Future()

        def end() -> None:
            parts.append("in time" if marked.wait(300.0) else "too late")
            exchanged.set_result(bucket.buffer())

        threading.Thread(target=end).start()
        return exchanged

    layout.module.register_comm_hook(None, exchange)
    layout.gradients(inputs(ranks.rank, 0, 2), StepHooks(mark=mark))
    return {"parts": parts}


def main() -> None:
    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    with process_groups(ranks, torch.device("cpu"), 60.0):
        said = {"exchanges": collectives(ranks), "low_rank": low_rank(ranks)}
        said["marks"] = marks(ranks)
    if ranks.rank == 0:
        print(json.dumps(said))


if __name__ == "__main__":
    main()
