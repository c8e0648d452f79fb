"""Saves a run under each plan, loads it under others, and prints how both ends compare.

python tests/parallel/crossings.py FOLDER chosen|others|offloaded
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from forked import world
from runs import SPEC, Run, Step, alone, apart, loss_of, plan_of
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from outpace.experiment.parity import Trial
from outpace.jobs.ranks.process_groups import Groups
from outpace.parallel.tensors import local
from outpace.records.plan import Plan
from outpace.records.precisions import MASTERS
from outpace.training.checkpoint import Checkpointer, Progress

SAVED_AT, STEPS = 2, 3
SIZES = (1, 2, 4)
# From each kind of layout to another; worlds grow and shrink.
CHOSEN = (
    "single→ddp@4", "ddp@2→zero3@4", "zero3@4→gpipe@2", "gpipe@4→single", "tp@2→zero2@2",
    "ps@2→1f1b@2", "cp@2→tp@2", "interleaved@2→hsdp@4", "dp@2→ring@2", "servers@4→single",
    "zbv@2→zero3@4", "hsdp@4→dp@2",
)  # fmt: skip
# With these every strategy has been on both sides.
OTHERS = (
    "tp@4→zero2@4", "cp@4→servers@4", "zero2@2→cp@4", "1f1b@4→interleaved@2", "ring@4→ps@4",
    "loopedbfs@2→tp@4", "zb@2→loopedbfs@2", "dualpipev@2→mp@4", "mp@2→zb@2", "single→zbv@2",
    "zero3@2→dualpipev@2",
)  # fmt: skip
# What is elsewhere: states and parameters on disk, both in host memory, states alone there.
PLACES = {
    "": {},
    "disk": {"offload_optimizer": "disk", "offload_parameters": "disk"},
    "host": {"offload_parameters": "cpu"},
    "cpu": {"offload_optimizer": "cpu"},
}
OFFLOADED = (
    "single+disk→ddp@2", "ddp@2→zero3@2+disk", "zero3@2+disk→single+host",
    "zero1@2+cpu→single+disk", "1f1b@2+disk→zero1@2+cpu",
    "single+host→ddp@2+cpu", "single+host→1f1b@2+disk",
    "zero3@2+disk→zero1@2+disk",
)  # fmt: skip

PAIRS = {"chosen": CHOSEN, "others": OTHERS, "offloaded": OFFLOADED}


def plan_with(name: str) -> Plan:
    """From "zero3@2+disk"."""
    layout, _, where = name.partition("+")
    return plan_of(layout, **PLACES[where])


def checkpointer(folder: Path, plan: Plan, groups: Groups) -> Checkpointer:
    def trouble(sentence: str) -> None:
        raise RuntimeError(sentence)

    return Checkpointer(folder, 2, groups.ranks.rank, groups.saving, lambda _: None, trouble,
                        copies=plan.offload_optimizer != "disk",
                        masters=plan.precision in MASTERS and not plan.fully_shards)  # fmt: skip


def progress(world_size: int) -> Progress:
    return Progress(
        step=SAVED_AT, tokens=512, samples=32, loss_sum=1.5, skipped_steps=0, scaler=None,
        first_loss=3.0, world_size=world_size,
    )  # fmt: skip


def contents(folder: Path) -> dict[str, Any]:
    """All that a checkpoint's files hold, read by this process alone."""
    nested: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    reader = FileSystemReader(folder / f"step-{SAVED_AT}")
    _load_state_dict(nested, reader, planner=planner, no_dist=True)
    return {f"{part}.{name}": held for part in nested for name, held in nested[part].items()}


def save(plan: Plan, trial: Trial, groups: Groups, folder: Path) -> None:
    """Train up to the checkpoint."""
    run = Run(trial, plan, groups)
    for step in range(1, SAVED_AT + 1):
        run.step(step)
    saver = checkpointer(folder, plan, groups)
    saver.save(*run.layout.checkpoint_state(run.optimizer), progress(plan.world_size))
    saver.wait_for_ranks()
    saver.close()


def strays(run: Run) -> list[str]:
    """What the plan has on disk and is somewhere else."""
    found = []
    optimizer = run.layout.checkpoint_state(run.optimizer)[1]
    state = {} if optimizer is None else optimizer.state
    for name, parameter in run.layout.named_parameters():
        held = [parameter] if run.plan.offload_parameters == "disk" else []
        if run.plan.offload_optimizer == "disk":
            held += [t for t in state.get(parameter, {}).values() if t.ndim]
        for tensor in map(local, held):
            if tensor.numel() and run.scratch.region_of(tensor) is None:
                found.append(name)
    return found


def go_on(
    plan: Plan, trial: Trial, groups: Groups, folder: Path, files: dict[str, Any], steps: list[Step]
) -> dict[str, Any]:
    """Load, compare with what the files hold, and train on; what this rank found."""
    run = Run(trial, plan, groups)
    loader = checkpointer(folder, plan, groups)
    found = loader.load(folder / f"step-{SAVED_AT}", *run.layout.checkpoint_state(run.optimizer))
    loader.close()
    held = run.held()
    changed = sorted(name for name, tensor in held.items() if not torch.equal(tensor, files[name]))
    off = []
    for step in range(found.step + 1, STEPS + 1):
        raw = run.step(step)
        off.append(abs(loss_of(raw) / steps[step - 1].loss - 1))
        off.append(abs(float(raw.grad_norm) / steps[step - 1].norm - 1))
    return {
        "held": sorted(held),
        "changed": changed,
        "steps": found.step,
        "numbers": max(off),
        "strays": strays(run),
        "state": apart(run.held(), steps[-1].held),
    }


def main() -> None:
    folder, wanted = Path(sys.argv[1]), PAIRS[sys.argv[2]]
    trial = Trial(SPEC, steps=STEPS)
    pairs = [pair.split("→") for pair in wanted]
    sources = list(dict.fromkeys(before for before, _ in pairs))
    plans = {name: plan_with(name) for pair in pairs for name in pair}

    steps = alone(trial)

    def save_all(groups: Groups) -> None:
        for name in sources:
            if plans[name].world_size == groups.ranks.world_size:
                save(plans[name], trial, groups, folder / name)

    def load_all(groups: Groups) -> dict[str, Any]:
        return {
            f"{before}→{after}": go_on(
                plans[after], trial, groups, folder / before, files[before], steps
            )
            for before, after in pairs
            if plans[after].world_size == groups.ranks.world_size
        }

    for size in SIZES:
        world(size, save_all)
    files = {name: contents(folder / name) for name in sources}
    saved = {
        name: {"names": sorted(held), "apart": apart(held, steps[SAVED_AT - 1].held)}
        for name, held in files.items()
    }
    loaded = {}
    for size in SIZES:
        by_rank = world(size, load_all)
        loaded |= {pair: [found[pair] for found in by_rank] for pair in by_rank[0]}
    print(json.dumps({"saved": saved, "loaded": loaded}))


if __name__ == "__main__":
    main()
