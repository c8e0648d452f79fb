"""Answers of `outpace network`: the bandwidth that a run needs, and the cost of other networks."""

from collections.abc import Sequence
from dataclasses import replace

from outpace.catalog.dimensions import DIMENSIONS
from outpace.planner.hardware.device import check_dtype
from outpace.planner.hardware.networks import by_rate, device_ladder, ladder, read_network
from outpace.planner.model.flops import parameter_count
from outpace.planner.model.outline import outline
from outpace.planner.network.default_plans import PRODUCT, candidate_plans
from outpace.planner.network.requirement import NetworkEntry, NetworkProblem, network_needs
from outpace.planner.network.site import NetworkQuestion, Site
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.network import Need, Network, NetworkReport
from outpace.records.plan import Plan, PlanFile
from outpace.records.precisions import Precision

_MEASURED = ("all-reduce", "all-gather", "reduce-scatter")


def network_report(asked: NetworkQuestion) -> NetworkReport:
    """Report the bandwidth that plans need, and the networks that provide it.

    Raises BadInputError if the model, the plan, the machine or a network is not valid.
    """
    name, spec = _find_spec(asked.model)
    site = Site(asked)
    plan = None
    if asked.plan is not None:
        file = PlanFile.load(asked.plan, option="--plan ")
        plan = file.plan
        asked = replace(asked, seq_len=asked.seq_len or file.seq_len,
                        global_batch=asked.global_batch or file.global_batch)  # fmt: skip
    precision = site.precision(asked.precision if plan is None else plan.precision)
    cluster, link = site.cluster(precision), site.device_network()
    check_dtype(precision, cluster.device)
    problem = NetworkProblem(
        spec=spec,
        outline=outline(spec, name),
        seq_len=asked.seq_len or min(spec.max_positions, 2048),
        cluster=cluster,
        tolerance=asked.tolerance,
        networks=_list_networks(asked.networks, site.own),
        present=site.own,
        device_links=[] if link is None else by_rate([link, *device_ladder(site.accelerator)]),
        present_link=link,
    )
    refused: dict[str, str] = {}
    if plan is not None:
        needs = network_needs(problem, [_file_entry(asked, plan, site)])
    else:
        needs, refused = _compare_strategies(asked, problem, precision)
    return _build_report(asked, name, problem, site, precision, needs, refused)


def _file_entry(question: NetworkQuestion, plan: Plan, site: Site) -> NetworkEntry:
    world = site.nodes * site.per_node
    if plan.world_size != world:
        raise BadInputError(
            f"{question.plan} is for {plan.world_size} device{'s'[: plan.world_size > 1]}, but "
            f"{site.nodes} × {site.per_node} = {world} are requested. Change the plan's axes "
            "(dp_shard, …) or --nodes, or choose another --machine."
        )
    batch = question.global_batch or plan.samples_per_pass * plan.data_parallel
    return NetworkEntry(plan.strategy, plan, batch)


def _compare_strategies(
    question: NetworkQuestion, problem: NetworkProblem, precision: Precision
) -> tuple[list[Need], dict[str, str]]:
    found = list(candidate_plans(problem, question, precision))
    refused = dict(one for one in found if not isinstance(one, NetworkEntry))
    axes = {axis: getattr(question, axis) for axis in ("tp", "pp") if getattr(question, axis)}
    if axes and PRODUCT in refused:
        given = " ".join(f"--{axis} {size}" for axis, size in axes.items())
        raise BadInputError(f"{given}: {refused[PRODUCT]}.")
    return network_needs(problem, [one for one in found if isinstance(one, NetworkEntry)]), refused


def _batch_notes(global_batch: int | None, needs: Sequence[Need]) -> list[str]:
    taken: dict[int, list[str]] = {}
    for need in needs:
        taken.setdefault(need.global_batch, []).append(need.title)
    if global_batch is None or set(taken) <= {global_batch}:
        return []
    batches = ", ".join(f"{size} ({', '.join(of)})" for size, of in sorted(taken.items()))
    return [
        f"Not every plan can split --global-batch {global_batch} evenly. Batches used: {batches}."
    ]


def _list_networks(words: Sequence[str], machine_network: Network | None) -> list[Network]:
    """Return the machine's, the requested and the catalog's networks, slowest first, each once."""
    named = ([] if machine_network is None else [machine_network]) + [
        read_network(text) for text in words
    ]
    return by_rate([*named, *ladder()])


def _find_spec(reference: str) -> tuple[str, ModelSpec]:
    if reference in DIMENSIONS:
        return reference, DIMENSIONS[reference].spec
    from outpace.interop.models import open_model

    opened = open_model(reference)
    if opened.spec is None:
        raise BadInputError(
            f"{opened.name} is a custom model, whose dimensions are unknown, but this command "
            "needs them. Pass a preset, a spec file or a Hugging Face directory."
        )
    return opened.name, opened.spec


def _build_report(
    question: NetworkQuestion,
    name: str,
    problem: NetworkProblem,
    site: Site,
    precision: Precision,
    needs: list[Need],
    refused: dict[str, str],
) -> NetworkReport:
    probed = None if site.probe is None else site.probe.probed
    fits = [] if probed is None else [f for f in probed.fits if f.collective in _MEASURED]
    rate, memory_rate = site.rates(precision, problem.cluster.device)
    share = question.share if rate.origin == "catalog" else None
    return NetworkReport(
        model=name,
        parameters=parameter_count(problem.spec),
        seq_len=problem.seq_len,
        machine=question.machine or "as probed",
        nodes=site.nodes,
        devices_per_node=site.per_node,
        rate=rate,
        memory_rate=memory_rate,
        share=share,
        share_source=None if share is None else "as asked",
        tolerance=question.tolerance,
        inside=problem.present_link,
        present=site.own,
        measured=tuple(fit.bandwidth for fit in fits),
        needs=tuple(needs),
        refused=refused,
        notes=(*site.notes, *_batch_notes(question.global_batch, needs)),
    )
