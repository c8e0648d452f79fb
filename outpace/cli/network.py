"""`outpace network`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from outpace.cli.parser import Parser, number_type
from outpace.jobs.planning.network import SHARE, TOLERANCE, NetworkQuestion, network_report
from outpace.records.network import NetworkReport
from outpace.records.plan import Checkpointing
from outpace.records.precisions import Precision

_ABOUT = "How much network a training needs, and what a slower or faster one would cost."
_EPILOG = (
    "Without --plan the strategies are compared: DDP, ZeRO-1, ZeRO-2, ZeRO-3, TP, PP and "
    "TP × PP × DP. "
    "Computation is estimated from what outpace probe measured (--probe), or with a share of the "
    "catalog's peak. How it is derived: docs/concepts/network.md."
)
_MOST_NODES = 100_000  # no machine has more, and each number of ranks is looked into


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Answer the network question and print it; returns 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    _show(_answer(arguments), arguments.json)
    return 0


def answer(argv: list[str]) -> NetworkReport:
    """Return the report that the words of a command line ask for. Raises BadInputError."""
    return _answer(_parser().read(argv))


def _answer(arguments: argparse.Namespace) -> NetworkReport:
    asked = {name: value for name, value in vars(arguments).items() if name != "json"}
    return network_report(NetworkQuestion(**{**asked, "networks": arguments.networks or ()}))


def _show(answered: NetworkReport, as_json: bool) -> None:
    if as_json:
        print(answered.model_dump_json(indent=2), flush=True)
        return
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.network import network_text

    Console().print(network_text(answered))


def _parser() -> Parser:
    parser = Parser("network", _ABOUT, _EPILOG, usage="--model MODEL [--plan FILE.json] [options]")
    parser.add_json()
    add = parser.arguments.add_argument
    whole, above = number_type(int, 1), number_type(float, 1e-6)
    add(
        "--model",
        required=True,
        metavar="MODEL",
        help="preset, spec or Hugging Face directory; also bloom-176b",
    )
    add("--plan", type=Path, default=None, metavar="FILE.json", help="ask for this plan alone")
    add("--machine", default=None, metavar="NAME", help="of the catalog: hgx-h100, aws-p5, …")
    add(
        "--probe",
        type=Path,
        default=None,
        metavar="FILE.json",
        help="what outpace probe measured: rates, and links where it ran on several nodes",
    )
    add("--nodes", type=number_type(int, 1, _MOST_NODES), default=1, metavar="N",
        help="how many machines (default: 1)")  # fmt: skip
    add(
        "--devices-per-node",
        type=whole,
        default=None,
        metavar="N",
        help="ranks on each (default: the machine's)",
    )
    add(
        "--network",
        dest="networks",
        action="append",
        default=None,
        metavar="WORDS",
        help="of a node: '4 x omni-path-100', 50Gbit/s; again for more, the last is the machine's",
    )
    add(
        "--inside",
        default=None,
        metavar="WORDS",
        help="a device's link within a node, as --network (default: the machine's)",
    )
    add("--global-batch", type=whole, default=None, metavar="N", help="samples in a step")
    add(
        "--micro-batch",
        type=whole,
        default=1,
        metavar="N",
        help="samples at once, of the strategies compared (default: 1)",
    )
    add(
        "--seq-len",
        type=whole,
        default=None,
        metavar="N",
        help="tokens of a sample (default: the plan's, else the model's, at most 2048)",
    )
    add("--tp", type=whole, default=None, metavar="N", help="of TP × PP × DP (default: a node's)")
    add(
        "--pp",
        type=whole,
        default=None,
        metavar="N",
        help="of TP × PP × DP (default: the fewest stages that a device holds)",
    )
    add(
        "--precision",
        choices=get_args(Precision),
        default=None,
        metavar="NAME",
        help="bf16 collectives weights and gradients in fp32, bf16-pure in bf16 "
        "(default: the fastest that was measured, else that the catalog has a rate of)",
    )
    add(
        "--checkpointing",
        choices=get_args(Checkpointing),
        default="none",
        metavar="NAME",
        help="none, selective, attention or full (default: none)",
    )
    add(
        "--share",
        type=number_type(float, 0.01, 1),
        default=SHARE,
        metavar="X",
        help=f"of the catalog's peak that computing reaches, without a probe (default: {SHARE:g})",
    )
    add(
        "--tolerance",
        type=above,
        default=TOLERANCE,
        metavar="X",
        help=f"share of a step that the network may cost (default: {TOLERANCE:g})",
    )
    return parser
