"""`outpace launch`."""

import json
import re
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outpace.cli.options import DEFAULT, RUN_FILE
from outpace.cli.output import output_place
from outpace.cli.parser import Parser, number_type
from outpace.launch import kubernetes, slurm_script
from outpace.records.base import write_atomic
from outpace.records.cluster_job import ClusterJob
from outpace.records.errors import BadInputError, join_or, suggest

_ABOUT = "Write a job for a cluster's scheduler that trains and resumes after interruptions."
_EPILOG = (
    "Write the outpace train command and its options after --. --auto-resume is added, and --out "
    "runs/NAME unless you give another."
)
_DIRECTIVE = re.compile(r"[a-z][a-z-]*(=[^\x00-\x1f\x7f]+)?")  # must be a single line
# sbatch options that the script sets itself, and the flags to use instead. A second line would
# contradict how ranks are started, or when they save.
_WRITTEN: Mapping[str, str] = MappingProxyType(
    {
        "nodes": "--nodes",
        **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-gpu"), "--ranks-per-node"),
        **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task"), "--gpus-per-node"),
        **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), "--cpus-per-rank"),
        "time": "--time",
        "signal": "--save-s",
        "chdir": "--folder",
    }
)
# "Acceptable time formats" of sbatch(1).
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def run(argv: list[str], environ: Mapping[str, str]) -> int:
    """Write or submit a job for SLURM or Kubernetes; returns 0. Raises OutpaceError."""
    own, command = _split_at_dashes(argv)
    if not own or own[0] in ("-h", "--help"):
        _parser("slurm").read(["--help"])
    kind, *rest = own
    if kind not in _WRITERS:
        raise BadInputError(
            f"outpace launch has no scheduler {kind!r}.{suggest(kind, _WRITERS)} Use "
            f"{join_or(_WRITERS)}; see outpace launch slurm --help."
        )
    arguments = _parser(kind).read(rest)
    job = _read_job(arguments, command)
    return _WRITERS[kind](job, arguments)


def _split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _read_job(arguments: Namespace, command: list[str]) -> ClusterJob:
    per_node = arguments.ranks_per_node or arguments.gpus_per_node or 1
    folder = Path.cwd() if arguments.folder is None else arguments.folder.absolute()
    words, out = _complete_command(command, arguments.name, folder)
    return ClusterJob.parse(
        {
            "name": arguments.name,
            "nodes": arguments.nodes,
            "ranks_per_node": per_node,
            "gpus_per_node": arguments.gpus_per_node,
            "cpus_per_rank": arguments.cpus_per_rank,
            "command": words,
            "folder": folder,
            "out": out,
        },
        "outpace launch",
    )


def _complete_command(
    command: list[str], name: str, folder: Path
) -> tuple[tuple[str, ...], Path | None]:
    """Complete an `outpace train` command so that it can be resumed.

    Returns its words, with --out and --auto-resume added if they are missing, and the run's folder.
    Raises BadInputError if the command is not `outpace train`, is invalid, or sets --nproc.
    """
    from outpace.cli.train import read_settings

    if command[:1] == ["outpace"]:
        command = command[1:]
    if command[:1] != ["train"]:
        seen = f"not {command[0]!r}" if command else "but there is none"
        raise BadInputError(
            f"after --, give the command that every rank runs, {seen}. Write outpace launch … "
            "-- train --model gpt2 …"
        )
    words = [word.partition("=")[0] for word in command]
    out = f"runs/{name}"
    added = [] if "--out" in words or "--config" in words else ["--out", out]
    added += [] if {"--auto-resume", "--resume"} & set(words) else ["--auto-resume"]
    if "--out" in added and (folder / out / RUN_FILE).is_file():
        raise BadInputError(
            f"{folder / out} already holds a run. To resume it, write --out {out} after the "
            "--; to start another, give another --name or --out."
        )
    settings, origins = read_settings([*command[1:], *added])
    if origins["nproc"] not in (DEFAULT, RUN_FILE):
        raise BadInputError(
            f"--nproc {settings.nproc}: the scheduler starts the ranks. Leave out --nproc, and "
            "use --ranks-per-node before the --."
        )
    return (*command, *added), settings.out


def _write_slurm_job(job: ClusterJob, arguments: Namespace) -> int:
    limit_s = None if arguments.time is None else _time_limit_s(arguments.time)
    if limit_s is not None and arguments.save_s >= limit_s:
        raise BadInputError(
            f"--time {arguments.time} is {limit_s} s, of which --save-s {arguments.save_s} are for "
            "saving, so no time is left to train. Use a longer --time, or a smaller --save-s."
        )
    chosen = slurm_script.SlurmOptions(
        arguments.starter, arguments.time, arguments.save_s, tuple(arguments.sbatch)
    )
    text = slurm_script.script(job, chosen, str(Path(sys.executable).parent))
    path: Path = arguments.file or Path(f"{job.name}.sbatch")
    _write_file(path, text)
    number = _submit_script(path) if arguments.submit else None
    if arguments.json:
        print(json.dumps({"file": str(path), "job": number}, indent=2))
    elif number is not None:
        print(f"{path}: submitted as job {number}; it writes {job.name}-{number}.log")
    else:
        print(f"{path}: submit it with sbatch {path}, or with --submit")
    return 0


def _submit_script(path: Path) -> str:
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", "--", str(path)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise BadInputError(
            f"--submit: there is no sbatch on this host. Copy {path} to a login node of the "
            "cluster and submit it there."
        ) from None
    if done.returncode != 0:
        raise BadInputError(f"sbatch rejected {path}: {done.stderr.strip()}")
    return done.stdout.strip().split(";")[0]


def _write_kubernetes_job(job: ClusterJob, arguments: Namespace) -> int:
    from outpace.interop.export.texts import as_yaml

    if job.nodes > 1 and (arguments.claim is None or arguments.folder is None):
        raise BadInputError(
            f"--nodes {job.nodes}: every pod writes its shard of a checkpoint, so checkpoints must "
            "be on a volume that all pods mount. Name its claim with --claim, and its mount point "
            "with --folder."
        )
    chosen = kubernetes.KubernetesOptions(
        arguments.image, arguments.runtime, arguments.namespace, arguments.claim
    )
    files: dict[str, list[dict[str, Any]]] = {
        "trainjob": kubernetes.train_job(job, chosen),
        "job": kubernetes.indexed_job(job, chosen),
    }
    folder: Path = arguments.file or Path()
    paths = {kind: folder / f"{job.name}.{kind}.yaml" for kind in files}
    for kind, objects in files.items():
        _write_file(paths[kind], "---\n".join(map(as_yaml, objects)))
    if arguments.json:
        print(json.dumps({kind: str(path) for kind, path in paths.items()}, indent=2))
        return 0
    print(f"{paths['trainjob']}: with Kubeflow Trainer: kubectl apply -f {paths['trainjob']}")
    print(f"{paths['job']}: without it: kubectl apply -f {paths['job']}")
    return 0


_WRITERS: Mapping[str, Callable[[ClusterJob, Namespace], int]] = {
    "slurm": _write_slurm_job, "kubernetes": _write_kubernetes_job
}  # fmt: skip


def _write_file(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise BadInputError(f"cannot write {path}: {error.strerror}") from None


def _parser(kind: str) -> Parser:
    parser = Parser(
        f"launch {kind}", _ABOUT, _EPILOG, usage="[options] -- train …  (slurm or kubernetes)"
    )
    parser.add_json()
    add, number = parser.option, number_type(int, 1)
    add("--nodes", "N", number, "number of hosts (default: 1)", default=1)
    add("--gpus-per-node", "N", number_type(int, 0),
        "GPUs per host, with one rank on each (default: 0, which trains on the CPU)", default=0
    )  # fmt: skip
    add("--ranks-per-node", "N", number, "ranks per host (default: one per GPU, or 1)")
    add("--cpus-per-rank", "N", number, "CPU cores per rank")
    add("--name", None, str, "name of the job (default: outpace)", default="outpace")
    add(
        "--folder",
        "DIR",
        Path,
        "working directory, the same on all nodes (default: the current folder)",
    )
    if kind == "slurm":
        _add_slurm_options(parser)
    else:
        _add_kubernetes_options(parser)
    return parser


def _add_slurm_options(parser: Parser) -> None:
    add = parser.option
    add("--starter", None, str,
        "launcher of the ranks: srun alone, or srun with torchrun (default: srun)",
        default="srun", choices=("srun", "torchrun"))  # fmt: skip
    add("--time", "LIMIT", _check_time_limit, "time limit in sbatch's notation: 4:00:00, 2-0")
    add("--save-s", "S", number_type(int, 1),
        "seconds before the time limit at which to save (default: 120)", default=120)  # fmt: skip
    add("--sbatch", "OPTION=VALUE", _check_directive,
        "an extra #SBATCH line, such as partition=gpu; may be repeated",
        default=[], action="append")  # fmt: skip
    add("--file", None, output_place, "file for the script (default: NAME.sbatch)")
    parser.switch("--submit", "submit the job with sbatch")


def _check_directive(text: str) -> str:
    if not _DIRECTIVE.fullmatch(text):
        raise ArgumentTypeError(f"{text!r} is not of the form partition=gpu")
    name, _, value = text.partition("=")
    if name == "no-requeue":
        raise ArgumentTypeError(
            f"{text!r}: the script relies on SLURM to requeue it after a preemption or a lost "
            "node. Leave out no-requeue"
        )
    if name == "gpus-per-node" and ":" in value:
        count = value.rpartition(":")[2]
        raise ArgumentTypeError(
            f"{text!r}: choose a type of GPU with --sbatch gres=gpu:{value} and "
            f"--ranks-per-node {count} instead of --gpus-per-node"
        )
    if name in _WRITTEN:
        raise ArgumentTypeError(
            f"the script sets {name} itself, so {text!r} would contradict it. Use "
            f"{_WRITTEN[name]} instead"
        )
    if name == "array":
        raise ArgumentTypeError(
            f"{text!r}: all jobs of an array would train in one folder. Submit a job for each run, "
            "each with its own --name"
        )
    return text


def _check_time_limit(text: str) -> str:
    if text != "UNLIMITED" and not _TIME.fullmatch(text):
        raise ArgumentTypeError(
            f"{text!r} is not a time in sbatch's notation, such as 4:00:00 or 2-0"
        )
    return text


def _time_limit_s(text: str) -> int | None:
    """Parse a time limit in sbatch's notation: 90 and 90:00 are minutes, 1-12 is 36 hours.

    Returns seconds, or None if there is no limit.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, *parts = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:
        parts = [0, *parts[:2]]
    hours, minutes, seconds = parts
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None


def _add_kubernetes_options(parser: Parser) -> None:
    add = parser.option
    add("--image", None, str, "container image with outpace installed", required=True)
    add("--runtime", None, str,
        "Kubeflow's training runtime (default: torch-distributed)", default="torch-distributed"
    )  # fmt: skip
    add("--namespace", None, str, "namespace of the job (default: kubectl's)")
    add("--claim", "NAME", str, "claim of a shared volume, which all pods mount at --folder")
    add("--file", "DIR", output_place, "folder to write the files to (default: .)")
