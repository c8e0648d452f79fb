"""Every module of tests/parallel/zoo under every strategy on two processes, by outpace.verify.

    python benchmarks/zoo.py                        # all: about half an hour
    python benchmarks/zoo.py --only t5,unet         # these rows anew, the others as recorded
    python benchmarks/zoo.py --strategy zero1       # these cells anew

A cell is "equal"; "cut", where one process that cuts the batch alike computes the same; "resumed",
where only a run that goes on from a checkpoint differs, since the module has state that is in no
buffer; "draws", where the module draws random numbers; "refused: …", with outpace's sentence (that
of the look before the first step, where verify finds a difference); or what went wrong.
"""

import argparse
import importlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from recording import RESULTS, save

import outpace
from outpace.experiment.module_verify import CUT, plan_for_module, verify_own
from outpace.interop.own import OwnModel
from outpace.launch.forked_job import Rank, run_forked
from outpace.records.certificate import ParityVerdict
from outpace.records.errors import BadInputError

ZOO = Path(__file__).parent.parent / "tests" / "parallel" / "zoo"
FILES = ("data_parallel", "pipelines", "whole", "traps", "libraries")
SAMPLES, LIMIT_S = 8, 90.0
Entry = Callable[[int], tuple[Any, Any, Any]]


def entries() -> Iterator[tuple[str, str, Entry]]:
    """File, name and function of each module."""
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
    """A cell of the table."""
    if verdict.passed:
        return "equal"
    if verdict.refused:
        return f"refused: {verdict.reason}"
    if verdict.cause == CUT:
        return "cut"
    if verdict.differences and all("after resuming" in one.kind for one in verdict.differences):
        return "resumed"
    return f"wrong: {verdict.reason}"


def judge(entry: Entry, plans: str | None = None) -> dict[str, str]:
    """The cells of a module, by strategy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, loss, make = entry(0)

    def batch(step: int) -> Any:
        return make(torch.Generator().manual_seed(step), SAMPLES)

    try:
        certificate = verify_own(OwnModel(module, loss), batch, plans=plans, time_limit_s=LIMIT_S)
    except BadInputError as error:
        if "draws random numbers" in str(error):
            return {"all": "draws"}
        fails = str(error).startswith("one process cannot")
        return {"all": f"{'wrong' if fails else 'refused'}: {error}"}
    cells = {verdict.strategy: outcome(verdict) for verdict in certificate.verdicts}
    for strategy, cell in cells.items():
        if cell.startswith("wrong"):
            refusal = refused_at_first(entry, strategy)
            cells[strategy] = f"refused: {refusal}" if refusal else cell
    return cells


def refused_at_first(entry: Entry, strategy: str) -> str | None:
    """What training says before its first step; None where it would go on."""

    def act(rank: Rank) -> None:
        module, loss, make = entry(0)
        model = outpace.parallelize(module, plan_for_module(strategy, 2, SAMPLES), loss=loss)
        batch = make(torch.Generator().manual_seed(1), SAMPLES)
        model.forward_backward(model.share(batch))

    with tempfile.TemporaryDirectory() as folder:
        ends = run_forked(2, act, LIMIT_S, Path(folder))
    return next((end.said for end in ends if end.refused), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="A,B", help="these modules")
    parser.add_argument("--strategy", default=None, metavar="A,B", help="these strategies")
    arguments = parser.parse_args()
    only = set(filter(None, arguments.only.split(",")))
    path = RESULTS / "zoo.json"
    again = only or arguments.strategy
    modules = json.loads(path.read_text())["modules"] if again and path.is_file() else {}
    for file, name, entry in entries():
        if not only or name in only:
            known = modules.get(name, {}).get("cells", {}) if arguments.strategy else {}
            modules[name] = {"file": file, "cells": {**known, **judge(entry, arguments.strategy)}}
            print(name, modules[name]["cells"], flush=True)
            save("zoo", {"samples": SAMPLES, "modules": modules})


if __name__ == "__main__":
    main()
