"""Planning problems from a user's question: model, machine, batch and fixed settings."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outpace.catalog.accelerators import find_accelerator
from outpace.catalog.links import LINKS
from outpace.catalog.node_names import find_node
from outpace.catalog.nodes import NODES
from outpace.jobs.machine_file import PROBE_FILE, find_probe, has_probe_file
from outpace.jobs.planning.export_format import assign_trainer, restrict_search
from outpace.jobs.planning.given_settings import parse_value, read_keep
from outpace.jobs.planning.model_outline import find_outline
from outpace.planner.calibration.cluster import (
    Cluster,
    network_share,
    of_catalog,
    of_host,
    of_probe,
)
from outpace.planner.calibration.observed_runs import correct_cluster
from outpace.planner.explain.hints import FP8_PARAMETERS
from outpace.planner.hardware.device import check_dtype, dtype_of
from outpace.planner.hardware.networks import read_network
from outpace.planner.model.adapters import (
    ADAPTER_NAMES,
    ADAPTER_STRATEGIES,
    AdapterSettings,
    is_known,
    require_adaptable,
)
from outpace.planner.model.outline import parameters
from outpace.planner.problem import PlanningProblem
from outpace.planner.search.search_request import VARIED, SearchRequest
from outpace.probing.hardware.host_rates import measure_host_rates
from outpace.probing.hardware.machine import identify
from outpace.records.errors import BadInputError, suggest
from outpace.records.hardware import Node
from outpace.records.machine import Machine
from outpace.records.optimizers import LOW
from outpace.records.outline import Outline
from outpace.records.plan import Plan
from outpace.records.precisions import PURE, WHERE_OFFLOADED, Precision
from outpace.records.training_log import CorrectedMachine, is_corrected
from outpace.records.units import read_bytes, write_bytes

PLANNED_SEQ_LEN = 2048
CALIBRATED_HINT = (
    f"{PROBE_FILE} in this directory was written by outpace calibrate for another machine, so it "
    f"is ignored. To plan for that machine, use --machine {PROBE_FILE}."
)
IGNORED_PROBE_HINT = (
    f"{PROBE_FILE} in this directory is ignored, since it describes another machine or has no "
    "matmuls. To measure this one, run outpace probe --out machine.json."
)
_WHAT_IF = ("link", "inside", "memory", "nodes")


@dataclass(frozen=True)
class PlanQuestion:
    """The user's question to the planner.

    `machine`: a name in the catalog or a file of outpace probe; None: this machine. `host_memory`:
    bytes of memory per host; None: the machine's. `adapters`: adapter settings from options such as
    --lora-rank. `trained`: ask only for plans that outpace can train. `autocast`: whether the
    trainer computes in 16 bits only under autocast. `trainer`: the training software; None:
    outpace. `measures`: whether to measure this machine's rates first, which takes about two
    seconds, if it has no accelerator and was not probed.
    """

    model: str
    machine: str | None
    nodes: int = 1
    devices_per_node: int | None = None
    network: str | None = None
    host_memory: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    precision: Precision | None = None
    keep: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    vary: str | None = None
    max_tp: int | None = None
    tokens: int | None = None
    price: float | None = None
    count: int = 5
    trained: bool = False
    may_idle: bool = False
    autocast: bool = False
    trainer: str | None = None
    measures: bool = False


def job(asked: PlanQuestion) -> PlanningProblem:
    """Build the planning problem that poses the user's question.

    Raises BadInputError for unknown or impossible values.
    """
    _, outline, spec = find_outline(asked.model)
    cluster = _set_host_memory(_resolve_cluster(asked), asked.host_memory)
    world = cluster.devices
    seq_len = asked.seq_len or min(outline.max_positions, PLANNED_SEQ_LEN)
    if outline.learned_positions and seq_len > outline.max_positions:
        raise BadInputError(
            f"--seq-len {seq_len}: {outline.name} has {outline.max_positions} positions. Use at "
            f"most {outline.max_positions}."
        )
    outline = _note_long_sequences(outline, seq_len, asked.trained)
    keep = kept_settings(asked)
    precision = asked.precision or _default_precision(cluster, asked.autocast)
    check_adapters({"precision": precision, **keep}, outline, asked.trainer)
    check_dtype(keep.get("precision", precision), cluster.device)
    question = PlanningProblem(
        outline=outline,
        cluster=cluster,
        wanted=SearchRequest(
            outline=outline,
            seq_len=seq_len,
            global_batch=asked.global_batch or 4 * world,
            world=world,
            per_node=cluster.fabric.per_node,
            precision=precision,
            offloaded_precision=None if asked.precision else WHERE_OFFLOADED.get(precision),
            most_tp=asked.max_tp,
            keep=keep,
            vary=_resolve_vary(asked, keep, cluster, outline),
            trained=asked.trained,
            on_host=cluster.device.kind == "cpu",
        ),
        tokens=asked.tokens,
        price=asked.price,
        count=asked.count,
        idle=asked.may_idle,
    )
    if asked.trainer is None:
        return question
    question = assign_trainer(asked.trainer, question)
    return restrict_search(asked.trainer, question, asked.model, spec)


def _note_long_sequences(outline: Outline, seq_len: int, trained: bool) -> Outline:
    """Return the outline, with a note if sequences are longer than the model's positions.

    Rotary positions have no parameters, so time and memory can be planned anyway. With `trained`,
    which requests only trainable plans, raises BadInputError instead.
    """
    most = outline.max_positions
    if seq_len <= most:
        return outline
    note = (
        f"Sequences of {seq_len} tokens are longer than the {most} positions of {outline.name}, so "
        "`outpace train` refuses the model as it is. To train on them, give it more positions "
        "(max_position_embeddings in its config.json, with rotary scaling); time and memory are as "
        "planned."
    )
    if trained:
        raise BadInputError(f"--seq-len {seq_len}: {note[0].lower()}{note[1:]}")
    return outline.model_copy(update={"notes": (*outline.notes, note)})


def _resolve_vary(
    question: PlanQuestion, keep: Mapping[str, Any], cluster: Cluster, outline: Outline
) -> dict[str, tuple[Any, ...]]:
    found = {**default_vary(cluster, keep), **_read_vary(question, keep, cluster)}
    small = parameters(outline) < FP8_PARAMETERS
    if "precision" in found and (small or "lora_rank" in keep):
        found["precision"] = tuple(one for one in found["precision"] if one != "fp8")
    return {name: found[name] for name in VARIED if name in found}


def default_vary(cluster: Cluster, keep: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the settings to vary by default: `compile`, on a GPU that supports it, if not kept."""
    device = cluster.device
    asks = device.kind == "cuda" and device.compiles and "compile" not in keep
    return {"compile": VARIED["compile"]} if asks else {}


def _cluster_of_this_machine(question: PlanQuestion) -> Cluster:
    """Return this machine as measured by outpace probe if its file is here, else as detected."""
    machine = identify(find_accelerator)
    notes: tuple[str, ...] = ()
    if is_corrected(PROBE_FILE):
        notes = (CALIBRATED_HINT,)
    elif find_probe(machine) is not None:
        return _resolve_cluster(replace(question, machine=str(PROBE_FILE)))
    elif has_probe_file():
        notes = (IGNORED_PROBE_HINT,)
    if question.network is not None:
        raise BadInputError(
            f"--network {question.network} needs a machine. Choose one with --machine."
        )
    ranks = question.devices_per_node or len(machine.devices) or 1
    measures = question.measures and not machine.devices
    rates = measure_host_rates(machine.host_cores) if measures else None
    cluster = of_host(machine, ranks, rates)
    notes = (f"planned for this machine, with {ranks} process{'es' * (ranks > 1)}; use "
             "--machine for another machine, --devices-per-node for another number of "
             "processes.", *notes)  # fmt: skip
    return replace(cluster, nodes=question.nodes, notes=(*notes, *cluster.notes))


def _resolve_cluster(question: PlanQuestion) -> Cluster:
    if question.machine is None:
        return _cluster_of_this_machine(question)
    path = Path(question.machine).expanduser()
    if is_corrected(path):
        return _corrected_cluster(question, path)
    if path.suffix == ".json" or path.is_file():
        machine = Machine.load(path, option="--machine ")
        if question.network is not None:
            raise BadInputError(
                f"--network {question.network}: {path} has measured links. Leave one of them out."
            )
        return _probed_cluster(machine, question.nodes, question.devices_per_node)
    node = find_node(question.machine)
    if question.devices_per_node is not None and question.devices_per_node > node.processes:
        raise BadInputError(
            f"--devices-per-node {question.devices_per_node}: {node.name} has {node.processes}. "
            f"{_advise_larger_node(node, question.devices_per_node)}"
        )
    network = None if question.network is None else read_network(question.network)
    return of_catalog(node, question.nodes, network, question.devices_per_node)


def _advise_larger_node(node: Node, devices: int) -> str:
    try:
        name = find_node(f"{devices}x{node.accelerator}").name
    except BadInputError:
        return f"Use at most {node.processes}, and more --nodes."
    return f"For nodes with {devices}, write --machine {name}."


def _set_host_memory(cluster: Cluster, nbytes: int | None) -> Cluster:
    if nbytes is None:
        return cluster
    if cluster.device.kind == "cpu":
        raise BadInputError(
            f"--host-memory {write_bytes(nbytes)}: {cluster.name} trains on its CPUs, so host "
            "memory is device memory and nothing is offloaded to it. Leave out --host-memory."
        )
    return replace(cluster, host_bytes=nbytes)


def check_network(asked: PlanQuestion, file: CorrectedMachine, path: Path) -> None:
    """Raise BadInputError if --network is not the network of the runs that corrected `file`.

    `path`: where the file is, for the message.
    """
    if asked.network is None or asked.network == file.network:
        return
    if file.network is not None:
        used, named = read_network(file.network), read_network(asked.network)
        if named.bytes_per_s == used.bytes_per_s:
            return
    raise BadInputError(
        f"--network {asked.network}: the runs that corrected {path} used "
        f"{file.network or 'the default network of the machine'}. Leave out "
        "--network."
    )


def _corrected_cluster(question: PlanQuestion, path: Path) -> Cluster:
    file = CorrectedMachine.load(path, option="--machine ")
    check_network(question, file, path)
    devices = question.devices_per_node or file.devices_per_node
    if file.machine is not None:
        base = _probed_cluster(file.machine, question.nodes, devices)
    else:
        known = replace(question, machine=file.node, network=file.network, devices_per_node=devices)
        base = _resolve_cluster(known)
    return correct_cluster(base, file.runs)


def _probed_cluster(machine: Machine, nodes: int, devices: int | None) -> Cluster:
    hosts = machine.probed.hosts if machine.probed is not None else 1
    ranks = devices or len(machine.devices)
    if not ranks:
        ranks = (machine.probed and machine.probed.ranks_per_host) or 1
    return replace(of_probe(machine, ranks), nodes=max(nodes, hosts))


def _default_precision(cluster: Cluster, autocast: bool) -> Precision:
    """Return the default precision: bf16 if supported and, on a CPU, measured to be faster.

    On a GPU, weights and residual stream are in bf16 too, with master weights, unless `autocast`.
    outpace itself never chooses fp16 by default (`training.precision.default_precision`).
    """
    rates = cluster.device.best_flops_per_s
    if cluster.device.kind == "cpu":
        return "bf16" if rates.get("bf16", 0) > rates.get("fp32", 0) else "fp32"
    if autocast:
        return "bf16" if "bf16" in rates else "fp16" if "fp16" in rates else "fp32"
    return "bf16-master" if "bf16" in rates else "fp32"


def kept_settings(asked: PlanQuestion) -> dict[str, Any]:
    """Return the settings that --keep and the adapters' options fix.

    Raises BadInputError if one is invalid or given twice.
    """
    keep = read_keep(asked.keep)
    found = dict(keep)
    for name, text in asked.adapters.items():
        typed = f"--{name.replace('_', '-')} {text}"
        if name in keep:
            raise BadInputError(f"{typed} and --keep {asked.keep} both set {name}. Set it once.")
        found[name] = parse_value(name, "+".join(re.split(r"[\s,+]+", text.strip())), typed)
    return found


def check_adapters(values: Mapping[str, Any], outline: Outline, trainer: str | None = None) -> None:
    """Raise BadInputError for adapter settings that the model or other settings do not allow."""
    adapters = AdapterSettings.from_values(values)
    if adapters is None:
        for name in ADAPTER_NAMES:
            value = values.get(name)
            if value is not None and value != Plan.model_fields[name].default:
                raise BadInputError(
                    f"{name} {value} has no effect without LoRA. Set lora_rank, or leave out "
                    f"{name}."
                )
        return
    require_adaptable(outline)
    adapters.matrices(outline)
    unknown = (name for name, value in values.items() if not is_known(name, value))
    what = next((f"{name} {values[name]}" for name in unknown), None)
    if trainer not in (None, "outpace"):
        what = f"--trainer {trainer}"
    if what is not None:
        raise BadInputError(
            f"lora_rank {adapters.rank} with {what}: the planner supports adapters only in "
            f"outpace's training, with strategy {', '.join(ADAPTER_STRATEGIES)} and without "
            "offloading. Leave out one of the two, or estimate the plan's memory with `outpace "
            "memory`."
        )


def _read_vary(
    question: PlanQuestion, keep: Mapping[str, Any], cluster: Cluster
) -> dict[str, tuple[Any, ...]]:
    """Parse --vary, such as "precision,compile", into values to try.

    "all" means every setting that is not fixed. Precisions are those that the device supports, the
    default first; optimizers are those that support the precision. Raises BadInputError for a
    setting that is unknown, or also fixed.
    """
    text, asked = question.vary, question.precision
    names = [part.strip().replace("-", "_") for part in (text or "").split(",") if part.strip()]
    if names == ["all"]:
        decided = {*keep, *(["precision"] if asked else [])}
        names = [name for name in VARIED if name not in decided]
    if asked and "precision" in names:
        raise BadInputError(
            f"--precision {asked} and --vary {text}: use one precision or search all. Leave out "
            "one of the two."
        )
    precision = asked or _default_precision(cluster, question.autocast)
    for name in names:
        if name not in VARIED:
            raise BadInputError(
                f"--vary {name}: not a setting that can be varied.{suggest(name, [*VARIED])} Give "
                f"'all', or a comma-separated list of: {', '.join(VARIED)}."
            )
        if name in keep:
            raise BadInputError(
                f"--vary {name} and --keep {name}={keep[name]}: use one value or search all. "
                "Leave out one of the two."
            )
    found = {name: VARIED[name] for name in VARIED if name in names}
    if "precision" in found:
        rates = cluster.device.best_flops_per_s
        others = (one for one in found["precision"] if dtype_of(one) in rates and one != precision)
        found["precision"] = (precision, *others)
    if "optimizer" in found and keep.get("precision", precision) in PURE:
        found["optimizer"] = LOW
    return found


def what_if(asked: PlanQuestion, text: str) -> tuple[PlanQuestion, Mapping[str, float]]:
    """Parse --what-if; return the question with changed nodes, and the other changed numbers.

    Pass these numbers, bytes or bytes per second, to `with_numbers`. Raises BadInputError if a part
    of `text` is invalid.
    """
    changed, numbers = asked, {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in _WHAT_IF:
            raise BadInputError(
                f"--what-if {part.strip()}: write link=400Gbps (a node's network), "
                "inside=300GB/s (a device's link in its node), memory=141GiB or nodes=8."
                f"{suggest(name, _WHAT_IF)}"
            )
        if name == "nodes":
            if not value.isdigit() or int(value) < 1:
                raise BadInputError(f"--what-if nodes={value}: use a number of at least 1.")
            changed = replace(changed, nodes=int(value))
        elif name == "memory":
            try:
                numbers["memory"] = float(read_bytes(value))
            except ValueError as error:
                raise BadInputError(f"--what-if memory={value}: {error}.") from None
        else:
            network = read_network(value, f"--what-if {name}=")
            share = network_share(network) if name == "link" else 1.0
            numbers[name] = network.bytes_per_s * share
    return changed, numbers


def _device_link_efficiency(cluster: Cluster) -> float:
    """Return the achieved rate of a node's device links, as a fraction of their nominal rate.

    Device links connect the devices of one node. Returns 1 if the nominal rate is unknown.
    """
    node = NODES.get(cluster.name)
    if node is None or node.device_link is None:
        return 1.0
    printed = LINKS[node.device_link.link].bytes_per_s * node.device_link.count
    return cluster.fabric.inside_bytes_per_s / printed


def with_numbers(question: PlanningProblem, numbers: Mapping[str, float]) -> PlanningProblem:
    """Set the rates and sizes that `what_if` returned in the problem's cluster."""
    cluster = question.cluster
    fabric, device = cluster.fabric, cluster.device
    inside, across = fabric.inside_bytes_per_s, numbers.get("link", fabric.across_bytes_per_s)
    if "inside" in numbers:
        inside = numbers["inside"] * _device_link_efficiency(cluster)
    fabric = fabric.with_rates(inside, across)
    if "memory" in numbers:
        # `memory` is the vendor's figure. Assume that the driver leaves the same fraction usable.
        said, now, nominal = int(numbers["memory"]), device.memory_bytes, device.nominal_bytes
        left = now / nominal if now and nominal else 1.0
        device = replace(device, memory_bytes=round(said * left), nominal_bytes=said)
    return replace(question, cluster=replace(cluster, fabric=fabric, device=device))
