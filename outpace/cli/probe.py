"""`outpace probe`."""

import argparse
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from outpace.cli.interrupts import interrupt_once
from outpace.cli.main import end_at_once
from outpace.cli.output import output_file, save_output
from outpace.cli.parser import Parser, duration_type, number_type
from outpace.launch.launcher_env import ranks_from
from outpace.records.errors import BadInputError, suggest
from outpace.records.machine import Machine
from outpace.records.probe_results import SectionName
from outpace.records.settings import TrainSettings

SECTIONS: tuple[SectionName, ...] = get_args(SectionName)
# Without allreduce, which is a part of collectives.
_ALL: tuple[SectionName, ...] = (
    "matmul", "memory", "storage", "loader", "collectives", "steps"
)  # fmt: skip
_AS_IN_TRAINING = ("device", "nproc", "backend", "data", "text_field", "tokenizer", "seq_len",
                   "micro_batch", "offload_dir")  # fmt: skip
_DEFAULT_MODEL = "gpt2"

_ABOUT = "Measure the speed of this machine: matmuls, memory, links, disks, data loading."
_EPILOG = (
    f"SECTION is one of {', '.join(SECTIONS)}, or all (the default). Run it by itself for this "
    "host's devices, or under torchrun on all hosts that you will use. Stop all other work on the "
    "machine first."
)


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Probe the machine, print the results and save them; returns 0. Raises OutpaceError."""
    arguments = _parser().read(argv)
    sections = _parse_sections(arguments.section)
    out: Path | None = arguments.out
    if arguments.handed_over is not None:
        settings = TrainSettings.load(arguments.handed_over)
    else:
        settings = _training_settings(vars(arguments))
    ranks = ranks_from(environ)
    from outpace.jobs.probe import job
    from outpace.jobs.probe.request import ProbeRequest
    from outpace.reporting.terminal.probe import progress_of, show_machine

    command = " ".join(["outpace", "probe", *(shlex.quote(_shorten_path(word)) for word in argv)])
    examined = None if arguments.handed_over is not None else environ
    request = ProbeRequest(sections, arguments.quick, settings, command, arguments.budget, examined)
    # The launching process shows its own progress bar.
    quiet = arguments.handed_over is not None or (ranks is not None and ranks.rank != 0)

    def end() -> None:
        end_at_once("stopped at once by a second Ctrl-C", 128 + signal.SIGINT, argv, environ)

    with progress_of(sections, quiet) as shown, interrupt_once(shown.show_stopping, end):
        if ranks is None:
            machine = job.probe_here(request, shown)
        else:
            found = job.probe_ranks(request, ranks, shown)
            if found is None:  # rank 0 prints the result
                return 0
            machine = found
    if out is not None:
        save_output(out, machine)
    if arguments.handed_over is not None:  # the launching process prints it
        return 0
    if arguments.json:
        print(machine.model_dump_json(indent=2), flush=True)
    else:
        show_machine(machine, out)
    return 0


def probe_machine(
    sections: Sequence[str], quick: bool, budget_s: float | None, out: Path | None,
    given: Mapping[str, object],
) -> Machine:  # fmt: skip
    """Measure this host, for the Python API.

    Raises BadInputError for an unknown keyword or section.
    """
    from outpace.jobs.probe import job
    from outpace.jobs.probe.request import ProbeRequest
    from outpace.reporting.terminal.probe import progress_of

    for name in given:
        if name not in (*_AS_IN_TRAINING, "model", "checkpoint_dir"):
            raise BadInputError(
                f"outpace.probe has no keyword {name!r}.{suggest(name, _AS_IN_TRAINING)}"
            )
    settings = _training_settings({"model": None, "checkpoint_dir": Path(), **given})
    chosen = _parse_sections(list(sections))
    request = ProbeRequest(chosen, quick, settings, "outpace.probe", budget_s, os.environ)
    with progress_of(chosen, True) as shown:
        machine = job.probe_here(request, shown)
    if out is not None:
        save_output(out, machine)
    return machine


def _shorten_path(word: str) -> str:
    """Keep only the last component of a path in an argument, since machine.json is shared."""
    option, equals, value = word.rpartition("=")
    return option + equals + ("…/" + Path(value).name if "/" in value else value)


def _parse_sections(words: list[str]) -> tuple[SectionName, ...]:
    if not words or "all" in words:
        return _ALL
    for word in words:
        if word not in SECTIONS:
            raise BadInputError(
                f"outpace probe has no section {word!r}.{suggest(word, (*SECTIONS, 'all'))} "
                f"Sections: {', '.join(SECTIONS)}, or all."
            )
    if "collectives" in words:
        words = [word for word in words if word != "allreduce"]  # it is a part of them
    return tuple(name for name in (*_ALL, "allreduce") if name in words)


def _training_settings(options: Mapping[str, object]) -> TrainSettings:
    values = {name: options[name] for name in _AS_IN_TRAINING if options.get(name) is not None}
    values |= {"model": options["model"] or _DEFAULT_MODEL, "out": options["checkpoint_dir"]}
    return TrainSettings.parse(values, "outpace probe")


def _parser() -> Parser:
    parser = Parser("probe", _ABOUT, _EPILOG, usage="[SECTION …] [options]")
    parser.add_json()
    add = parser.option
    add("section", "SECTION", str, "sections to measure", default=[], nargs="*")
    parser.switch("--quick", "take less than a minute instead of up to ten, with wider intervals")
    add("--budget", "TIME", duration_type(0.1),
        "measure for about this time: 90, 3m")  # fmt: skip
    add("--out", "machine.json", output_file, "save the results in a file for the planner")
    add("--model", "M", str,
        "model whose sizes to give advice on: a preset, a directory, a spec file (default: gpt2); "
        "with file.py:build, the loader section uses its data set")  # fmt: skip
    add("--device", None, str, "device to measure", choices=("auto", "cpu", "cuda"))
    add("--nproc", "N", number_type(int, 1),
        "processes for collectives (default: one per GPU, or up to four on a CPU)")  # fmt: skip
    add("--backend", None, str, "backend of collectives", choices=("auto", "gloo", "nccl"))
    add("--data", "FILE", str,
        "data whose loading to measure, as in outpace train; may be repeated (default: Python's "
        "own source code)", action="append")  # fmt: skip
    add("--text-field", "KEY", str, "key of the text in --data (default: text)")
    add("--seq-len", "N", number_type(int, 1),
        "tokens per sample, for loading and for the model's matmuls")  # fmt: skip
    add("--micro-batch", "N", number_type(int, 1),
        "samples per batch, for loading and for the model's matmuls")  # fmt: skip
    add("--tokenizer", "T", str, "tokenizer to measure")
    add("--checkpoint-dir", "DIR", Path,
        "directory whose disk to measure for checkpoints (default: the current one)",
        default=Path())  # fmt: skip
    add("--offload-dir", "DIR", Path,
        "directory whose disk to measure for offloading (default: the system's temporary directory)"
    )  # fmt: skip
    add("--handed-over", None, Path, argparse.SUPPRESS)
    return parser
