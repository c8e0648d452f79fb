"""`outpace memory`."""

import argparse
import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from outpace.cli import options
from outpace.cli.output import output_file, write_output
from outpace.cli.parser import Parser, number_type
from outpace.launch.launcher_env import ranks_from
from outpace.records.errors import BadInputError
from outpace.records.hardware import Node
from outpace.records.interpreter import PYTHON
from outpace.records.memory import MemoryAccount
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.records.strategies import idle_strategy_note

if TYPE_CHECKING:
    from outpace.jobs.memory.query import AnyQuery, MemoryQuery, ModuleQuestion

_ABOUT = "Show what uses memory in a training step and whether it fits, traced without a GPU."
_EPILOG = (
    "Takes every option of outpace train that affects memory. --measure runs two real steps on "
    "this host's CPU and shows them next to the trace."
)


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Trace a plan's memory and print it by kind; return 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    if arguments.plot is not None:
        from outpace.reporting.chart_file import check_chart_path

        check_chart_path(arguments.plot)
    ranks = ranks_from(environ)
    settings, origins, node = _read_options(arguments)
    if arguments.measure and ranks is None and (settings.nproc or 1) > 1:
        from outpace.launch import local

        local.start(settings.nproc or 1, [*PYTHON, "-m", "outpace", "memory", *argv])
        return 0
    from outpace.jobs.memory.formula import FormulaQuestion
    from outpace.jobs.memory.query import account, question, require_rank
    from outpace.jobs.planning.model_outline import find_outline

    asked = question(settings, origins, node, arguments.nodes or 1, find_outline)
    rank = arguments.rank
    require_rank(asked, rank)
    measured = None
    if arguments.measure:
        if isinstance(asked, FormulaQuestion):
            raise BadInputError(
                "--measure runs real steps, but outpace cannot train this model: "
                f"{asked.outline.untrained}. Leave out --measure."
            )
        measured = _measure(asked, ranks or Ranks(), rank, environ)
        if measured is None:  # another rank prints the result
            return 0
        rank = measured.rank
    traced = account(asked, rank)
    _show(asked, traced, measured, arguments, origins)
    return 0


def answer(argv: list[str]) -> MemoryAccount:
    """Return the traced memory of the command line `argv`.

    Raises BadInputError if an argument is invalid.
    """
    from outpace.jobs.memory.query import account, question
    from outpace.jobs.planning.model_outline import find_outline

    arguments = _parser().read(argv)
    settings, origins, node = _read_options(arguments)
    return account(
        question(settings, origins, node, arguments.nodes or 1, find_outline), arguments.rank
    )


def _read_options(
    arguments: argparse.Namespace,
) -> tuple[TrainSettings, dict[str, str], Node | None]:
    settings, origins = options.build({options.COMMAND_LINE: options.from_flags(arguments)})
    _refuse_mixed_places(arguments, settings)
    node = None
    if arguments.machine is not None:
        from outpace.catalog.node_names import find_node

        node = find_node(arguments.machine)
    if settings.plan is None:
        return settings, origins, node
    from outpace.jobs.planning.plan_file_settings import follow_plan

    return *follow_plan(settings, origins, node, arguments.nodes or 1), node


def _refuse_mixed_places(arguments: argparse.Namespace, settings: TrainSettings) -> None:
    """Raise BadInputError if options for this host are combined with a machine of the catalog."""
    if arguments.measure and settings.device not in ("auto", "cpu"):
        raise BadInputError(
            f"--measure runs two steps on this host's CPU, but --device is {settings.device}. "
            "Leave out --device, or, to measure on a GPU, use outpace train --memory."
        )
    if arguments.machine is None:
        if arguments.nodes is not None:
            raise BadInputError(
                f"--nodes {arguments.nodes} needs a machine. Name it with --machine, such as "
                "--machine hgx-h100, or give a number of processes with --nproc."
            )
        return
    if arguments.measure:
        raise BadInputError(
            f"--measure runs on this host, but --machine is {arguments.machine}. Give only "
            "one of them."
        )
    if settings.nproc is not None:
        raise BadInputError(
            f"--nproc {settings.nproc} cannot be combined with --machine {arguments.machine}: all "
            "devices of the machine are used. Set the number of machines with --nodes instead, or "
            "leave out --machine."
        )


def _measure(
    question: "MemoryQuery | ModuleQuestion",
    ranks: Ranks,
    rank: int | None,
    environ: Mapping[str, str],
) -> MemoryAccount | None:
    """Run two training steps on CPUs, and return the measured memory of `rank`.

    If `rank` is None, return that of the rank that needs the most. This is a collective: every rank
    calls it, and all but rank 0 get None.
    """
    import torch

    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.parallel.rank_objects import gather_objects
    from outpace.trace.measure import measure

    with process_groups(ranks, torch.device("cpu"), 300.0) as groups:
        accounts = gather_objects(measure(question.workload, ranks), groups.control)
    if ranks.rank != 0:
        return None
    return (
        accounts[rank]
        if rank is not None
        else max(accounts, key=lambda one: one.allocated_bytes or 0)
    )


def _show(
    question: "AnyQuery",
    traced: MemoryAccount,
    measured: MemoryAccount | None,
    arguments: argparse.Namespace,
    origins: Mapping[str, str],
) -> None:
    from outpace.reporting.answers.defaults import default_words
    from outpace.reporting.terminal.memory import document, memory_table, step_in_words

    plot, out = arguments.plot, arguments.out_file

    command = _plan_command(question, arguments, origins)
    note = idle_strategy_note(question.settings.strategy, question.plan.world_size)
    if note is not None:
        more = "--nproc N" if arguments.machine is None else "--nodes N, or another --machine"
        note = f"{note}: these are the figures of one process. Use several with {more}."
    document_json = document(
        traced,
        measured,
        plan=question.plan,
        model=question.settings.model,
        seq_len=question.seq_len,
        global_batch=question.global_batch,
        accelerator=question.accelerator,
        next_command=command,
        hints=[] if note is None else [note],
    )
    text = json.dumps(document_json, indent=2)
    if out is not None:
        write_output(out, text + "\n")
    step = step_in_words(question.plan, question.global_batch, question.seq_len)
    if plot is not None:
        from outpace.reporting.chart_file import write_document
        from outpace.reporting.documents.memory import memory_document

        limit = document_json["device_memory_bytes"]
        drawn = memory_document(measured or traced, limit, str(question.settings.model), step)
        write_document(drawn, plot)
    if arguments.json:
        print(text, flush=True)
        return
    from outpace.reporting.terminal.console import Console

    defaults = default_words(_default_options(question, origins))
    about = step + defaults + ("" if note is None else f" {note}")
    Console().print(
        memory_table(question.plan, traced, measured, question.accelerator, about, command)
    )
    if plot is not None:
        Console().print(f"plot: {plot}", markup=False, highlight=False)


def _default_options(question: "AnyQuery", origins: Mapping[str, str]) -> dict[str, str]:
    from outpace.jobs.planning.request import PLANNED_SEQ_LEN

    used = {
        "seq_len": None
        if question.seq_len is None
        else f"{question.seq_len} (outpace plan uses at most {PLANNED_SEQ_LEN})",
        "global_batch": str(question.global_batch),
        "micro_batch": str(question.plan.micro_batch),
        "precision": question.plan.precision,
        "checkpointing": question.plan.checkpointing,
    }
    return {
        f"--{name.replace('_', '-')}": value
        for name, value in used.items()
        if value is not None and origins.get(name) == options.DEFAULT
    }


def _plan_command(
    question: "AnyQuery", arguments: argparse.Namespace, origins: Mapping[str, str]
) -> str | None:
    """Return the `outpace plan` command for the same model and machines; None for this host's CPU.

    The command includes the precision, optimizer and adapters that the user chose.
    """
    from outpace.jobs.memory.formula import FormulaQuestion

    if arguments.machine is None:
        return None
    plan = question.plan
    words = ["outpace", "plan", "--model", question.settings.model, "--machine", arguments.machine]
    if arguments.nodes is not None:
        words += ["--nodes", str(arguments.nodes)]
    if question.seq_len is not None:
        words += ["--seq-len", str(question.seq_len)]
    chosen = {
        name: value
        for name, value in (
            ("precision", plan.precision),
            ("optimizer", plan.optimizer),
            ("optimizer_in_backward", str(plan.optimizer_in_backward).lower()),
        )
        if origins.get(name, options.DEFAULT) != options.DEFAULT
    }
    if "precision" in chosen:
        words += ["--precision", chosen.pop("precision")]
    if chosen:
        words += ["--keep", ",".join(f"{name}={value}" for name, value in chosen.items())]
    if plan.lora_rank is not None:
        words += ["--lora-rank", str(plan.lora_rank), "--base", plan.base]
        words += ["--lora-targets", ",".join(plan.lora_targets)]
    if not isinstance(question, FormulaQuestion):  # plan refuses --trained for these
        words.append("--trained")
    return shlex.join(words)


def _parser() -> Parser:
    parser = Parser("memory", _ABOUT, _EPILOG, usage="[options]")
    parser.add_json()
    add = parser.option
    add("--machine", "NAME", str,
        "machine of the catalog: hgx-h100, 'RTX 4090', … (default: processes on CPUs, see --nproc)"
    )  # fmt: skip
    add("--nodes", "N", number_type(int, 1), "number of these machines (default: 1)")
    add("--rank", "N", number_type(int, 0),
        "rank whose memory to show (default: the rank that needs the most)")  # fmt: skip
    parser.switch("--measure", "also run two real steps on this host's CPU, with --nproc processes")
    add("--plot", "FILE", output_file,
        "draw memory over a step, as a page (.html) or a picture (.png, .svg, .pdf)")  # fmt: skip
    add("--save", "FILE.json", output_file,
        "save the output of --json, with every moment of the step", dest="out_file")  # fmt: skip
    options.add_settings(parser)
    return parser
