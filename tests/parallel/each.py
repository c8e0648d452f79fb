"""Trains, saves, resumes and exports under every strategy on two ranks; prints what came of it.

python tests/parallel/each.py FOLDER [STRATEGY[@RANKS][→STRATEGY[@RANKS]] ...]

The model and the text are those of `outpace train` without options, on short samples.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

from forked import fork

from outpace.cli import train
from outpace.jobs.inference import generate
from outpace.records.plan import Strategy
from outpace.records.ranks import Ranks

FLAGS = ["--seq-len=32", "--global-batch=8", "--schedule=constant", "--precision=fp32",
         "--eval-batches=1", "--sample-tokens=4", "--json"]  # fmt: skip


def do(argv: list[str], _: Ranks) -> None:
    """`outpace train` on this rank, with its output on standard error."""
    with os.fdopen(os.dup(2), "w") as errors:
        sys.stdout = errors
        train.run(argv, os.environ)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(run: Path) -> str:
    return generate(
        run, "def ", max_new_tokens=4, temperature=0.0, top_k=None, seed=0, device="cpu",
        on_hint=print,
    )  # fmt: skip


def both(out: Path, argv: list[str], before: str, after: str) -> None:
    """Two steps under one strategy, and two more after a resume under another."""
    resumed = ["--resume", f"--out={out}", "--steps=4", "--json"]
    for place, flags in ((before, [*argv, f"--out={out}", "--steps=2"]), (after, resumed)):
        strategy, _, ranks = place.partition("@")
        size = int(ranks or (1 if strategy == "single" else 2))
        fork(size, partial(do, [*flags, f"--strategy={strategy}"]))


def told(out: Path) -> dict[str, Any]:
    """What a run wrote, and what its model writes."""

    def text(_: Ranks) -> str:
        return written(out)

    return {
        "losses": [line["loss"] for line in lines(out / "metrics.jsonl")],
        "evaluations": [line["loss"] for line in lines(out / "evals.jsonl")],
        "text": fork(1, text),
    }


def main() -> None:
    folder, asked = Path(sys.argv[1]), sys.argv[2:] or get_args(Strategy)
    common = [*FLAGS, f"--cache-dir={folder / 'cache'}"]
    said: dict[str, Any] = {}
    for name in asked:
        before, _, after = name.partition("→")
        out = folder / name
        try:
            both(out, common, before, after or before)
        except RuntimeError as error:
            if "BadInputError: " not in str(error):
                raise
            said[name] = {"refused": str(error).rpartition("BadInputError: ")[2]}
        else:
            said[name] = told(out)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
