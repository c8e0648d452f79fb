"""Every module of tests/parallel/zoo under every strategy on two processes, by outpace.verify.

    python benchmarks/zoo.py                        # all: about half an hour
    python benchmarks/zoo.py --only t5,unet         # these rows anew, the others as recorded

A cell is "equal"; "cut", where one process that cuts the batch alike computes the same; "draws",
where the module draws random numbers; "refused: …", with outpace's sentence; or what went wrong.
"""

import argparse
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from recording import RESULTS, save

from outpace.experiment.module_verify import CUT, verify_own
from outpace.interop.own import OwnModel
from outpace.records.certificate import Verdict
from outpace.records.errors import BadInputError

ZOO = Path(__file__).parent.parent / "tests" / "parallel" / "zoo"
SAMPLES, LIMIT_S = 8, 90.0
Entry = Callable[[int], tuple[Any, Any, Any]]


def entries() -> Iterator[tuple[str, str, Entry]]:
    """File, name and function of each module."""
    for path in sorted(ZOO.glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"zoo_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        file = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = file
        spec.loader.exec_module(file)
        if hasattr(file, "MODULES"):
            for entry in (*file.MODULES, *getattr(file, "REFUSED", ())):
                yield path.stem, entry.__name__, entry


def outcome(verdict: Verdict) -> str:
    """A cell of the table."""
    if verdict.passed:
        return "equal"
    if verdict.refused:
        return f"refused: {verdict.reason}"
    return "cut" if verdict.cause == CUT else f"wrong: {verdict.reason}"


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
        return {"all": "draws" if "draws random numbers" in str(error) else f"wrong: {error}"}
    return {verdict.strategy: outcome(verdict) for verdict in certificate.verdicts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="A,B", help="these modules")
    only = set(filter(None, parser.parse_args().only.split(",")))
    path = RESULTS / "zoo.json"
    modules = json.loads(path.read_text())["modules"] if only and path.is_file() else {}
    for file, name, entry in entries():
        if not only or name in only:
            modules[name] = {"file": file, "cells": judge(entry)}
            print(name, modules[name]["cells"], flush=True)
            save("zoo", {"samples": SAMPLES, "modules": modules})


if __name__ == "__main__":
    main()
