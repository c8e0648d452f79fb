"""`outpace estimate`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli.parser import Parser
from outpace.cli.plan import ADAPTER_OPTIONS, add_question, plan_question

if TYPE_CHECKING:
    from outpace.planner.problem import PlanningProblem
    from outpace.records.estimate import RankedPlan
    from outpace.records.plan import PlanFile

_ABOUT = (
    "Show one plan in detail: its time, the parts of the time, its memory, and whether it fits."
)
_EPILOG = (
    "--depth trace also runs the real model under fake tensors to find its exact peak memory. "
    "outpace must be able to train the plan."
)


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Estimate a plan and print it; returns 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    from outpace.records.plan import PlanFile

    planned, question = _estimate(arguments, PlanFile.load(arguments.plan, option="--plan "))
    if arguments.json:
        print(planned.model_dump_json(indent=2), flush=True)
        return 0
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.plan import plan_text

    of = (
        f"estimated for {question.outline.name} with sequences of {question.wanted.seq_len:,} "
        f"tokens and a global batch of {question.wanted.global_batch:,}. Change them with "
        "--seq-len and --global-batch."
    )
    Console().print(plan_text(planned, (of, *question.outline.notes, *question.cluster.notes)))
    return 0


def answer(argv: list[str], file: "PlanFile") -> "RankedPlan":
    """Return the estimate of the plan in `file`, with the options in `argv`.

    The option --plan in `argv` is only the plan's name in error messages. Raises BadInputError if
    an argument is invalid.
    """
    return _estimate(_parser().read(argv), file)[0]


def _estimate(
    arguments: argparse.Namespace, file: "PlanFile"
) -> "tuple[RankedPlan, PlanningProblem]":
    from outpace.jobs.planning.estimate import estimate

    plan = file.plan
    asked = plan_question(
        arguments,
        seq_len=arguments.seq_len or file.seq_len,
        global_batch=arguments.global_batch or file.global_batch,
        precision=plan.precision,
        measures=True,
    )
    trace = arguments.depth == "trace"
    return estimate(asked, plan, str(arguments.plan), trace=trace)


def _parser() -> Parser:
    usage = "--model MODEL --machine NAME --plan plan.json [options]"
    parser = Parser("estimate", _ABOUT, _EPILOG, usage=usage, elsewhere=ADAPTER_OPTIONS)
    parser.add_json()
    add_question(parser, of="the plan's, else ")
    add = parser.option
    add("--plan", "plan.json", Path, "plan file, as written by outpace plan --out", required=True)
    add("--depth", "DEPTH", str,
        "how to estimate: estimate (default) or trace",
        default="estimate", choices=("estimate", "trace"))  # fmt: skip
    return parser
