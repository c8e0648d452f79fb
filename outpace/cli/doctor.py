"""`outpace doctor`."""

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from outpace.cli.parser import Parser, duration_type

_ABOUT = "Find what slows this host down and what to do about it, most costly first."
_EPILOG = (
    "To check the conditions of a training, run it instead of the training command, with the same "
    "launcher and in the same container."
)


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Examine this host and print the findings; returns 0, or 1 with --strict if there are any."""
    arguments = _parser().read(argv)
    if arguments.run is not None:
        return _examine_run(arguments)
    from outpace.probing.doctor.examine import examine
    from outpace.probing.hardware.inventory import gather

    inventory = gather(environ, timeout_s=arguments.timeout)
    examination = examine(inventory)
    if arguments.json:
        document = {
            **examination.model_dump(mode="json"),
            "inventory": inventory.model_dump(mode="json"),
        }
        print(json.dumps(document, indent=2), flush=True)
    else:
        from outpace.reporting.terminal.console import Console
        from outpace.reporting.terminal.doctor import examination_text

        Console(highlight=False).print(examination_text(examination))
    return 1 if arguments.strict and examination.findings else 0


def _examine_run(arguments: Namespace) -> int:
    from outpace.reporting.data.run_folder import read_run
    from outpace.reporting.run_findings import run_examination
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.doctor import examination_text

    examination = run_examination(read_run(arguments.run))
    if arguments.json:
        print(examination.model_dump_json(indent=2), flush=True)
    else:
        Console(highlight=False).print(examination_text(examination))
    return 1 if arguments.strict and examination.findings else 0


def _parser() -> Parser:
    parser = Parser("doctor", _ABOUT, _EPILOG)
    parser.add_json()
    add = parser.option
    parser.switch("--strict", "exit with code 1 if there are findings")
    add("--run", "DIR", Path,
        "examine this run instead of the host: what limited its speed, and what to do")  # fmt: skip
    add("--timeout", "TIME", duration_type(0.1),
        "time to wait for each answer from the driver: 20, 1m (default: 20 s)", default=20.0
    )  # fmt: skip
    return parser
