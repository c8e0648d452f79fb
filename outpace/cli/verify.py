"""`outpace verify`."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from outpace.cli.output import output_file, save_output
from outpace.cli.parser import JoinedList, Parser, duration_type, number_type
from outpace.launch.launcher_env import ranks_from
from outpace.records.certificate import WITHOUT_DROPOUT, Certificate
from outpace.records.errors import BadInputError, OutpaceError, suggest
from outpace.records.interpreter import PYTHON
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan, PlanFile, Strategy
from outpace.records.precisions import Precision
from outpace.records.ranks import Ranks
from outpace.records.run import RunRecord

if TYPE_CHECKING:
    import torch

CERTIFICATE_FILE = "certificate.json"
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "bf16", "bf16-master")
Word = TypeVar("Word", bound=str)

_ABOUT = (
    "Prove that strategies compute a single process's numbers: gradients, norms, losses, weights."
)
_EPILOG = (
    "Exits with code 1 if a strategy fails. Without options, it checks all strategies on two "
    "processes."
)


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Verify strategies and print a certificate; return 0. Raises OutpaceError if any fails."""
    arguments = _parser().read(argv)
    asked = ",".join(filter(None, [arguments.strategy, *arguments.names])) or "all"
    strategies = choose_words("--strategy", asked, STRATEGIES)
    precisions = choose_words("--precision", arguments.precision, PRECISIONS)
    run_record = None if arguments.run is None else RunRecord.load(arguments.run / "run.json")
    ranks = ranks_from(environ)
    module = _custom_reference(arguments.model, run_record)
    if module is not None:
        return _verify_module(module, arguments, asked, ranks, run_record)
    if ranks is None:
        from outpace.launch import local

        nproc = arguments.nproc if run_record is None else run_record.plan.world_size
        local.start(nproc, [*PYTHON, "-m", "outpace", "verify", *argv])
        return 0
    import torch

    from outpace.experiment.parity import Trial
    from outpace.experiment.verify import plan_of_run, plans_for, verify
    from outpace.jobs.ranks.process_groups import process_groups
    from outpace.parallel import why_not

    device = _resolve_device(arguments.device, ranks)
    torch.set_num_threads(1)  # the ranks share the cores, and the model is tiny
    skipped: dict[str, str] = {}
    if arguments.plan is not None:
        plans = [PlanFile.load(arguments.plan, option="--plan ").plan]
    elif run_record is not None:
        plans = [plan_of_run(run_record.plan, precision) for precision in precisions]
    else:
        found = {str(name): why_not(name, ranks, device) for name in strategies}
        skipped = {name: why for name, why in found.items() if why is not None}
        for name, why in skipped.items():
            if asked != "all":
                raise BadInputError(f"--strategy {name}: {why}.")
        levers = _parse_plan_options(arguments.levers)
        plans = [
            Plan.parse({**plan.model_dump(), **levers}, "--levers")
            for precision in precisions
            for name in strategies
            if name not in skipped
            for plan in plans_for(name, ranks.world_size, precision)
        ]
    trial = Trial(_choose_spec(arguments.model, run_record, plans), device=device)
    with process_groups(ranks, device, 300.0) as groups:
        certificate = verify(plans, trial, groups, skipped=skipped, notes=_trial_notes(run_record))
    if ranks.rank == 0:
        beside = None if arguments.run is None else arguments.run / CERTIFICATE_FILE
        _save_and_print(certificate, arguments.out or beside, arguments.json)
    _require_passed(certificate)
    return 0


def _custom_reference(model: str | None, run_record: RunRecord | None) -> str | None:
    from outpace.interop.models import names_code

    reference = model if model is not None or run_record is None else run_record.settings.model
    return reference if reference is not None and names_code(reference) else None


def _verify_module(
    reference: str,
    arguments: argparse.Namespace,
    strategies: str,
    ranks: Ranks | None,
    run_record: RunRecord | None,
) -> int:
    """Verify strategies with a custom model, in processes that are forked from this one.

    Returns 0. Raises OutpaceError if the results of a strategy differ.
    """
    if ranks is not None:
        raise BadInputError(
            f"verify --model {reference} starts its own processes. Run it without torchrun, "
            "and set their number with --nproc."
        )
    if arguments.precision != "fp64" or arguments.device == "cuda":
        raise BadInputError(
            f"verify --model {reference} computes in fp64 on the CPU, or in fp32 if the module "
            "does. Leave --precision and --device out."
        )
    from outpace.experiment.module_verify import verify_custom
    from outpace.interop.custom_model import build_custom_model
    from outpace.interop.models import open_model
    from outpace.interop.user_file import require_named
    from outpace.jobs.inputs.custom_batches import trial_batches

    if arguments.model is None:
        require_named(reference, arguments.run / "run.json")
    opened = open_model(reference)
    assert opened.build is not None
    custom = build_custom_model(opened.build)
    plans = _module_plans(arguments, strategies, run_record)
    given = [plan for plan in plans or () if isinstance(plan, Plan)]
    nproc = arguments.nproc if run_record is None else run_record.plan.world_size
    nproc = max((plan.world_size for plan in given), default=nproc)
    per_pass = math.lcm(*(plan.data_parallel * plan.samples_per_pass for plan in given))
    certificate = verify_custom(
        custom,
        trial_batches(custom, nproc, per_pass),
        plans=plans,
        nproc=nproc,
        time_limit_s=arguments.time_limit,
        name=reference,
    )
    beside = None if arguments.run is None else arguments.run / CERTIFICATE_FILE
    _save_and_print(certificate, arguments.out or beside, arguments.json)
    _require_passed(certificate)
    return 0


def _module_plans(
    arguments: argparse.Namespace, strategies: str, run_record: RunRecord | None
) -> Sequence[Plan | str] | None:
    """Return the plans or the names of strategies to verify with a custom model; None for all.

    If the user chose neither a plan nor strategies, use one plan that is like the run's, if there
    is a run.
    """
    if arguments.levers:
        raise BadInputError(
            "--levers applies to models that outpace builds. For a custom model, give a whole plan "
            "with --plan FILE.json."
        )
    if arguments.plan is not None:
        return [PlanFile.load(arguments.plan, option="--plan ").plan]
    if run_record is not None and strategies == "all":
        from outpace.experiment.module_verify import plan_like

        return [plan_like(run_record.plan)]
    return None if strategies == "all" else list(choose_words("--strategy", strategies, STRATEGIES))


def _require_passed(certificate: Certificate) -> None:
    """Raise OutpaceError (exit code 1) if the results of a strategy differ from one process's."""
    failed = [
        verdict.strategy
        for verdict in certificate.verdicts
        if not verdict.passed and not verdict.refused
    ]
    if failed:
        error = OutpaceError(f"{', '.join(failed)}: results differ from those of a single process")
        error.answered = True
        raise error


def _parse_plan_options(text: str) -> dict[str, str]:
    """Parse values for fields of a plan, such as "checkpointing=full,loss=plain"."""
    levers: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        name, given, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not given or name not in Plan.model_fields:
            raise BadInputError(
                f"--levers {pair}: write NAME=VALUE with the name of a field of a "
                f"plan.{suggest(name, Plan.model_fields)}"
            )
        levers[name] = value.strip()
    return levers


def _resolve_device(choice: Literal["auto", "cpu", "cuda"], ranks: Ranks) -> "torch.device":
    """Return this rank's device. "auto" never chooses Metal, which has no fp64."""
    import torch

    from outpace.jobs.defaults import resolve_device
    from outpace.records.settings import TrainSettings

    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    return resolve_device(TrainSettings(device=choice), ranks)


def _choose_spec(
    model: str | None, run_record: RunRecord | None, plans: Sequence[Plan]
) -> ModelSpec:
    """Return the dimensions of the model with which to verify `plans`.

    They are those of `model`, or else of a tiny model: one of the run's family if there is a run.
    """
    from outpace.experiment.verify import tiny_like, tiny_spec
    from outpace.interop.models import open_model

    if model is None and run_record is None:
        return tiny_spec(plans)
    found = (
        run_record.model
        if model is None and run_record is not None
        else open_model(str(model)).spec
    )
    if found is None:
        raise BadInputError(
            "the model of this run was built in Python, and cannot be built again here. Call "
            "outpace.verify(module, loss=…, batch=…) in your program, or give --model "
            "FILE.py:FUNCTION."
        )
    return found if model is not None else tiny_like(found, plans)


def _trial_notes(run_record: RunRecord | None) -> list[str]:
    if run_record is None:
        return []
    draws = run_record.plan.lora_dropout or (
        run_record.model is not None and run_record.model.dropout
    )
    return [WITHOUT_DROPOUT] if draws else []


def _save_and_print(certificate: Certificate, out: Path | None, as_json: bool) -> None:
    if out is not None:
        save_output(out, certificate)
    if as_json:
        print(certificate.model_dump_json(indent=2), flush=True)
        return
    from outpace.reporting.answers.certificate import certificate_answer
    from outpace.reporting.terminal.answer import answer_text
    from outpace.reporting.terminal.console import Console

    Console().print(answer_text(certificate_answer(certificate)))


def choose_words(flag: str, text: str, known: Sequence[Word]) -> list[Word]:
    """Split a list at commas or spaces, and return its words in the order of `known`.

    "all" stands for all known words. Raises BadInputError for others.
    """
    words = list(known) if text == "all" else text.replace(",", " ").split() or [text]
    for word in words:
        if word not in known:
            raise BadInputError(
                f"{flag} {word}: there is no such {flag.strip('-')}.{suggest(word, known)} "
                f"Use any of {', '.join(known)}, or all."
            )
    return [word for word in known if word in words]


def _parser() -> Parser:
    parser = Parser("verify", _ABOUT, _EPILOG)
    parser.add_json()
    add = parser.option
    add("names", "A,B", str, "strategies, as for --strategy; also A B", default=[], nargs="*")
    add("--strategy", "A,B", str,
        "strategies to verify (default: all that this machine can run)", action=JoinedList
    )  # fmt: skip
    add("--precision", "A,B", str,
        "any of fp64, fp32, bf16, bf16-master, comma-separated, or all (default: fp64); "
        "tolerances: docs/concepts/parity.md", default="fp64", action=JoinedList)  # fmt: skip
    add("--levers", "NAME=VALUE,…", str,
        "options to verify each strategy with, such as checkpointing=full,loss=plain",
        default="", action=JoinedList)  # fmt: skip
    add("--plan", "FILE.json", Path, "verify this plan instead of strategies")
    add("--run", "DIR", Path,
        "verify the plan of this run with a tiny model of its family; write DIR/certificate.json"
    )  # fmt: skip
    add("--model", None, str,
        "preset, spec or Hugging Face directory, or FILE.py:FUNCTION for a custom model with its "
        "loss and data (default: a tiny model)")  # fmt: skip
    add("--time-limit", "TIME", duration_type(1),
        "time allowed per strategy of a custom model: 120, 5m (default: 120 s)", default=120.0
    )  # fmt: skip
    add("--nproc", "N", number_type(int, 1),
        "number of processes to start on this host (default: 2)", default=2)  # fmt: skip
    add("--device", None, str,
        "device to compute on (default: one CUDA device per process, else the CPU)",
        default="auto", choices=("auto", "cpu", "cuda"))  # fmt: skip
    add("--out", "FILE.json", output_file, "file to save the certificate in")
    return parser
