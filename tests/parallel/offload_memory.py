"""Two steps in a process of their own for each case; prints what each held in memory, as JSON.

    python tests/parallel/offload_memory.py LIMIT[,OPTION=VALUE ...] ...

LIMIT is the anonymous memory that may be added to the model's, in units of the model's bytes; 0:
no limit. `anonymous_bytes` and `resident_bytes` are of the process after a step, `forward_bytes`
anonymous ones at the end of a forward, `taken_bytes` of the disk; or `failed`, the error.
"""

import json
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

from forked import world
from runs import Run, plan_of

from outpace.experiment.parity import Trial
from outpace.jobs.ranks.process_groups import Groups
from outpace.records.model import ModelSpec

SPEC = ModelSpec.parse(
    {"family": "llama", "layers": 8, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 1024,
     "vocab": 256, "max_positions": 64, "tied": True},
    "test",
)  # fmt: skip


def status(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith(field + ":")]
    return int(found.split()[1]) * 1024


def train(limit: float, options: dict[str, Any], groups: Groups) -> dict[str, int]:
    trial = Trial(SPEC, steps=2, seq_len=32)
    forward: list[int] = []
    run = Run(trial, plan_of("single", precision="fp32", **options), groups)
    model_bytes = sum(p.nbytes for _, p in run.layout.named_parameters())
    if limit:
        allowed = status("VmData") + int(limit * model_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))

    def look(*_: Any) -> None:
        forward.append(status("RssAnon"))

    run.layout.module.register_forward_hook(look)
    for number in (1, 2):
        run.step(number)
    return {
        "anonymous_bytes": status("RssAnon"),
        "resident_bytes": status("VmRSS"),
        "forward_bytes": max(forward),
        "model_bytes": model_bytes,
        "taken_bytes": run.scratch.taken_bytes,
    }


def main() -> None:
    found: list[dict[str, Any]] = []
    for case in sys.argv[1:]:
        limit, *options = case.split(",")
        given = dict(option.split("=") for option in options)
        try:
            found += world(1, partial(train, float(limit), given))
        except RuntimeError as error:
            found.append({"failed": str(error)})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
