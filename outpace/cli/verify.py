"""`outpace verify`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from outpace.cli.parser import Parser, number_type
from outpace.launch.environment import ranks_from, restart_count
from outpace.records.errors import BadInputError, OutpaceError, nearest
from outpace.records.plan import Plan, Strategy

_ABOUT = "Prove that strategies give a single process's numbers: gradients, norms, losses, weights."
_EPILOG = "Exit code 1 when a strategy fails. Without options: all strategies, on two processes."


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Prove strategies and print a certificate; 0 if all passed. Raises OutpaceError."""
    arguments = _parser().read(argv)
    strategies = _strategies(arguments.strategy)
    ranks = ranks_from(environ)
    if ranks is None:
        from outpace.launch import local

        local.start(arguments.nproc, [sys.executable, "-m", "outpace", "verify", *argv])
        return 0
    import torch

    from outpace.experiment.parity import Trial
    from outpace.experiment.verify import plans_for, tiny_spec, verify
    from outpace.interop.models import open_model
    from outpace.launch.group import process_groups
    from outpace.parallel import why_not

    torch.set_num_threads(1)  # the ranks share the cores, and the model is tiny
    skipped: dict[str, str] = {}
    if arguments.plan is not None:
        plans = [Plan.load(arguments.plan)]
    else:
        skipped = {str(name): why for name in strategies if (why := why_not(name, ranks))}
        for name, why in skipped.items():
            if arguments.strategy != "all":
                raise BadInputError(f"--strategy {name}: {why}.")
        possible = [name for name in strategies if name not in skipped]
        plans = [plan for name in possible for plan in plans_for(name, ranks.world_size)]
    spec = open_model(arguments.model).spec if arguments.model else tiny_spec(plans)
    if spec is None:
        raise BadInputError("--model: verify takes a preset, a spec or a Hugging Face directory")
    trial = Trial(spec)
    with process_groups(ranks, torch.device("cpu"), 300.0, restart_count(environ)) as groups:
        certificate = verify(plans, trial, groups, skipped=skipped)
    if ranks.rank == 0:
        if arguments.out is not None:
            certificate.save(arguments.out)
        if arguments.json:
            print(certificate.model_dump_json(indent=2), flush=True)
        else:
            from rich.console import Console

            from outpace.report.certificate import certificate_table

            Console().print(certificate_table(certificate))
    failed = [verdict.strategy for verdict in certificate.verdicts if not verdict.passed]
    if failed:
        raise OutpaceError(f"{', '.join(failed)}: not what a single process computes")
    return 0


def _strategies(text: str) -> list[Strategy]:
    known = get_args(Strategy)
    if text == "all":
        return list(known)
    for word in text.split(","):
        if word not in known:
            raise BadInputError(
                f"--strategy {word}: there is no such strategy.{nearest(word, known)} "
                f"The strategies are {', '.join(known)}."
            )
    return [name for name in known if name in text.split(",")]


def _parser() -> Parser:
    parser = Parser("verify", _ABOUT, _EPILOG)
    parser.add_json()
    add = parser.arguments.add_argument
    add(
        "--strategy",
        default="all",
        metavar="A,B",
        help="strategies to prove, or all that this machine has (default: all)",
    )
    add("--plan", type=Path, default=None, metavar="FILE.json", help="prove this plan instead")
    add("--model", default=None, help="preset, spec or Hugging Face directory (default: tiny)")
    add(
        "--nproc",
        type=number_type(int, 1),
        default=2,
        metavar="N",
        help="processes to start on this host (default: 2)",
    )
    add("--out", type=Path, default=None, metavar="FILE.json", help="keep the certificate here")
    return parser
