"""Changes that make a model fit: other options, more devices, shorter sequences, or adapters."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from outpace.catalog.node_names import find_node
from outpace.catalog.nodes import NODES
from outpace.planner.explain.reasons import impossible, lacks
from outpace.planner.explain.titles import title
from outpace.planner.model.adapters import can_plan_adapters
from outpace.planner.model.outline import parameters
from outpace.planner.problem import PlanningProblem
from outpace.planner.search.branch_and_bound import SearchResult, fits
from outpace.planner.search.search_request import SearchRequest
from outpace.planner.search.space import to_plan
from outpace.records.errors import BadInputError, join_or
from outpace.records.optimizers import PLAIN_ADAMW, default_optimizer
from outpace.records.precisions import PRECISION_TRAITS, Precision
from outpace.records.units import show_count


def explain_misfit(job: PlanningProblem, result: SearchResult) -> str:
    """Explain why no plan fits, and suggest changes with which a plan would fit."""
    if not result.smallest:
        return impossible(job.wanted, job.question.other_program)
    needs = {name: float(result.needs[spot]) for name, spot in result.smallest.items()}
    place = result.smallest[min(needs, key=lambda name: needs[name])]
    accepts = job.wanted.accepts
    those = "" if accepts is None else f" that {accepts.name} can express"
    return (
        f"{job.outline.name} ({show_count(parameters(job.outline))} parameters) does not fit: its "
        f"smallest plan{those} ({title(to_plan(result.columns, place))}) "
        f"{lacks(job, result.columns, place)}. {_suggest_remedies(job)}"
        f"{_explain_too_few_positions(job)}"
    )


def _suggest_remedies(job: PlanningProblem) -> str:
    """Return a sentence with changes that make a plan fit.

    Changes of required options come first, then more devices, then changes to what is trained.
    """
    fine = [*_suggest_four_bit_base(job), *_suggest_dropping_options(job)]
    larger = _fewest_devices(job)
    more = _fewest_nodes(lambda nodes: _fits_on_nodes(job, nodes)) if larger is None else None
    if larger is not None:
        fine.append(f"on {larger[0]} devices in one node (--machine {larger[1]})")
    if more is not None:
        fine.append(f"on {more} nodes of {job.cluster.name}")
    shorter = _longest_fitting_sequence(job)
    if shorter is not None:
        fine.append(f"with --seq-len {shorter}")
    adapters = _fitting_adapter_options(job)
    if adapters is not None:
        fine.append(f"with adapters ({adapters})")
    if not fine:
        return "Use devices with more memory, or a smaller model."
    return f"It fits {', or '.join(fine)}."


def _suggest_four_bit_base(job: PlanningProblem) -> list[str]:
    adapters = job.wanted.adapters
    if adapters is None or job.wanted.keep.get("base") == "nf4" or job.question.other_program:
        return []
    return ["with --base nf4"] if _fits_with(job, keep={**job.wanted.keep, "base": "nf4"}) else []


def _suggest_dropping_options(job: PlanningProblem) -> Iterator[str]:
    """Yield the changes of required options after which a plan would fit by offloading."""
    wanted = job.wanted
    for name, value in wanted.keep.items():
        why = _explain_no_offloading(wanted, name)
        if not why:
            continue
        others = {other: kept for other, kept in wanted.keep.items() if other != name}
        if _fits_with(job, keep=others):
            yield f"without {name}={value}{why}"
    plain = _offloadable_precision(wanted)
    if plain is not None and _fits_with(job, precision=plain):
        yield f"with --precision {plain}{_explain_no_offloading(wanted, 'precision')}"


def _offloadable_precision(wanted: SearchRequest) -> Precision | None:
    """Return the precision with the same matmuls whose states can be offloaded, or None."""
    plain = PRECISION_TRAITS[wanted.precision].low
    decided = "precision" in {*wanted.keep, *wanted.vary} or wanted.offloaded_precision is not None
    return None if decided or plain == wanted.precision else plain


def _explain_no_offloading(wanted: SearchRequest, name: str) -> str:
    """Return why an option prevents offloading of weights and states; '' if it does not."""
    precision = wanted.keep.get("precision", wanted.precision)
    optimizer = wanted.keep.get("optimizer", default_optimizer(precision))
    if name == "optimizer" and optimizer not in PLAIN_ADAMW:
        return (
            f", by offloading (the states of {optimizer} cannot be offloaded here, only those of "
            f"{join_or(PLAIN_ADAMW)})"
        )
    if name == "precision" and (
        PRECISION_TRAITS[precision].masters or optimizer not in PLAIN_ADAMW
    ):
        return f", by offloading (weights and states of {precision} cannot be offloaded here)"
    if name == "optimizer_in_backward" and wanted.keep[name]:
        return ", by offloading (which it rules out)"
    return ""


_SHORTEST = 128  # tokens of the shortest sequence that is proposed


def _longest_fitting_sequence(job: PlanningProblem) -> int | None:
    """Return the longest sequence length with which a plan fits, found by halving; None if none."""
    wanted = job.wanted
    if not job.outline.vocab or any(stack.seq_len for stack in job.outline.stacks):
        return None
    lengths = [wanted.seq_len >> n for n in range(1, wanted.seq_len.bit_length())]
    lengths = [length for length in lengths if length >= _SHORTEST]
    if not lengths or not _fits_with(job, seq_len=lengths[-1]):
        return None
    return next(length for length in lengths if _fits_with(job, seq_len=length))


def _fitting_adapter_options(job: PlanningProblem) -> str | None:
    """Return adapter options with which a plan fits; None if there are none or adapters are set."""
    wanted = job.wanted
    values = {"precision": wanted.precision, **wanted.keep}
    known = can_plan_adapters(job.outline, values) and not job.question.other_program
    if wanted.adapters is not None or not known:
        return None
    for words, values in (
        ("--lora-rank 16", {"lora_rank": 16}),
        ("--lora-rank 16 --base nf4", {"lora_rank": 16, "base": "nf4"}),
    ):
        if _fits_with(job, keep={**wanted.keep, **values}):
            return words
    return None


def _fits_with(job: PlanningProblem, **changes: Any) -> bool:
    other = replace(job, wanted=replace(job.wanted, **changes))
    return fits(other.wanted, other.checked_bytes, other.least_bytes, other.limit)


_MOST_DEVICES = 8  # per node
_COUNT = re.compile(r"^\d+-?[x×*]-?")  # count in "4xrtx-3090" and "4-x-rtx-3090"


def _fewest_devices(job: PlanningProblem) -> tuple[int, str] | None:
    """Double the devices of a node until a plan fits; return their number and the machine's name.

    Returns None if the machine has a fixed number of devices, several nodes or probed rates, or if
    8 devices do not suffice.
    """
    cluster = job.cluster
    if cluster.name in NODES or cluster.probed or cluster.nodes > 1:
        return None
    name = _COUNT.sub("", cluster.name)  # the name includes the memory: "rtx-3060:12gb"
    try:
        if find_node(name).accelerator != cluster.device.name:
            return None
    except BadInputError:
        return None
    count = 2 * cluster.fabric.per_node
    while count <= _MOST_DEVICES:
        fabric = replace(cluster.fabric, per_node=count)
        larger = replace(cluster, fabric=fabric)
        batch = math.ceil(job.wanted.global_batch / count) * count
        wanted = replace(job.wanted, world=count, per_node=count, global_batch=batch)
        other = replace(job, cluster=larger, wanted=wanted)
        if fits(wanted, other.checked_bytes, other.least_bytes, job.limit):
            return count, f"{count}x{name}"
        count *= 2
    return None


def _explain_too_few_positions(job: PlanningProblem) -> str:
    most = job.outline.max_positions
    if job.wanted.seq_len <= most:
        return ""
    return (
        f" Its sequences of {job.wanted.seq_len} tokens exceed the model's {most} positions, so "
        "the model must be changed first."
    )


_MOST_NODES = 4096


def _fewest_nodes(fits: Callable[[int], bool]) -> int | None:
    """Bisect for the smallest sufficient number of nodes; None if there is none up to _MOST_NODES.

    All numbers above a sufficient one are assumed to suffice, too.
    """
    enough = 1
    while not fits(enough):
        enough *= 2
        if enough > _MOST_NODES:
            return None
    less = enough // 2
    while enough - less > 1:
        middle = (less + enough) // 2
        if fits(middle):
            enough = middle
        else:
            less = middle
    return enough


def _fits_on_nodes(job: PlanningProblem, nodes: int) -> bool:
    """Return whether a plan fits on more nodes, with the global batch rounded up to fill them."""
    if nodes <= job.cluster.nodes:
        return False
    other = job.with_nodes(nodes)
    world = other.wanted.world
    batch = math.ceil(job.wanted.global_batch / world) * world
    wanted = replace(other.wanted, global_batch=batch)
    return fits(wanted, other.checked_bytes, other.least_bytes, job.limit)
