"""The network question: how much bandwidth a training needs, and what another network would
cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outpace.catalog.dimensions import DIMENSIONS
from outpace.planner.calibration.cluster import assumed_network_note, default_network
from outpace.planner.hardware.networks import by_rate, device_ladder, ladder, read_network
from outpace.planner.model.flops import parameter_count
from outpace.planner.network.default_plans import PRODUCT, NetworkStudy, candidate_plans
from outpace.planner.network.requirement import NetworkProblem, answer
from outpace.planner.network.roofline import Roof
from outpace.planner.network.site import NetworkOptions, Site, value_of
from outpace.records.errors import BadInputError
from outpace.records.figure import Figure
from outpace.records.model import ModelSpec
from outpace.records.network import Need, Network, NetworkReport
from outpace.records.optimizers import default_optimizer
from outpace.records.plan import Checkpointing, Plan, PlanFile
from outpace.records.precisions import Precision

SHARE = 0.5
_SHARE_SOURCE = (
    "157 of an A100's 312 TFLOP/s in a training on one node, without a network: BigScience, "
    "train/tr11-176B-ml/chronicles-prequel.md, 18B, TP 8"
)
TOLERANCE = 0.05
_MEASURED = ("all-reduce", "all-gather", "reduce-scatter")


@dataclass(frozen=True)
class NetworkQuestion:
    """A question about the network that a training needs.

    `machine`: a name in the catalog; `probe`: a file of outpace probe. `networks`: the network of a
    node, as text, the last one being the machine's; `inside`: a device's link within its node.
    `plan`: a file with the only plan to consider, whose length and batch are used unless others are
    given; without it, strategies with `micro_batch` are compared. `share`: share of the catalog's
    peak that computation reaches; `tolerance`: share of a step that the network may cost.
    """

    model: str
    machine: str | None = None
    probe: Path | None = None
    nodes: int = 1
    devices_per_node: int | None = None
    networks: Sequence[str] = ()
    inside: str | None = None
    plan: Path | None = None
    global_batch: int | None = None
    micro_batch: int = 1
    seq_len: int | None = None
    tp: int | None = None
    pp: int | None = None
    precision: Precision | None = None
    checkpointing: Checkpointing = "none"
    share: float = SHARE
    tolerance: float = TOLERANCE


def network_report(asked: NetworkQuestion) -> NetworkReport:
    """Answer the network question. Raises BadInputError."""
    name, spec = _model(asked.model)
    site = Site(
        NetworkOptions(
            asked.machine, asked.probe, asked.nodes, asked.devices_per_node,
            asked.networks, asked.inside, asked.share,
        )
    )  # fmt: skip
    notes = _assume_network(site)
    plan = None
    if asked.plan is not None:
        file = PlanFile.load(asked.plan, option="--plan ")
        plan = file.plan
        asked = replace(asked, seq_len=asked.seq_len or file.seq_len,
                        global_batch=asked.global_batch or file.global_batch)  # fmt: skip
    precision = site.precision(asked.precision if plan is None else plan.precision)
    rate, memory_rate = site.rate(precision), site.memory_rate()
    roof, link = Roof(value_of(rate), value_of(memory_rate)), site.device_network()
    inside = math.inf if link is None else link.bytes_per_s  # nothing goes over it
    seq_len = asked.seq_len or min(spec.max_positions, 2048)
    networks = _networks(asked.networks, site.own)
    device_links = [] if link is None else by_rate([link, *device_ladder(site.accelerator)])
    needs, refused = [], {}
    for title, chosen, batch in _plans(asked, plan, spec, site, precision):
        if isinstance(chosen, str):
            refused[title] = chosen
            continue
        try:
            question = NetworkProblem(
                chosen, spec, batch, seq_len, site.per_node, roof, inside, site.memory_bytes
            )
            needs.append(
                answer(question, networks, site.own, asked.tolerance, title, device_links, link)
            )
        except BadInputError as error:
            if plan is not None:
                raise
            refused[title] = str(error)
    answered = _answer(asked, name, spec, site, (rate, memory_rate), needs, refused)
    return answered.model_copy(update={"notes": (*notes, *answered.notes)})


def _assume_network(site: Site) -> list[str]:
    """Give nodes sold without a network the planner's default; return what is assumed."""
    node = site.node
    if node is None:
        return []
    notes = [] if node.assumed is None else [node.assumed]
    if site.own is None and site.nodes > 1 and node.accelerator is not None:
        site.own = default_network(node)
        notes.append(assumed_network_note(node, site.own))
    return notes


def _notes(global_batch: int | None, needs: Sequence[Need]) -> list[str]:
    """Return notes on a global batch that some plans cannot divide."""
    taken: dict[int, list[str]] = {}
    for need in needs:
        taken.setdefault(need.global_batch, []).append(need.title)
    if global_batch is None or set(taken) <= {global_batch}:
        return []
    words = ", ".join(f"{size} by {', '.join(of)}" for size, of in sorted(taken.items()))
    return [
        (
            f"--global-batch {global_batch} cannot be divided by all plans. These are used "
            f"instead: {words}."
        )
    ]


def _networks(words: Sequence[str], machine_network: Network | None) -> list[Network]:
    """Return the catalog's networks, the requested ones and the machine's, slowest first, without
    duplicates.
    """
    named = ([] if machine_network is None else [machine_network]) + [
        read_network(text) for text in words
    ]
    return by_rate([*named, *ladder()])


def _plans(
    asked: NetworkQuestion, plan: Plan | None, spec: ModelSpec, site: Site, precision: str
) -> list[tuple[str, Plan | str, int]]:
    world = site.nodes * site.per_node
    if plan is not None:
        if plan.world_size != world:
            raise BadInputError(
                f"{asked.plan} is for {plan.world_size} device{'s'[: plan.world_size > 1]}, but "
                f"{site.nodes} × {site.per_node} = {world} are given. Set its axes (dp_shard, "
                "…), or --nodes, or name another --machine."
            )
        batch = asked.global_batch or plan.samples_per_pass * plan.data_parallel
        return [(plan.strategy, plan, batch)]
    common: dict[str, Any] = {
        "precision": precision,
        "optimizer": default_optimizer(precision),  # type: ignore[arg-type]
        "checkpointing": asked.checkpointing,
    }
    axes = {axis: getattr(asked, axis) for axis in ("tp", "pp") if getattr(asked, axis)}
    study = NetworkStudy(
        spec, nodes=site.nodes, per_node=site.per_node, common=common, axes=axes,
        global_batch=asked.global_batch or world * asked.micro_batch,
        micro_batch=asked.micro_batch, memory_bytes=site.memory_bytes,
    )  # fmt: skip
    found = [(one[0], one[1], one[2] if len(one) == 3 else 0) for one in candidate_plans(study)]
    impossible = [chosen for title, chosen, _ in found if title == PRODUCT]
    if axes and impossible:
        given = " ".join(f"--{axis} {size}" for axis, size in axes.items())
        raise BadInputError(f"{given}: {impossible[0]}.")
    return found


def _model(reference: str) -> tuple[str, ModelSpec]:
    if reference in DIMENSIONS:
        return reference, DIMENSIONS[reference].spec
    from outpace.interop.models import open_model

    opened = open_model(reference)
    if opened.spec is None:
        raise BadInputError(
            f"{opened.name} is a custom model, whose dimensions are unknown, but the network "
            "question needs them. Give a preset, a spec file or a Hugging Face directory."
        )
    return opened.name, opened.spec


def _answer(
    asked: NetworkQuestion,
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
    usual = asked.share == SHARE
    return NetworkReport(
        model=name,
        parameters=parameter_count(spec),
        seq_len=asked.seq_len or min(spec.max_positions, 2048),
        machine=asked.machine or "as probed",
        nodes=site.nodes,
        devices_per_node=site.per_node,
        rate=rates[0],
        memory_rate=rates[1],
        share=asked.share if assumed else None,
        share_source=(_SHARE_SOURCE if usual else "as asked") if assumed else None,
        tolerance=asked.tolerance,
        inside=site.device_network(),
        present=site.own,
        measured=tuple(fit.bandwidth for fit in fits),
        needs=tuple(needs),
        refused=refused,
        notes=tuple(_notes(asked.global_batch, needs)),
    )
