"""Saves a run under each plan, loads it under others, and prints how both ends compare.

python tests/parallel/crossings.py FOLDER chosen|others
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from forked import world
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from outpace.experiment.parity import FLOOR, Trace, Trial, reference, shares
from outpace.experiment.verify import plan_for, tiny_spec
from outpace.launch.group import Groups
from outpace.parallel import Request, apply
from outpace.parallel.tensors import whole
from outpace.records.plan import Plan
from outpace.train.checkpoint import Checkpointer, Progress
from outpace.train.optimizer import make_optimizer
from outpace.train.precision import make_mixed
from outpace.train.step import Stepper

SAVED_AT, STEPS = 2, 3
SIZES = (1, 2, 4)
CPU = torch.device("cpu")
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


class Run:
    """A few steps of training on this rank, begun anew or from a checkpoint."""

    def __init__(self, trial: Trial, plan: Plan, groups: Groups) -> None:
        self.plan, self.ranks, self.trial = plan, groups.ranks, trial
        settings = trial.settings()
        self.layout = apply(Request(trial.objective(plan), plan, groups.ranks, CPU))
        self.optimizer = make_optimizer(
            self.layout.named_parameters(), settings, self.layout.make_optimizer
        )
        self.stepper = Stepper(
            layout=self.layout,
            optimizer=self.optimizer,
            mixed=make_mixed(plan.precision, CPU, True),
            plan=plan,
            clip=trial.clip,
            device=CPU,
            control=groups.control,
            expected_targets=trial.global_batch * trial.seq_len,
            targets_known=False,
        )

    def step(self, number: int) -> dict[str, float]:
        """Do step `number`, from 1; what was computed of it."""
        batch = self.trial.batches()[number - 1]
        self.stepper.begin()
        mine = shares(batch, self.plan, self.ranks.rank)
        raw = self.stepper.run(number, self.trial.lr, mine, lambda: False)
        return {"mean": float(raw.totals[0] / raw.totals[1]), "norm": float(raw.grad_norm)}

    def held(self) -> dict[str, torch.Tensor]:
        """Whole tensors of all that counts on this rank, by their names in a checkpoint."""
        model, optimizer = self.layout.saved(self.optimizer)
        found = {}
        for name, parameter in () if model is None else self.layout.named_parameters():
            found[f"model.{name}"] = whole(parameter.detach())
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            for kind, tensor in state.items():
                found[f"optimizer.state.{name}.{kind}"] = whole(tensor)
        return found


def checkpointer(folder: Path, groups: Groups) -> Checkpointer:
    def trouble(sentence: str) -> None:
        raise RuntimeError(sentence)

    return Checkpointer(folder, 2, groups.ranks.rank, groups.saving, lambda _: None, trouble)


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


def against(trace: Trace, step: int, held: dict[str, Any]) -> float:
    """The worst difference from one process's parameters and moments after a step."""
    known = trace.steps[step - 1]
    worst = 0.0
    for kind in ("parameter", "exp_avg", "exp_avg_sq"):
        largest = max(float(tensor.abs().max()) for tensor in known[kind].values())
        for name, tensor in known[kind].items():
            key = f"model.{name}" if kind == "parameter" else f"optimizer.state.{name}.{kind}"
            if key in held:
                scale = max(float(tensor.abs().max()), FLOOR * largest)
                worst = max(worst, float((held[key] - tensor).abs().max()) / scale)
    return worst


def save(plan: Plan, trial: Trial, groups: Groups, folder: Path) -> None:
    """Train up to the checkpoint."""
    run = Run(trial, plan, groups)
    for step in range(1, SAVED_AT + 1):
        run.step(step)
    saver = checkpointer(folder, groups)
    saver.save(*run.layout.saved(run.optimizer), progress(plan.world_size))
    saver.settle()
    saver.close()


def go_on(
    plan: Plan, trial: Trial, groups: Groups, folder: Path, files: dict[str, Any], trace: Trace
) -> dict[str, Any]:
    """Load, compare with what the files hold, and train on; what this rank found."""
    run = Run(trial, plan, groups)
    loader = checkpointer(folder, groups)
    found = loader.load(folder / f"step-{SAVED_AT}", *run.layout.saved(run.optimizer))
    loader.close()
    held = run.held()
    changed = sorted(name for name, tensor in held.items() if not torch.equal(tensor, files[name]))
    numbers = [run.step(step) for step in range(found.step + 1, STEPS + 1)]
    known = [trace.steps[step - 1] for step in range(found.step + 1, STEPS + 1)]
    off = [abs(got["mean"] / float(want["loss"]["mean"]) - 1)
           for got, want in zip(numbers, known, strict=True)]  # fmt: skip
    off += [abs(got["norm"] / float(want["norm"]["before clipping"]) - 1)
            for got, want in zip(numbers, known, strict=True)]  # fmt: skip
    return {
        "held": sorted(held),
        "changed": changed,
        "steps": found.step,
        "numbers": max(off),
        "state": against(trace, STEPS, run.held()),
    }


def plan_of(name: str, trial: Trial) -> Plan:
    """From "zero3@4"; "servers" is ps where the servers step the optimizer."""
    strategy, _, ranks = name.partition("@")
    by_servers = strategy == "servers"
    plan = plan_for("ps" if by_servers else strategy, int(ranks or 1), trial, "fp64")
    return plan.model_copy(update={"server_updates": by_servers})


def main() -> None:
    folder, wanted = Path(sys.argv[1]), {"chosen": CHOSEN, "others": OTHERS}[sys.argv[2]]
    # Five layers are enough for four unequal stages.
    trial = Trial(tiny_spec(4).model_copy(update={"layers": 5}), steps=STEPS)
    pairs = [pair.split("→") for pair in wanted]
    sources = list(dict.fromkeys(before for before, _ in pairs))
    plans = {name: plan_of(name, trial) for pair in pairs for name in pair}

    def alone(groups: Groups) -> Trace:
        return reference(trial, plans["single"])

    (trace,) = world(1, alone)

    def save_all(groups: Groups) -> None:
        for name in sources:
            if plans[name].world_size == groups.ranks.world_size:
                save(plans[name], trial, groups, folder / name)

    def load_all(groups: Groups) -> dict[str, Any]:
        return {
            f"{before}→{after}": go_on(
                plans[after], trial, groups, folder / before, files[before], trace
            )
            for before, after in pairs
            if plans[after].world_size == groups.ranks.world_size
        }

    for size in SIZES:
        world(size, save_all)
    files = {name: contents(folder / name) for name in sources}
    saved = {
        name: {"names": sorted(held), "apart": against(trace, SAVED_AT, held)}
        for name, held in files.items()
    }
    loaded = {}
    for size in SIZES:
        by_rank = world(size, load_all)
        loaded |= {pair: [found[pair] for found in by_rank] for pair in by_rank[0]}
    print(json.dumps({"saved": saved, "loaded": loaded}))


if __name__ == "__main__":
    main()
