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
    """Return the settings, including those of --plan, their origins, and the machine."""
    settings, origins = options.build({options.COMMAND_LINE: options.from_flags(arguments)})
    _require_one_place(arguments, settings)
    node = None
    if arguments.machine is not None:
        from outpace.catalog.node_names import find_node

        node = find_node(arguments.machine)
    if settings.plan is None:
        return settings, origins, node
    from outpace.jobs.planning.plan_file_settings import follow_plan

    return *follow_plan(settings, origins, node, arguments.nodes or 1), node


def _require_one_place(arguments: argparse.Namespace, settings: TrainSettings) -> None:
    """Refuse options for this host together with a machine of the catalog."""
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
    asked: "MemoryQuery | ModuleQuestion",
    ranks: Ranks,
    rank: int | None,
    environ: Mapping[str, str],
) -> MemoryAccount | None:
    """Run two real steps. Rank 0 returns the memory of `rank`, or of the fullest rank."""
    import torch

    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.parallel.rank_objects import gather_objects
    from outpace.trace.measure import measure

    with process_groups(ranks, torch.device("cpu"), 300.0) as groups:
        found = gather_objects(measure(asked.workload, ranks), groups.control)
    if ranks.rank != 0:
        return None
    return found[rank] if rank is not None else max(found, key=lambda one: one.allocated_bytes or 0)


def _show(
    asked: "AnyQuery",
    traced: MemoryAccount,
    measured: MemoryAccount | None,
    arguments: argparse.Namespace,
    origins: Mapping[str, str],
) -> None:
    from outpace.reporting.answers.defaults import default_words
    from outpace.reporting.terminal.memory import document, memory_table, step_in_words

    plot, out = arguments.plot, arguments.out_file

    command = _plan_command(asked, arguments, origins)
    alone = idle_strategy_note(asked.settings.strategy, asked.plan.world_size)
    if alone is not None:
        more = "--nproc N" if arguments.machine is None else "--nodes N, or another --machine"
        alone = f"{alone}: these are the figures of one process. Use several with {more}."
    said = document(
        traced,
        measured,
        plan=asked.plan,
        model=asked.settings.model,
        seq_len=asked.seq_len,
        global_batch=asked.global_batch,
        accelerator=asked.accelerator,
        next_command=command,
        hints=[] if alone is None else [alone],
    )
    text = json.dumps(said, indent=2)
    if out is not None:
        write_output(out, text + "\n")
    step = step_in_words(asked.plan, asked.global_batch, asked.seq_len)
    if plot is not None:
        from outpace.reporting.chart_file import write_document
        from outpace.reporting.documents.memory import memory_document

        limit = said["device_memory_bytes"]
        drawn = memory_document(measured or traced, limit, str(asked.settings.model), step)
        write_document(drawn, plot)
    if arguments.json:
        print(text, flush=True)
        return
    from outpace.reporting.terminal.console import Console

    defaults = default_words(_default_options(asked, origins))
    about = step + defaults + ("" if alone is None else f" {alone}")
    Console().print(memory_table(asked.plan, traced, measured, asked.accelerator, about, command))
    if plot is not None:
        Console().print(f"plot: {plot}", markup=False, highlight=False)


def _default_options(asked: "AnyQuery", origins: Mapping[str, str]) -> dict[str, str]:
    """Return the options that affect memory and were not given, with the values used."""
    from outpace.jobs.planning.request import PLANNED_SEQ_LEN

    taken = {
        "seq_len": None
        if asked.seq_len is None
        else f"{asked.seq_len} (outpace plan uses at most {PLANNED_SEQ_LEN})",
        "global_batch": str(asked.global_batch),
        "micro_batch": str(asked.plan.micro_batch),
        "precision": asked.plan.precision,
        "checkpointing": asked.plan.checkpointing,
    }
    return {
        f"--{name.replace('_', '-')}": value
        for name, value in taken.items()
        if value is not None and origins.get(name) == options.DEFAULT
    }


def _plan_command(
    asked: "AnyQuery", arguments: argparse.Namespace, origins: Mapping[str, str]
) -> str | None:
    """Return the command that lists plans for the same machines; None for this host's CPU.

    It repeats the precision and the optimizer if the user chose them.
    """
    from outpace.jobs.memory.formula import FormulaQuestion

    if arguments.machine is None:
        return None
    plan = asked.plan
    words = ["outpace", "plan", "--model", asked.settings.model, "--machine", arguments.machine]
    if arguments.nodes is not None:
        words += ["--nodes", str(arguments.nodes)]
    if asked.seq_len is not None:
        words += ["--seq-len", str(asked.seq_len)]
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
    if not isinstance(asked, FormulaQuestion):  # plan refuses --trained for these
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
