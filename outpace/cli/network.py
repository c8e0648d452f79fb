"""`outpace network`."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from outpace.catalog.dimensions import DIMENSIONS
from outpace.cli.parser import Parser, number_type
from outpace.planner.contest import PRODUCT, Contest, entries
from outpace.planner.flops import parameter_count
from outpace.planner.network import Question, answer
from outpace.planner.networks import by_rate, device_ladder, ladder, read_network
from outpace.planner.roofline import Roof
from outpace.planner.site import Asked, Site, value_of
from outpace.records.errors import BadInputError
from outpace.records.figure import Figure
from outpace.records.model import ModelSpec
from outpace.records.network import Need, Network, NetworkReport
from outpace.records.optimizers import Precision, default_optimizer
from outpace.records.plan import Checkpointing, Plan, PlanFile

_ABOUT = "How much network a training needs, and what a slower or faster one would cost."
_EPILOG = (
    "Without --plan the strategies are compared: DDP, ZeRO-1, ZeRO-2, ZeRO-3, TP, PP and "
    "TP × PP × DP. "
    "Computing is reckoned with what outpace probe measured (--probe), or with a share of the "
    "catalog's peak. How it is derived: docs/network.md."
)
_SHARE = 0.5
_SHARE_SOURCE = (
    "157 of an A100's 312 TFLOP/s in a training on one node, where no network takes part: "
    "BigScience, train/tr11-176B-ml/chronicles-prequel.md, 18B, TP 8"
)
_TOLERANCE = 0.05
_MOST_NODES = 100_000  # no machine has more, and each number of ranks is looked into
_MEASURED = ("all-reduce", "all-gather", "reduce-scatter")


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Answer the network question and print it; returns 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    name, spec = _model(arguments.model)
    site = Site(
        Asked(
            arguments.machine, arguments.probe, arguments.nodes, arguments.devices_per_node,
            arguments.networks or (), arguments.inside, arguments.share,
        )
    )  # fmt: skip
    plan = None if arguments.plan is None else PlanFile.load(arguments.plan, option="--plan ").plan
    precision = site.precision(arguments.precision if plan is None else plan.precision)
    rate, memory_rate = site.rate(precision), site.memory_rate()
    roof, link = Roof(value_of(rate), value_of(memory_rate)), site.device_network()
    inside = math.inf if link is None else link.bytes_per_s  # nothing goes over it
    seq_len = arguments.seq_len or min(spec.max_positions, 2048)
    networks = _networks(arguments.networks or [], site.own)
    device_links = [] if link is None else by_rate([link, *device_ladder(site.accelerator)])
    needs, refused = [], {}
    for title, chosen, batch in _plans(arguments, plan, spec, site, precision):
        if isinstance(chosen, str):
            refused[title] = chosen
            continue
        try:
            question = Question(
                chosen, spec, batch, seq_len, site.per_node, roof, inside, site.memory_bytes
            )
            needs.append(
                answer(question, networks, site.own, arguments.tolerance, title, device_links, link)
            )
        except BadInputError as error:
            if plan is not None:
                raise
            refused[title] = str(error)
    answered = _answer(arguments, name, spec, site, (rate, memory_rate), needs, refused)
    _show(answered, arguments.json)
    return 0


def _notes(global_batch: int | None, needs: Sequence[Need]) -> list[str]:
    """Of a batch that not all plans can share out as it was asked for."""
    taken: dict[int, list[str]] = {}
    for need in needs:
        taken.setdefault(need.global_batch, []).append(need.title)
    if global_batch is None or set(taken) <= {global_batch}:
        return []
    words = ", ".join(f"{size} by {', '.join(of)}" for size, of in sorted(taken.items()))
    return [f"--global-batch {global_batch} cannot be shared out by all plans; taken are {words}."]


def _networks(words: list[str], own: Network | None) -> list[Network]:
    """The catalog's, those asked for and the machine's own, slowest first, each rate once."""
    named = ([] if own is None else [own]) + [read_network(text) for text in words]
    return by_rate([*named, *ladder()])


def _plans(
    arguments: argparse.Namespace, plan: Plan | None, spec: ModelSpec, site: Site, precision: str
) -> list[tuple[str, Plan | str, int]]:
    world = site.nodes * site.per_node
    if plan is not None:
        if plan.world_size != world:
            raise BadInputError(
                f"{arguments.plan} is for {plan.world_size} device{'s'[: plan.world_size > 1]}, "
                f"but {site.nodes} × {site.per_node} = {world} are there. Set its axes (dp_shard, "
                "…), or --nodes, or name another --machine."
            )
        batch = arguments.global_batch or plan.samples_per_pass * plan.data_parallel
        return [(plan.strategy, plan, batch)]
    common: dict[str, Any] = {
        "precision": precision,
        "optimizer": default_optimizer(precision),  # type: ignore[arg-type]
        "checkpointing": arguments.checkpointing,
    }
    axes = {axis: getattr(arguments, axis) for axis in ("tp", "pp") if getattr(arguments, axis)}
    contest = Contest(
        spec, nodes=site.nodes, per_node=site.per_node, common=common, axes=axes,
        global_batch=arguments.global_batch or world * arguments.micro_batch,
        micro_batch=arguments.micro_batch, memory_bytes=site.memory_bytes,
    )  # fmt: skip
    found = [(one[0], one[1], one[2] if len(one) == 3 else 0) for one in entries(contest)]
    impossible = [chosen for title, chosen, _ in found if title == PRODUCT]
    if axes and impossible:
        asked = " ".join(f"--{axis} {size}" for axis, size in axes.items())
        raise BadInputError(f"{asked}: {impossible[0]}.")
    return found


def _model(reference: str) -> tuple[str, ModelSpec]:
    if reference in DIMENSIONS:
        return reference, DIMENSIONS[reference].spec
    from outpace.interop.models import open_model

    opened = open_model(reference)
    if opened.spec is None:
        raise BadInputError(
            f"{opened.name} is a model of one's own: its dimensions are not known, which the "
            "network question is about. Name a preset, a spec file or a Hugging Face directory."
        )
    return opened.name, opened.spec


def _answer(
    arguments: argparse.Namespace,
    name: str,
    spec: ModelSpec,
    site: Site,
    rates: tuple[Figure, Figure],
    needs: list[Need],
    refused: dict[str, str],
) -> NetworkReport:
    probed = None if site.probe is None else site.probe.probed
    fits = [] if probed is None else [f for f in probed.fits if f.collective in _MEASURED]
    assumed = rates[0].origin == "catalog"
    usual = arguments.share == _SHARE
    return NetworkReport(
        model=name,
        parameters=parameter_count(spec),
        seq_len=arguments.seq_len or min(spec.max_positions, 2048),
        machine=arguments.machine or "as probed",
        nodes=site.nodes,
        devices_per_node=site.per_node,
        rate=rates[0],
        memory_rate=rates[1],
        share=arguments.share if assumed else None,
        share_source=(_SHARE_SOURCE if usual else "as asked") if assumed else None,
        tolerance=arguments.tolerance,
        inside=site.device_network(),
        present=site.own,
        measured=tuple(fit.bandwidth for fit in fits),
        needs=tuple(needs),
        refused=refused,
        notes=tuple(_notes(arguments.global_batch, needs)),
    )


def _show(answered: NetworkReport, as_json: bool) -> None:
    if as_json:
        print(answered.model_dump_json(indent=2), flush=True)
        return
    from outpace.report.network import network_text
    from outpace.report.terminal import Console

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
        help="tokens of a sample (default: the model's, at most 2048)",
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
        help="bf16 exchanges weights and gradients in fp32, bf16-pure in bf16 "
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
        default=_SHARE,
        metavar="X",
        help=f"of the catalog's peak that computing reaches, without a probe (default: {_SHARE:g})",
    )
    add(
        "--tolerance",
        type=above,
        default=_TOLERANCE,
        metavar="X",
        help=f"share of a step that the network may cost (default: {_TOLERANCE:g})",
    )
    return parser
