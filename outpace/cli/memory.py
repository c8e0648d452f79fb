"""`outpace memory`."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli import options
from outpace.cli.output import output_file, write_output
from outpace.cli.parser import Parser, number_type
from outpace.launch.environment import ranks_from, restart_count
from outpace.records.errors import BadInputError
from outpace.records.memory import MemoryAccount
from outpace.records.python import PYTHON
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings

if TYPE_CHECKING:
    from outpace.launch.memory import ModuleQuestion, Question

_ABOUT = "Where memory goes in a training step, and whether it fits: traced, without a GPU."
_EPILOG = (
    "All options of outpace train that decide on memory are taken. --measure runs two real steps "
    "on this host's CPU and shows them beside the trace."
)


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Trace a plan's memory and print its anatomy; returns 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    settings, origins = options.build({options.COMMAND_LINE: options.from_flags(arguments)})
    ranks = ranks_from(environ)
    _require_one_place(arguments, settings)
    if arguments.measure and ranks is None and (settings.nproc or 1) > 1:
        from outpace.launch import local

        local.start(settings.nproc or 1, [*PYTHON, "-m", "outpace", "memory", *argv])
        return 0
    from outpace.launch.memory import question, worst

    node = None
    if arguments.machine is not None:
        from outpace.catalog.accelerators import ACCELERATORS
        from outpace.catalog.nodes import find_node

        node = find_node(arguments.machine, ACCELERATORS)
    asked = question(settings, origins, node, arguments.nodes or 1)
    rank = arguments.rank
    if rank is not None and rank >= asked.plan.world_size:
        raise BadInputError(f"--rank {rank}: the plan has ranks 0 to {asked.plan.world_size - 1}.")
    measured = None
    if arguments.measure:
        measured = _measured(asked, ranks or Ranks(), rank, environ)
        if measured is None:  # another rank speaks
            return 0
        rank = measured.rank
    traced = worst(asked) if rank is None else asked.trace(rank)
    _show(asked, traced, measured, arguments.plot, arguments.out_file, arguments.json)
    return 0


def _require_one_place(arguments: argparse.Namespace, settings: TrainSettings) -> None:
    """Refuse what is said of a machine of the catalog beside what is said of this host."""
    if arguments.measure and settings.device not in ("auto", "cpu"):
        raise BadInputError(
            f"--measure runs two steps on this host's CPU, but --device is {settings.device}. On a "
            "GPU, outpace train --memory measures a run beside its trace. Leave --device out."
        )
    if arguments.machine is None:
        if arguments.nodes is not None:
            raise BadInputError(
                f"--nodes {arguments.nodes}: of which machine? Name it with --machine, as in "
                "--machine hgx-h100, or give a number of processes with --nproc."
            )
        return
    if arguments.measure:
        raise BadInputError(
            f"--measure runs on this host, but --machine is {arguments.machine}. Give one of them."
        )
    if settings.nproc is not None:
        raise BadInputError(
            f"--nproc {settings.nproc}: of {arguments.machine} all devices are taken; --nodes says "
            "how many of these machines. Leave --nproc or --machine out."
        )


def _measured(
    asked: "Question | ModuleQuestion", ranks: Ranks, rank: int | None, environ: Mapping[str, str]
) -> MemoryAccount | None:
    """Two real steps; the account of `rank`, or of the fullest, on rank 0."""
    import torch
    import torch.distributed as dist

    from outpace.launch.group import process_groups
    from outpace.trace.measure import measure

    with process_groups(ranks, torch.device("cpu"), 300.0, restart_count(environ)) as groups:
        mine = measure(asked.workload, ranks)
        said: list[MemoryAccount] = [mine] * ranks.world_size
        dist.all_gather_object(said, mine, group=groups.control)
    if ranks.rank != 0:
        return None
    return said[rank] if rank is not None else max(said, key=lambda one: one.allocated_bytes or 0)


def _show(
    asked: "Question | ModuleQuestion",
    traced: MemoryAccount,
    measured: MemoryAccount | None,
    plot: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    from outpace.report.memory import document, memory_table, step_in_words

    said = document(
        traced,
        measured,
        plan=asked.plan,
        model=asked.settings.model,
        seq_len=asked.seq_len,
        global_batch=asked.global_batch,
        accelerator=asked.accelerator,
    )
    text = json.dumps(said, indent=2)
    if out is not None:
        write_output(out, text + "\n")
    if plot is not None:
        from outpace.report.memory_plot import plot_memory

        plot_memory(measured or traced, plot, limit_bytes=said["device_memory_bytes"])
    if as_json:
        print(text, flush=True)
        return
    from outpace.report.terminal import Console

    about = step_in_words(asked.plan, asked.global_batch, asked.seq_len)
    Console().print(memory_table(asked.plan, traced, measured, asked.accelerator, about))


def _parser() -> Parser:
    parser = Parser("memory", _ABOUT, _EPILOG, usage="[options]")
    parser.add_json()
    add = parser.arguments.add_argument
    add(
        "--machine",
        default=None,
        metavar="NAME",
        help="of the catalog: hgx-h100, 'RTX 4090', … (default: processes on CPUs, see --nproc)",
    )
    add(
        "--nodes",
        type=number_type(int, 1),
        default=None,
        metavar="N",
        help="how many of these machines (default: 1)",
    )
    add(
        "--rank",
        type=number_type(int, 0),
        default=None,
        metavar="N",
        help="whose memory (default: the rank that needs the most)",
    )
    add(
        "--measure",
        action="store_true",
        default=False,
        help="also run two real steps on this host's CPU, with --nproc processes",
    )
    add(
        "--plot",
        type=output_file,
        default=None,
        metavar="FILE",
        help="draw memory over a step (.png, .svg)",
    )
    add(
        "--save",
        dest="out_file",
        type=output_file,
        default=None,
        metavar="FILE.json",
        help="keep what --json prints, with every moment of the step",
    )
    options.add_settings(parser)
    return parser
