"""`outpace calibrate`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli.output import output_file, save_output
from outpace.cli.parser import Parser
from outpace.cli.plan import add_question, plan_question

if TYPE_CHECKING:
    from outpace.jobs.planning.calibrate import CalibratedRun
    from outpace.records.training_log import CorrectedMachine

_ABOUT = "Correct a machine's rates with a trainer's log, so that the next plan starts from them."
_EPILOG = (
    "Reads logs of outpace (a run's folder), torchtitan, Megatron-LM and Megatron-Bridge, "
    "DeepSpeed, transformers' Trainer (trainer_state.json or the console) and nanotron. Pass "
    "what the log does not contain as flags. Then: outpace plan --machine FILE."
)


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Compare measured step times from logs with predictions, and print the errors; return 0.

    With --out, also write a machine file with corrected rates.
    """
    arguments = _parser().read(argv)
    from outpace.jobs.planning.calibrate import CalibrationRequest, calibrate_machine

    asked = plan_question(arguments)
    request = CalibrationRequest(
        tuple(arguments.logs), asked, plan=arguments.plan, layout=arguments.layout
    )
    runs, machine = calibrate_machine(request)
    if arguments.out_file is not None:
        save_output(arguments.out_file, machine)
    if arguments.json:
        print(json.dumps([_to_json(one) for one in runs], indent=2), flush=True)
        return 0
    _show(runs, machine, arguments.out_file)
    return 0


def _to_json(run: "CalibratedRun") -> dict[str, object]:
    observed = run.observed
    return {
        "log": observed.log,
        "trainer": observed.trainer,
        "step_time_s": observed.step_time_s,
        "before_s": run.before_s,
        "after_s": run.after_s,
        "before": run.error_before,
        "after": run.error_after,
        "peak_memory_bytes": observed.peak_memory_bytes,
        "memory_kind": observed.memory_kind,
        "planned_memory_bytes": run.planned_memory_bytes,
        "notes": run.notes,
        "assumed": dict(run.assumed),
    }


def _show(runs: Sequence["CalibratedRun"], machine: "CorrectedMachine", out: Path | None) -> None:
    from rich.text import Text

    from outpace.planner.explain.titles import title
    from outpace.records.units import show_bytes, show_seconds
    from outpace.reporting.terminal.console import Console

    console = Console()
    for one in runs:
        observed = one.observed
        console.print(
            Text(
                f"{observed.log} ({observed.trainer}, {title(observed.plan)}): measured "
                f"{show_seconds(observed.step_time_s)} a step, predicted "
                f"{show_seconds(one.before_s)} ({_format_error(one.error_before)}), with the "
                f"corrected rates {show_seconds(one.after_s)} ({_format_error(one.error_after)})."
            )
        )
        if observed.peak_memory_bytes is not None:
            off = one.planned_memory_bytes / max(1, observed.peak_memory_bytes) - 1
            console.print(
                Text(
                    f"  memory, {observed.memory_kind}: measured "
                    f"{show_bytes(observed.peak_memory_bytes)}, predicted "
                    f"{show_bytes(one.planned_memory_bytes)} ({_format_error(off)}); memory is "
                    "not corrected."
                )
            )
        if one.assumed:
            settings = ", ".join(f"{name}={value}" for name, value in one.assumed.items())
            text = f"  assumed, because the log does not say: {settings}. Change it with --layout."
            console.print(Text(text))
        for note in one.notes:
            console.print(Text(f"  {note}"))
    console.print(Text(_suggest_next(machine, out)))


def _format_error(share: float) -> str:
    return f"{share:+.1%}".replace("%", " %")


def _suggest_next(machine: "CorrectedMachine", out: Path | None) -> str:
    count = len(machine.runs)
    if out is None:
        return "Nothing was written. Use --out machine.json to keep the corrected machine."
    return (
        f"{out} holds the machine, with rates corrected by {count} run{'' if count == 1 else 's'}. "
        f"Plan with it: outpace plan --machine {out}."
    )


def _parser() -> Parser:
    usage = "LOG... --model MODEL --machine NAME [options]"
    parser = Parser("calibrate", _ABOUT, _EPILOG, usage=usage)
    parser.add_json()
    add_question(parser, of="the log's, else ")
    add = parser.option
    add("logs", "LOG", Path, "a log, or the folder of a run", nargs="+")
    add("--plan", "plan.json", Path, "the run's plan, in a file that outpace plan --out wrote")
    add("--layout", "NAME=VALUE,...", str, "fields of the plan that the log does not state")
    add("--out", "FILE", output_file, "file for the corrected machine", dest="out_file")
    return parser
