"""Trains, saves, resumes and exports under every strategy on two ranks; prints what came of it.

python tests/parallel/each.py FOLDER [STRATEGY ...]

The model and the text are those of `outpace train` without options, on short samples.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, get_args

from forked import fork

from outpace.cli import train
from outpace.launch.use import generate
from outpace.records.plan import Strategy
from outpace.records.ranks import Ranks

FLAGS = ["--seq-len=32", "--global-batch=8", "--schedule=constant", "--precision=fp32",
         "--eval-batches=1", "--sample-tokens=4", "--json"]  # fmt: skip


def do(argv: list[str]) -> None:
    """`outpace train` on this rank, with its output on standard error."""
    with os.fdopen(os.dup(2), "w") as errors:
        sys.stdout = errors
        train.run(argv, os.environ)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(run: Path) -> str:
    return generate(
        run, "def ", max_new_tokens=4, temperature=0.0, top_k=None, seed=0, device="cpu"
    )  # fmt: skip


def both(out: Path, argv: list[str], ranks: int) -> None:
    """Two steps, and two more after a resume."""
    fork(ranks, lambda _: do([*argv, f"--out={out}", "--steps=2"]))
    fork(ranks, lambda _: do(["--resume", f"--out={out}", "--steps=4", "--json"]))


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
    folder, strategies = Path(sys.argv[1]), sys.argv[2:] or get_args(Strategy)
    common = [*FLAGS, f"--cache-dir={folder / 'cache'}"]
    said: dict[str, Any] = {}
    for strategy in strategies:
        out, ranks = folder / strategy, 1 if strategy == "single" else 2
        try:
            both(out, [*common, f"--strategy={strategy}"], ranks)
        except RuntimeError as error:
            if "BadInputError: " not in str(error):
                raise
            said[strategy] = {"refused": str(error).rpartition("BadInputError: ")[2]}
        else:
            said[strategy] = told(out)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
