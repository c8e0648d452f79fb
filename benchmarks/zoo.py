"""Every module of tests/parallel/zoo under every strategy on two processes, by outpace.verify.

    python benchmarks/zoo.py                        # all: about an hour and a half
    python benchmarks/zoo.py --older-than HEAD      # rows not recorded since this commit; resumes
    python benchmarks/zoo.py --only t5,unet         # repeats these rows; keeps the others
    python benchmarks/zoo.py --strategy zero1       # repeats these cells
    python benchmarks/zoo.py --kind refused         # the cells with this outcome

The results are written after each module, so the same command resumes where it was ended (with
`--older-than`, use a commit's number if HEAD moves meanwhile). Those of `libraries` need `pip
install -c constraints.txt -e ".[zoo]"`; if a library is missing, the rows that need it keep their
records.

A cell is "equal" (under five strategies, the check also passes); "cut", if one process that splits
the batch alike computes the same, and the check of the first batch says so; "state: …", with the
check's message, if the module has state that is in no buffer, so that a resumed run differs, or
each rank has its own; "draws", if the module draws random numbers; "refused: …", with outpace's
message (that of the check, if verify finds a difference); or "wrong: …", with what went wrong.
"""

import argparse
import importlib
import json
import math
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from recording import RESULTS, save

import outpace
from outpace.experiment.module_verdict import CUT_ALIKE
from outpace.experiment.module_verify import STRATEGIES, plan_for_module
from outpace.launch.forked_job import ForkedRank, run_forked
from outpace.parallel.parallel_module import refused_strategy
from outpace.parallel.parity.comparison import SINGLE
from outpace.probing.hardware.versions import commit
from outpace.records.certificate import ParityVerdict
from outpace.records.errors import BadInputError

ZOO = Path(__file__).parent.parent / "tests" / "parallel" / "zoo"
FILES = (
    "data_parallel", "pipelines", "whole", "traps", "kinds", "recipes", "libraries", "projects",
    "aliases", "identities", "backwards", "later", "shares", "memories", "crossed", "inner",
    "collected", "objectives", "delayed", "forms", "ordinary",
)  # fmt: skip
SAMPLES, LIMIT_S = 8, 90.0
# Strategies whose equal cells are also checked with dropout, which verify disables.
LOOKED_AT = ("ddp", "zero3", "1f1b", "interleaved", "tp")
# First words of messages about a cut from the check of the first batch.
OF_THE_CUT = (
    "the loss of the first batch changes", "the gradient of the first batch changes",
    "the loss returns a pair", "the forward writes to", "the forward updates",
    "a step counts",
)  # fmt: skip
# The strategies of a whole row, on two processes of any machine.
ALL = set(STRATEGIES) - {"single", "horovod"} - set(filter(refused_strategy, STRATEGIES))
Entry = Callable[[int], tuple[Any, Any, Any]]


def entries() -> Iterator[tuple[str, str, Entry]]:
    """Return file, name and function of each module."""
    sys.path.insert(0, str(ZOO.parent))
    try:
        files = {name: importlib.import_module(f"zoo.{name}") for name in FILES}
    finally:
        sys.path.remove(str(ZOO.parent))
    for name, file in files.items():
        more = (*getattr(file, "RUNNING", ()), *getattr(file, "REFUSED", ()))
        needs = getattr(file, "LIBRARIES", {})
        for entry in dict.fromkeys((*file.MODULES, *more)):
            if all(find_spec(library) is not None for library in needs.get(entry, ())):
                yield name, entry.__name__, entry


def outcome(verdict: ParityVerdict) -> str:
    """Return a cell of the table."""
    if verdict.passed:
        return "equal"
    if verdict.refused:
        return f"refused: {verdict.reason}"
    if verdict.cause is not None and CUT_ALIKE in verdict.cause:
        return "cut"
    if verdict.differences and all("after resuming" in one.kind for one in verdict.differences):
        return "resumed"
    return f"wrong: {verdict.reason}"


def judge(entry: Entry, plans: str | None = None) -> dict[str, str]:
    """Return the cells of a module, by strategy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, loss, make = entry(0)

    def batch(step: int) -> Any:
        return make(torch.Generator().manual_seed(step), SAMPLES)

    try:
        certificate = outpace.verify(
            module, loss=loss, batch=batch, plans=plans, time_limit_s=LIMIT_S
        )
    except BadInputError as error:
        if "draws random numbers" in str(error):
            return {"all": "draws"}
        fails = str(error).startswith("one process cannot")
        return {"all": f"{'wrong' if fails else 'refused'}: {error}"}
    return {one.strategy: said_before(entry, one) for one in certificate.verdicts}


def said_before(entry: Entry, verdict: ParityVerdict) -> str:
    """Return a cell with the message from the check of the first batch; wrong if there is none.

    The check does not see a cut whose effect is below fp32 rounding, which needs no message.
    """
    cell = outcome(verdict)
    kind = cell.partition(":")[0]
    if kind == "equal" and verdict.strategy in LOOKED_AT:
        refusal, _ = first_look(entry, verdict.strategy)
        return cell if refusal is None else f"wrong: equal, and the check refuses it: {refusal}"
    sizes = [one.relative for one in verdict.differences if one.relative is not None]
    if kind in ("equal", "refused") or (
        kind == "cut" and max(sizes, default=math.inf) < SINGLE.relative
    ):
        return cell
    refusal, sentences = first_look(entry, verdict.strategy)
    if refusal is not None:
        return f"refused: {refusal}"
    by_cut = [one for one in sentences if one.startswith(OF_THE_CUT)]
    kept = ("from step to step", "separate generator")
    of_state = [one for one in sentences if any(words in one for words in kept)]
    if kind == "wrong" and any("already cover all ranks" in one for one in by_cut):
        return "cut"  # through its own collectives, which one process with the same cut lacks
    if kind == "cut":
        return cell if by_cut or of_state else "wrong: by the cut, and nothing says so"
    if of_state:
        return f"state: {of_state[0]}"
    return "wrong: resumed, and nothing says so" if kind == "resumed" else cell


def first_look(entry: Entry, strategy: str) -> tuple[str | None, list[str]]:
    """Return why training refuses before its first step (None if it does not), and its messages."""

    def act(rank: ForkedRank) -> None:
        module, loss, make = entry(0)
        plan = plan_for_module(strategy, 2, SAMPLES)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = outpace.parallelize(module, plan, loss=loss)
            model.forward_backward(model.share(make(torch.Generator().manual_seed(1), SAMPLES)))
        sentences = [str(one.message) for one in caught if one.category is UserWarning]
        (folder / f"{rank.ranks.rank}.json").write_text(json.dumps(sentences))

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ends = run_forked(2, act, LIMIT_S, folder / "ranks")
        refusal = next((end.said for end in ends if end.refused), None)
        heard = folder / "0.json"
        return refusal, json.loads(heard.read_text()) if heard.is_file() else []


def is_recorded(row: dict[str, Any], base: str) -> bool:
    """Return whether all cells are from the commit `base` or a later one."""
    cells = row.get("cells", {})
    whole = "all" in cells or cells.keys() >= ALL
    return whole and all(_follows(one, base) for one in set(row["commits"].values()))


@cache
def _follows(later: str, base: str) -> bool:
    """Return whether a commit equals another or follows it; an unknown commit does not."""
    command = ["git", "-C", str(ZOO), "merge-base", "--is-ancestor", base, later]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def cells_to_judge(row: dict[str, Any], kind: str, base: str | None) -> list[str]:
    """Return strategies whose cells are recorded as `kind`, and not since the commit `base`."""
    return [
        strategy
        for strategy, cell in row.get("cells", {}).items()
        if cell.partition(":")[0] == kind
        and not (base is not None and _follows(row["commits"][strategy], base))
    ]


def resolve_commit(name: str) -> str:
    """Return a commit's number. Ends the program if there is no such commit."""
    command = ["git", "-C", str(ZOO), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(f"--older-than {name}: there is no such commit. Give one that git log shows.")
    return found.stdout.strip()


def read_modules(path: Path) -> dict[str, Any]:
    """Return the recorded rows."""
    modules: dict[str, Any] = json.loads(path.read_text())["modules"] if path.is_file() else {}
    return modules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="A,B", help="these modules")
    parser.add_argument("--strategy", default=None, metavar="A,B", help="these strategies")
    parser.add_argument("--kind", metavar="KIND", help="cells recorded as that, such as refused")
    parser.add_argument("--older-than", metavar="COMMIT", help="rows not of it, or a later one")
    arguments = parser.parse_args()
    only = set(filter(None, arguments.only.split(",")))
    path, base = RESULTS / "zoo.json", None
    head, _ = commit()
    if arguments.older_than:
        base = resolve_commit(arguments.older_than)
    for file, name, entry in entries():
        before = read_modules(path).get(name, {})
        done = base is not None and is_recorded(before, base)
        chosen = arguments.strategy
        if arguments.kind and "all" not in before.get("cells", {}):
            chosen = ",".join(cells_to_judge(before, arguments.kind, base))
            done = not chosen
        if done or (only and name not in only):
            continue
        cells = judge(entry, chosen)
        print(name, cells, flush=True)
        commits = dict.fromkeys(cells, head)
        if chosen:
            cells = {**before.get("cells", {}), **cells}
            commits = {**before.get("commits", {}), **commits}
        row = {"file": file, "cells": cells, "commits": commits}
        modules = {**read_modules(path), name: row}  # others may have written it meanwhile
        save("zoo", {"samples": SAMPLES, "modules": modules})


if __name__ == "__main__":
    main()
