"""Saves a run with an optimizer under one plan, goes on under another, and prints how they compare.

python tests/parallel/optimizer_crossings.py FOLDER OPTIMIZER,PRECISION,BEFORE,AFTER [...]

A line of JSON for each case: `changed`, names of tensors that are not bit for bit what the files
hold after loading, `off`, the largest relative difference of the losses that follow from those of a
single process without a break, and `ends`, what tensors are at the end.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from crossings import SAVED_AT, checkpointer, contents, save
from forked import world
from runs import SPEC, Run, alone, loss_of, plan_of

from outpace.experiment.parity import Trial
from outpace.jobs.ranks.process_groups import Groups
from outpace.records.errors import BadInputError

STEPS = 4
TRIAL = Trial(SPEC, steps=STEPS, lr=1e-3)


def digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()


def crossed(folder: Path, optimizer: str, precision: str, before: str, after: str) -> dict:
    options = {"optimizer": optimizer, "precision": precision}
    known = alone(TRIAL, **options)
    first, second = plan_of(before, **options), plan_of(after, **options)
    world(first.world_size, lambda groups: save(first, TRIAL, groups, folder))
    files = contents(folder)

    def go_on(groups: Groups) -> dict[str, Any]:
        run = Run(TRIAL, second, groups)
        loader = checkpointer(folder, second, groups)
        try:
            loader.load(folder / f"step-{SAVED_AT}", *run.layout.checkpoint_state(run.optimizer))
        except BadInputError as error:
            return {"refused": str(error)}
        finally:
            loader.close()
        held = run.held()
        changed = sorted(
            # Who keeps no fp32 copy of a weight has it rounded from the files.
            name
            for name in held
            if not torch.equal(held[name], files[name].to(held[name].dtype))
        )
        losses = [loss_of(run.step(number)) for number in range(SAVED_AT + 1, STEPS + 1)]
        off = [abs(x / one.loss - 1) for x, one in zip(losses, known[SAVED_AT:], strict=True)]
        ends = {name: digest(tensor) for name, tensor in run.held().items()}
        return {"changed": changed, "off": max(off), "ends": ends}

    return {"case": [optimizer, precision, before, after], "ranks": world(second.world_size, go_on)}


def main() -> None:
    torch.set_num_threads(1)
    for number, case in enumerate(sys.argv[2:]):
        print(json.dumps(crossed(Path(sys.argv[1]) / str(number), *case.split(","))), flush=True)


if __name__ == "__main__":
    main()
