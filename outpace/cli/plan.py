"""`outpace plan`."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from outpace.cli.output import output_file, save_output, write_output
from outpace.cli.parser import JoinedList, Parser, byte_size, number_type
from outpace.records.errors import BadInputError
from outpace.records.precisions import Precision

if TYPE_CHECKING:
    from outpace.interop.export import ExportedPlan
    from outpace.jobs.planning.export_format import NamedModel
    from outpace.jobs.planning.request import PlanQuestion
    from outpace.planner.problem import PlanningProblem
    from outpace.records.estimate import Plans
    from outpace.records.plan import Plan

_ABOUT = (
    "Predict the fastest ways to train a model on given machines: which fit, why, and how "
    "certain that is."
)
_EPILOG = (
    "Considers every layout: data, sharded, tensor, context, expert and pipeline parallelism, "
    "micro-batches, recomputation and offloading. --machine is a name from the catalog, an "
    "accelerator or the machine.json of outpace probe. Derivations: docs/concepts/planner.md. "
    "Prediction errors: docs/results/accuracy.md."
)
_MOST_NODES = 100_000
_MOST_PLANS = 50
_SHOWN, _SHOWN_WITH_EXPORT = 5, 3  # plans
_LEAST_COMPARED = 2  # plans to ask for: the recommended and the fastest, if they differ
# A plan file says which parameters it trains.
ADAPTER_OPTIONS = dict.fromkeys(
    ("--lora-rank", "--lora-alpha", "--lora-targets", "--lora-dropout", "--base"),
    "Adapters are part of the plan file: write one with outpace plan --lora-rank 16 --out "
    "plan.json.",
)


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Plan and print the answer; returns 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    _check_options(arguments)
    from outpace.jobs.planning.request import job
    from outpace.planner.plan import plans

    asked = _read_request(arguments)
    model = None if arguments.emit is None else _check_export(arguments, asked)
    if arguments.compare_nodes:
        return _compare_node_counts(arguments, asked)
    if arguments.what_if is not None:
        return _print_what_if(arguments, asked)
    question = replace(job(asked), hints=True)
    answer = plans(question)
    answer = answer.model_copy(update={"defaults": _default_options(arguments, answer, question)})
    number = arguments.explain or 1
    if number > len(answer.plans):
        count = len(answer.plans)
        listed = "one plan is" if count == 1 else f"{count} plans are"
        places = "1" if count == 1 else f"1 to {count}"
        none = f"There are no others, so use --explain {places}"
        more = f"List more with --count {number}" if number > asked.count else none
        raise BadInputError(f"--explain {number}: only {listed} listed. {more}.")
    if arguments.out is not None and arguments.emit is None:
        _save_plan(answer.plans[number - 1].plan, question, arguments.out)
    if model is not None:
        chosen = None if arguments.explain is None else number
        return _export_plan(arguments, model, question, answer, chosen)
    if arguments.json:
        print(answer.model_dump_json(indent=2), flush=True)
        return 0
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.plan import explanation_text, plans_text

    text = plans_text(answer) if arguments.explain is None else explanation_text(answer, number)
    Console().print(text)
    return 0


def answer(argv: list[str]) -> "Plans":
    """Return the plans for the command line `argv`.

    Raises BadInputError if an argument is invalid.
    """
    arguments = _parser().read(argv)
    _check_options(arguments)
    from outpace.jobs.planning.request import job
    from outpace.planner.plan import plans

    return plans(replace(job(_read_request(arguments)), hints=True))


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise BadInputError for combinations of options of which one would be ignored."""
    other = [name for name in ("compare_nodes", "what_if") if getattr(arguments, name) is not None]
    alone = [name for name in ("explain", "emit", "out") if getattr(arguments, name) is not None]
    if other and len(other + alone) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in (other + alone)[:2])
        raise BadInputError(f"{first} and {second} give different answers. Use one of them.")
    if arguments.price is not None and arguments.tokens is None:
        raise BadInputError(
            "--price gives the cost of training on a number of tokens. Give that number with "
            "--tokens."
        )


def _read_request(arguments: argparse.Namespace) -> "PlanQuestion":
    from outpace.cli.export_formats import AUTOCAST
    from outpace.jobs.planning.export_format import FORMAT_OF
    from outpace.planner.model.adapters import ADAPTER_NAMES

    given = {name: getattr(arguments, name) for name in ADAPTER_NAMES}
    # --explain K refers to the list that is shown without --emit.
    written = arguments.emit if arguments.explain is None else None
    own = written in (None, "outpace") or FORMAT_OF.get(arguments.trainer) == written
    return plan_question(
        arguments,
        count=arguments.count or (_SHOWN if written is None else _SHOWN_WITH_EXPORT),
        trainer=arguments.trainer if own else written,
        adapters={name: str(value) for name, value in given.items() if value is not None},
        autocast=written in AUTOCAST,
        measures=True,
    )


def plan_question(arguments: argparse.Namespace, **more: Any) -> "PlanQuestion":
    """Build a PlanQuestion from a command's options; values in `more` replace or add to them."""
    from outpace.jobs.planning.request import PlanQuestion

    names = {one.name for one in fields(PlanQuestion)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return PlanQuestion(**{**given, **more})


def _default_options(
    arguments: argparse.Namespace, answer: "Plans", question: "PlanningProblem"
) -> dict[str, str]:
    from outpace.jobs.planning.given_settings import split_settings
    from outpace.records.settings import DEFAULT_SEQ_LEN

    used = {}
    if arguments.seq_len is None and answer.reads_tokens:
        used["--seq-len"] = f"{answer.seq_len} (outpace train and memory use {DEFAULT_SEQ_LEN})"
    if arguments.global_batch is None:
        used["--global-batch"] = str(answer.global_batch)
    kept = {name for _, name, _ in split_settings(arguments.keep)}
    if arguments.precision is None and "precision" not in kept:
        used["--precision"] = _format_precision(answer, question.wanted.precision)
    return used


def _format_precision(answer: "Plans", default: Precision) -> str:
    """Return the default precision, followed by any other that plans with offloading use."""
    used = list(dict.fromkeys(one.plan.precision for one in answer.plans))
    others = ", ".join(name for name in used if name != default)
    if not others:
        return default
    return f"{default} ({others} in plans that offload{'' if default in used else ', as here'})"


def _compare_node_counts(arguments: argparse.Namespace, question: "PlanQuestion") -> int:
    """Print the fastest plan for each number of nodes, with the same global batch; return 0."""
    from outpace.jobs.planning.request import job
    from outpace.planner.plan import throughput

    problem = job(replace(question, nodes=max(question.nodes, *arguments.compare_nodes)))
    each = problem.cluster.fabric.per_node
    rows = [(nodes, nodes * each, throughput(problem, nodes)) for nodes in arguments.compare_nodes]
    if arguments.json:
        document = [
            {"nodes": nodes, "devices": devices,
             "best": None if best is None else best.model_dump(mode="json")}
            for nodes, devices, best in rows
        ]  # fmt: skip
        request = {
            "model": problem.outline.name, "machine": problem.cluster.name,
            "seq_len": problem.wanted.seq_len, "global_batch": problem.wanted.global_batch,
        }  # fmt: skip
        print(json.dumps({**request, "scaling": document}, indent=2), flush=True)
        return 0
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.plan import scaling

    Console().print(scaling(rows, problem))
    return 0


def _print_what_if(arguments: argparse.Namespace, asked: "PlanQuestion") -> int:
    from outpace.jobs.planning.request import job, what_if, with_numbers

    asked = replace(asked, count=max(_LEAST_COMPARED, asked.count))
    other, numbers = what_if(asked, arguments.what_if)
    # The same batch, divisible by the larger number of devices, as with --compare-nodes.
    batch = max(job(one).wanted.global_batch for one in (asked, other))
    now, then = (job(replace(one, global_batch=batch)) for one in (asked, other))
    before, after = _try_to_plan(now), _try_to_plan(with_numbers(then, numbers))
    if isinstance(before, str) and isinstance(after, str):
        raise BadInputError(after if before == after else f"now: {before} Then: {after}")
    if arguments.json:
        document = {
            name: {"unfit": plans} if isinstance(plans, str) else plans.model_dump(mode="json")
            for name, plans in (("now", before), ("then", after))
        }
        print(json.dumps(document, indent=2), flush=True)
        return 0
    from outpace.reporting.terminal.console import Console
    from outpace.reporting.terminal.plan import change_text

    Console().print(change_text(before, after, arguments.what_if))
    return 0


def _try_to_plan(question: "PlanningProblem") -> "Plans | str":
    from outpace.planner.plan import plans

    try:
        return plans(question)
    except BadInputError as error:
        return str(error)


def _save_plan(plan: "Plan", question: "PlanningProblem", path: Path) -> None:
    from outpace.records.plan import PlanFile

    file = PlanFile.from_plan(plan, question.wanted.seq_len, question.wanted.global_batch)
    save_output(path, file)


def _check_export(arguments: argparse.Namespace, question: "PlanQuestion") -> "NamedModel":
    """Return the model whose plan is to be written for another trainer (--emit).

    Raises BadInputError if that trainer's format cannot express the model or the adapters, or if
    options contradict each other or the model.
    """
    from outpace.jobs.planning.export_format import NamedModel, check_exportable
    from outpace.jobs.planning.model_outline import find_outline
    from outpace.jobs.planning.request import kept_settings
    from outpace.planner.model.adapters import AdapterSettings

    emit, trainer = arguments.emit, arguments.trainer
    if trainer not in (None, emit) and question.trainer == emit:
        raise BadInputError(
            f"--trainer {trainer} and --emit {emit}: a configuration for {emit} is planned with "
            f"{emit}'s traits. Leave out --trainer, or export plan K of {trainer}'s list with "
            "--explain K."
        )
    _, outline, spec = find_outline(arguments.model)
    positions, seq_len = outline.max_positions, arguments.seq_len or 0
    if seq_len > positions:
        raise BadInputError(
            f"--emit {emit}: --seq-len {seq_len} is longer than the {positions} positions of "
            f"{arguments.model}, so no trainer accepts the unchanged model. Use at most "
            f"{positions}, or give the model more positions (max_position_embeddings in its "
            "config.json, with rotary scaling)."
        )
    model = NamedModel(arguments.model, outline if spec is None else spec)
    adapters = AdapterSettings.from_values(kept_settings(question))
    try:
        check_exportable(emit, model, adapters)
    except BadInputError as error:
        raise BadInputError(f"--emit {emit}: {error}") from None
    return model


def _export_plan(
    arguments: argparse.Namespace,
    model: "NamedModel",
    question: "PlanningProblem",
    answer: "Plans",
    chosen: int | None,
) -> int:
    """Write or print plan number `chosen` as a configuration for another trainer; return 0.

    If `chosen` is None, choose the recommended plan among those that the trainer's format can
    express.
    """
    from outpace.jobs.planning.export_format import figures, list_alternatives, pick_plan

    try:
        choice = pick_plan(arguments.emit, question, answer, model, chosen)
    except BadInputError as error:
        raise BadInputError(f"--emit {arguments.emit}: {error}") from None
    written = choice.emitted
    others = list_alternatives(answer) if chosen is None else []
    if arguments.out is not None:
        write_output(arguments.out, written.text)
        written = written.with_path(arguments.out)
    if arguments.json:
        document = {"file_name": written.file_name, "text": written.text,
                    "command": written.command, "unsaid": list(written.notes),
                    "edits": list(written.edits),
                    "plan": choice.number, "title": choice.planned.title,
                    "estimate": choice.estimate and choice.estimate.model_dump(mode="json"),
                    "why": choice.why, "others": others, "lost": list(written.differences),
                    "warning": choice.warning}  # fmt: skip
        print(json.dumps(document, indent=2), flush=True)
        return 0
    if arguments.out is None:
        print(written.text.rstrip())
        sys.stdout.flush()
    # Formats with comments contain these notes in the text above; a warning says what is lost.
    shown = written.notes if written.commented else written.differences
    notes = [one for one in written.notes if one not in (*shown, *written.edits)]
    edits = [f"To edit first: {one}" for one in written.edits]
    warning = [] if choice.warning is None else [f"WARNING: {choice.warning}"]
    estimate = [] if choice.estimate is None else [figures(choice.estimate, written)]
    lines = [_format_start_command(arguments.out, written), choice.why, *edits, *estimate, *others,
             *warning, *notes]  # fmt: skip
    print("\n".join(f"# {line}" for line in lines), file=sys.stderr)
    return 0


def _format_start_command(out: Path | None, written: "ExportedPlan") -> str:
    if out is not None:
        return f"Wrote {out}. Start it with: {written.command}"
    return (
        f"{written.file_name} is on standard output. Save it (--out), then run: {written.command}"
    )


def _parse_node_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > _MOST_NODES:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write numbers of nodes from 1 to {_MOST_NODES:,}, such as 1,2,4,8"
        )
    return counts


def add_question(parser: Parser, of: str = "") -> None:
    """Add the options that `outpace plan` and `outpace estimate` share.

    `of` is put before the model's defaults of sequence length and global batch in the help: "the
    plan's, else ".
    """
    add = parser.option
    whole = number_type(int, 1)
    add("--model", "MODEL", str,
        "preset, Hugging Face directory, spec file or file.py:build", required=True)  # fmt: skip
    add("--machine", "NAME", str,
        "name in the catalog (hgx-h100, rtx-4090), or machine.json of outpace probe (default: this "
        "machine)")  # fmt: skip
    add("--nodes", "N", number_type(int, 1, _MOST_NODES),
        "number of machines (default: 1)", default=1)  # fmt: skip
    add("--devices-per-node", "N", whole, "ranks per machine (default: the machine's)")
    add("--network", "WORDS", str,
        "network of a node: '8 x infiniband-ndr', 3200Gbit/s (default: the machine's)")  # fmt: skip
    add("--host-memory", "SIZE", byte_size,
        "host memory of a node, to which plans may offload: 512GiB, 2TiB (default: the "
        "machine's, if known)")  # fmt: skip
    add("--seq-len", "N", whole, f"tokens per sample (default: {of}the model's, at most 2048)")
    add("--global-batch", "N", whole, f"samples per step (default: {of}4 per device)")
    add("--precision", "NAME", str,
        "bf16, fp16, fp32, fp8, … (default: bf16-master on a GPU with bf16)",
        choices=get_args(Precision))  # fmt: skip


def _parser() -> Parser:
    from outpace.cli.export_formats import FORMATS, TRAINERS

    parser = Parser("plan", _ABOUT, _EPILOG, usage="--model MODEL [--machine NAME] [options]")
    parser.add_json()
    add_question(parser)
    add = parser.option
    whole = number_type(int, 1)
    add("--keep", "A=B,C=D", str,
        "settings that every plan must have (precision=bf16,…); the output says what each costs",
        action=JoinedList)  # fmt: skip
    add("--vary", "A,B", str,
        "further settings to search (precision, optimizer, compile, …), or all", action=JoinedList
    )  # fmt: skip
    add("--lora-rank", "N", whole, "freeze the weights and train adapters of this rank (LoRA)")
    add("--lora-alpha", "X", number_type(float, 0.0),
        "LoRA's alpha: adapters are scaled by alpha / rank (default: the rank)")  # fmt: skip
    add("--lora-targets", "NAMES", str,
        "matrices with an adapter: q,k,v,out,gate,up,down (default: all)")  # fmt: skip
    add("--lora-dropout", "X", number_type(float, 0.0, 1.0),
        "dropout probability of adapters' inputs (default: 0)")  # fmt: skip
    add("--base", "NAME", str,
        "format of the frozen weights; nf4: the blocks' matrices in 4 bits (QLoRA)")  # fmt: skip
    add("--max-tp", "N", whole, "largest tensor-parallel degree")
    add("--trainer", "NAME", str,
        "trainer for which time and memory are predicted: "
        f"{', '.join(TRAINERS)} (default: outpace)", choices=TRAINERS)  # fmt: skip
    parser.switch("--trained", "list only plans that outpace can train")
    parser.switch("--may-idle",
        "allow plans that leave nodes idle, if fewer are faster or divide the batch")  # fmt: skip
    add("--tokens", "N", number_type(int, 1), "tokens to train on, to show the time: 1T, 300B")
    add("--price", "X", number_type(float, 0.0),
        "price per device-hour, to show the cost of --tokens")  # fmt: skip
    add("--count", "N", number_type(int, 1, _MOST_PLANS),
        "number of plans to show (default: 5; 3 with --emit)")  # fmt: skip
    add("--explain", "K", whole, "explain the K-th plan step by step")
    add("--compare-nodes", "1,2,4", _parse_node_counts,
        "compare throughput and efficiency by number of nodes")  # fmt: skip
    add("--what-if", "link=400Gbps", str,
        "show the effect of a change of link= (a node's network), inside= (a device's link in its "
        "node), memory= (a device's) or nodes=")  # fmt: skip
    add("--emit", "FORMAT", str,
        f"write a configuration for {', '.join(FORMATS)}, of the recommended plan among those that "
        "the format can express, or of the plan of --explain", choices=FORMATS
    )  # fmt: skip
    add("--out", "FILE", output_file,
        "write the recommended plan, or the plan of --explain, to this file; with --emit, the "
        "configuration")  # fmt: skip
    return parser
