"""`outpace accuracy`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli.output import tell_hint
from outpace.cli.parser import Parser, number_type

if TYPE_CHECKING:
    import argparse

    from outpace.planner.calibration.measured_cases import Likeness

_ABOUT = (
    "List the published training steps most similar to a plan, with measured and predicted times."
)
_EPILOG = (
    "plan.json is the file that outpace plan --out or outpace tune wrote. Add --model and "
    "--machine to compare model size and chip count as well. Prediction errors by kind of "
    "hardware: docs/results/accuracy.md."
)
_MOST_CASES = 50


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Print the published training steps that are most similar to a plan; return 0.

    Raises OutpaceError.
    """
    arguments = _parser().read(argv)
    from outpace.planner.calibration.measured_cases import extrapolations, nearest_cases

    like = _read_likeness(arguments)
    cases, beyond = nearest_cases(like, arguments.count), extrapolations(like)
    if arguments.json:
        document = {"cases": [one.model_dump(mode="json") for one in cases],
                    "extrapolated": list(beyond)}  # fmt: skip
        print(json.dumps(document, indent=2), flush=True)
        return 0
    from rich.text import Text

    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.plan import cases_text

    for part in cases_text(cases):
        Console().print(part)
    for one in beyond:
        Console().print(Text(f"Extrapolated: {one}."))
    open_options = [f"--{name}" for name in ("model", "machine") if not vars(arguments)[name]]
    if open_options:
        add = " and ".join(open_options)
        tell_hint(f"add {add} to compare these as well: a plan file contains neither")
    return 0


def _read_likeness(arguments: "argparse.Namespace") -> "Likeness":
    from outpace.catalog.accelerators import ACCELERATORS
    from outpace.catalog.node_names import find_node
    from outpace.planner.calibration.measured_cases import Likeness
    from outpace.planner.model.outline import parameters
    from outpace.records.plan import PlanFile

    file = PlanFile.load(arguments.like, option="--like ")
    size = experts = chip = None
    if arguments.model is not None:
        from outpace.jobs.planning.model_outline import find_outline

        _, outline, _ = find_outline(arguments.model)
        size, experts = parameters(outline) / 1e9, bool(outline.experts)
    if arguments.machine is not None:
        node = find_node(arguments.machine)
        chip = None if node.accelerator is None else ACCELERATORS[node.accelerator]
    return Likeness(
        devices=file.plan.world_size,
        plan=file.plan,
        parameters=size,
        experts=experts,
        chip=None if chip is None else chip.name,
        architecture=None if chip is None else chip.architecture,
        seq_len=file.seq_len,
        stack=arguments.trainer or "outpace",
    )


def _parser() -> Parser:
    from outpace.cli.export_formats import TRAINERS

    parser = Parser("accuracy", _ABOUT, _EPILOG, usage="--like plan.json [options]")
    parser.add_json()
    add = parser.option
    add("--like", "FILE", Path, "plan file to compare with published steps", required=True)
    add("--model", "MODEL", str, "model that the plan trains, to compare sizes")
    add("--machine", "NAME", str, "machine of the catalog, to compare chips")
    add("--trainer", "NAME", str, "trainer to compare with (default: outpace)", choices=TRAINERS)
    add("--count", "N", number_type(int, 1, _MOST_CASES),
        "number of steps to list (default: 5)", default=5)  # fmt: skip
    return parser
