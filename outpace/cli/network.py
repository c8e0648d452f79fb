"""`outpace network`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from outpace.cli.parser import Parser, number_type
from outpace.jobs.planning.network import network_report
from outpace.planner.network.site import TOLERANCE, NetworkQuestion
from outpace.records.network import NetworkReport
from outpace.records.plan import Checkpointing
from outpace.records.precisions import Precision

_ABOUT = (
    "Estimate how much network bandwidth a training run needs, and the step time on slower and "
    "faster networks."
)
_EPILOG = (
    "Without --plan, compares strategies: DDP, ZeRO-1, ZeRO-2, ZeRO-3, TP, PP and TP × PP × DP. "
    "Step times come from the planner, with the rates of outpace probe (--probe) or of the "
    "catalog. Details: docs/concepts/network.md."
)
_MOST_NODES = 100_000  # above any cluster; the search covers all numbers of ranks


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Estimate the required bandwidth and print it; return 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    _show(_make_report(arguments), arguments.json)
    return 0


def answer(argv: list[str]) -> NetworkReport:
    """Return the report for the command line `argv`.

    Raises BadInputError if an argument is invalid.
    """
    return _make_report(_parser().read(argv))


def _make_report(arguments: argparse.Namespace) -> NetworkReport:
    options = {name: value for name, value in vars(arguments).items() if name != "json"}
    return network_report(NetworkQuestion(**{**options, "networks": arguments.networks or ()}))


def _show(report: NetworkReport, as_json: bool) -> None:
    if as_json:
        print(report.model_dump_json(indent=2), flush=True)
        return
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.network import network_text

    Console().print(network_text(report))


def _parser() -> Parser:
    parser = Parser("network", _ABOUT, _EPILOG, usage="--model MODEL [--plan FILE.json] [options]")
    parser.add_json()
    add = parser.option
    whole, above = number_type(int, 1), number_type(float, 1e-6)
    add("--model", "MODEL", str,
        "preset, spec or Hugging Face directory; also bloom-176b", required=True)  # fmt: skip
    add("--plan", "FILE.json", Path, "show only this plan")
    add("--machine", "NAME", str, "machine from the catalog: hgx-h100, aws-p5, …")
    add("--probe", "FILE.json", Path,
        "file from outpace probe --out: rates, and links if it ran on several nodes")  # fmt: skip
    add("--nodes", "N", number_type(int, 1, _MOST_NODES),
        "number of machines (default: 1)", default=1)  # fmt: skip
    add("--devices-per-node", "N", whole, "ranks per machine (default: the machine's)")
    add("--network", "WORDS", str,
        "network of a node: '4 x omni-path-100', 50Gbit/s; may be repeated, with the machine's "
        "network last", dest="networks", action="append")  # fmt: skip
    add("--inside", "WORDS", str,
        "link of a device within its node, in the notation of --network (default: the machine's)"
    )  # fmt: skip
    add("--global-batch", "N", whole, "samples per step")
    add("--micro-batch", "N", whole,
        "samples per forward pass of the compared strategies (default: 1)", default=1)  # fmt: skip
    add("--seq-len", "N", whole,
        "tokens per sample (default: the plan's, else the model's, at most 2048)")  # fmt: skip
    add("--tp", "N", whole,
        "tensor-parallel degree of TP × PP × replicas (default: a node's devices)")  # fmt: skip
    add("--pp", "N", whole,
        "pipeline stages of TP × PP × replicas (default: the fewest that fit)")  # fmt: skip
    add("--precision", "NAME", str,
        "bf16 communicates weights and gradients in fp32, bf16-pure in bf16 (default: the fastest "
        "measured precision, else one for which the catalog has a rate)",
        choices=get_args(Precision))  # fmt: skip
    add("--checkpointing", "NAME", str,
        "activation checkpointing: none, selective, attention or full (default: none)",
        default="none", choices=get_args(Checkpointing))  # fmt: skip
    add("--share", "X", number_type(float, 0.01, 1),
        "MFU of forward and backward passes, relative to the catalog's peak, if there is no probe "
        "(default: derived from published measurements)")  # fmt: skip
    add("--tolerance", "X", above,
        f"slowdown that the network may cause (default: {TOLERANCE:g})", default=TOLERANCE
    )  # fmt: skip
    return parser
