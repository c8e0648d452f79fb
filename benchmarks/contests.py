"""Comparison of plans in one job: their steps alternate, and their memory is measured.

This is for benchmarks that compare options. Steps run in the order A B C, C B A, so that drift of
the machine affects all plans equally.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from overhead import interval


@dataclass(frozen=True)
class Contest:
    """Plans to compare: a plan's fields by name, on the same model and global batch."""

    model: Mapping[str, Any]
    global_batch: int
    seq_len: int
    entries: Mapping[str, Mapping[str, Any]]


def torchrun(processes: int, words: list[str]) -> None:
    """Start this many ranks of a Python program on this host. Raises CalledProcessError."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={processes}", *words]  # fmt: skip
    subprocess.run(command, check=True)


def run(
    contest: Contest,
    processes: int,
    rounds: int,
    start: Callable[[int, list[str]], None] = torchrun,
) -> dict[str, Any]:
    """Run a job of `processes`; return every step's seconds and the peak in bytes of each entry.

    The result also has each rank's busy seconds, as in `Took`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "contest.json"
        path.write_text(json.dumps(asdict(contest)))
        start(processes, [__file__, str(path), str(rounds)])
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return found


def compared(found: dict[str, Any], base: str) -> None:
    """Add to each entry its paired time relative to `base`, with a 95 % interval."""
    for one in found.values():
        pairs = zip(one["seconds"], found[base]["seconds"], strict=True)
        one["times_base"], one["low"], one["high"] = interval([mine / its for mine, its in pairs])


def main(path: Path, rounds: int) -> None:
    """Run one rank of the job."""
    import torch
    from strategy_run import StrategyRun, gather_from_ranks, plans

    from outpace.catalog.accelerators import find_accelerator
    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.launch.launcher_env import ranks_from
    from outpace.probing.hardware.machine import identify
    from outpace.records.model import ModelSpec
    from outpace.records.plan import Plan
    from outpace.training.synthetic import SyntheticTraining

    torch.set_num_threads(1)
    ranks = ranks_from(os.environ)
    assert ranks is not None
    contest = Contest(**json.loads(path.read_text()))
    course = SyntheticTraining(
        ModelSpec.parse(contest.model, "contest"), contest.global_batch, contest.seq_len
    )
    machine = identify(find_accelerator)
    contenders = {}
    with process_groups(ranks, torch.device("cpu"), 300.0) as groups:
        for name, fields in contest.entries.items():
            rest = dict(fields)
            plan = next(plans(rest.pop("strategy"), course, ranks, machine))
            assert isinstance(plan, Plan), plan
            contenders[name] = StrategyRun(Plan(**{**plan.model_dump(), **rest}), course, groups)
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for number in range(rounds):
            for name in contenders if number % 2 == 0 else reversed(contenders):
                step = contenders[name].step()
                took[name].append((step.seconds, step.busy_s))
        said = gather_from_ranks(
            groups, (took, {k: c.cost.peak_bytes for k, c in contenders.items()})
        )
    if ranks.rank == 0:
        found = {
            name: {
                # A step ends when its slowest rank does.
                "seconds": [
                    max(seconds for seconds, _ in at)
                    for at in zip(*(steps[name] for steps, _ in said), strict=True)
                ],
                "busy_s": [[busy_s for _, busy_s in steps[name]] for steps, _ in said],  # by rank
                "peak_bytes": max(weights[name] for _, weights in said),
                "plan": contenders[name].plan.model_dump(mode="json"),
            }
            for name in contenders
        }
        path.with_name("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
