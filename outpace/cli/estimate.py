"""`outpace estimate`."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from outpace.cli.parser import Parser
from outpace.cli.plan import add_question
from outpace.records.errors import BadInputError

_ABOUT = "One plan in detail: time, where it goes, memory, and whether it fits."
_EPILOG = (
    "--depth trace also runs the real model under fake tensors for its true peak of memory; the "
    "plan has to be one that outpace trains."
)


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Estimate a plan and print it; returns 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    from outpace.launch.planning import Asked, job
    from outpace.planner.plans import estimate_plan
    from outpace.records.plan import PlanFile

    file = PlanFile.load(arguments.plan, option="--plan ")
    plan = file.plan
    asked = Asked(
        model=arguments.model, machine=arguments.machine, nodes=arguments.nodes,
        devices_per_node=arguments.devices_per_node, network=arguments.network,
        seq_len=arguments.seq_len or file.seq_len,
        global_batch=arguments.global_batch or file.global_batch, precision=plan.precision,
    )  # fmt: skip
    question = job(asked)
    if plan.world_size != question.wanted.world:
        raise BadInputError(
            f"{arguments.plan} is for {plan.world_size} devices, but {question.cluster.nodes} × "
            f"{question.cluster.fabric.per_node} = {question.wanted.world} are there. Set its axes "
            "or --nodes and --devices-per-node."
        )
    if asked.global_batch is None:
        # As plan's default, up to what the plan divides.
        least = plan.samples_per_pass * plan.data_parallel
        batch = least * math.ceil(question.wanted.global_batch / least)
        question = replace(question, wanted=replace(question.wanted, global_batch=batch))
    try:
        planned = estimate_plan(question, plan)
    except BadInputError as error:
        raise BadInputError(f"{arguments.plan}: {error}") from None
    if arguments.depth == "trace":
        from outpace.launch.traced import traced

        planned = traced(planned, asked.model, question)
    if arguments.json:
        print(planned.model_dump_json(indent=2), flush=True)
        return 0
    from outpace.report.plan import one_plan
    from outpace.report.terminal import Console

    of = (
        f"of {question.outline.name} with sequences of {question.wanted.seq_len:,} and a global "
        f"batch of {question.wanted.global_batch:,}. For others give --seq-len and --global-batch."
    )
    Console().print(one_plan(planned, (of, *question.outline.notes, *question.cluster.notes)))
    return 0


def _parser() -> Parser:
    usage = "--model MODEL --machine NAME --plan plan.json [options]"
    parser = Parser("estimate", _ABOUT, _EPILOG, usage=usage)
    parser.add_json()
    add_question(parser, of="the plan's, else ")
    add = parser.arguments.add_argument
    add("--plan", type=Path, required=True, metavar="plan.json", help="the plan, as --out wrote it")
    add("--depth", choices=("estimate", "trace"), default="estimate", metavar="DEPTH",
        help="estimate (default), or trace")  # fmt: skip
    return parser
