"""Measurements of outpace on one NVIDIA GPU, in one call of at most 400 s.

    scripts/gpu-check                              # records results/gpu-<card>.json
    scripts/gpu-check --only attention,loss        # only these sections; keeps the others
    scripts/gpu-check --cpu --out cpu.json         # every section small, as a check

Sections are ordered by importance. Each is a separate process with a time limit, and results are
written after each, so that a section that hangs or fails loses nothing else. Sections for which
time is too short are reported as left out; a second call with --only adds them to the same file. A
missed target is a finding: the exit code is 0 if the check itself ran.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

# Querying the driver through NVML does not initialise CUDA, so that sections can be forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

RESULTS = Path(__file__).resolve().parent / "results"
LIMIT_S = 400.0
TRIAL_LIMIT_S = 3600.0  # with --cpu, on cores that others may use too


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, help="seconds for all (400; with --cpu 3600)")
    parser.add_argument("--section-limit", type=float, help="seconds for each section at most")
    parser.add_argument("--only", help="sections, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the sections, and end")
    parser.add_argument("--out", type=Path, help="the JSON (results/gpu-<card>.json)")
    parser.add_argument("--cpu", action="store_true", help="every section small, on the CPU")
    parser.add_argument("--compile", action="store_true", help="with --cpu: by inductor, too")
    parser.add_argument("--no-fork", action="store_true", help="import anew for each section")
    parser.add_argument("--run-section", help=argparse.SUPPRESS)
    parser.add_argument("--fill-cache", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.limit is None:
        arguments.limit = TRIAL_LIMIT_S if arguments.cpu else LIMIT_S
    return arguments


def main() -> int:
    """Run the sections and report the results."""
    arguments = parse()
    began_s = time.monotonic()
    # Sections may use threads after a fork: their processes exit by themselves.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*")
    from gpu.sections import SECTIONS, chosen

    if arguments.list:
        print("\n".join(section.name for section in SECTIONS))
        return 0
    if arguments.run_section:
        return run_section(arguments)
    if arguments.fill_cache:
        from gpu.caches import Job, fill_cache

        check = make_check(arguments, arguments.folder, arguments.kept).at("caches")
        fill_cache(check, Job(**json.loads(arguments.fill_cache)))
        return 0
    unknown, sections = chosen(arguments.only)
    if unknown:
        print(f"gpu-check: there is no section {unknown!r}. There are: "
              f"{', '.join(section.name for section in SECTIONS)}.", file=sys.stderr)  # fmt: skip
        return 2
    if not arguments.cpu and not there_is_a_gpu():
        print("gpu-check: torch sees no NVIDIA GPU here. --cpu tries every section on the CPU.",
              file=sys.stderr)  # fmt: skip
        return 2
    from gpu.report import Report

    report = Report(arguments.out, arguments.cpu, RESULTS)
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        run_all(arguments, sections, report, folder, began_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(report.summary(), flush=True)
    print(f"{report.path}: {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return 0


def there_is_a_gpu() -> bool:
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


def run_all(
    arguments: argparse.Namespace, sections: Any, report: Any, folder: Path, began_s: float
) -> None:
    """Run the sections one after another, and record each."""
    from gpu.runner import Runner, prepare

    check = make_check(arguments, folder, report.folder)
    prepare(os.environ, check)
    check.earlier.update(report.sections)
    again = [
        sys.executable,
        str(Path(__file__).resolve()),
        *(["--cpu"] if arguments.cpu else []),
        *(["--compile"] if arguments.compile else []),
    ]
    left_s = arguments.limit - (time.monotonic() - began_s)
    runner = Runner(check, left_s, arguments.section_limit, report.save, again,
                    fork=not arguments.no_fork)  # fmt: skip
    runner.run(sections)


def make_check(arguments: argparse.Namespace, folder: Path, kept: Path) -> Any:
    """Create the state that all sections share."""
    from gpu.check import Check

    return Check(
        device="cpu" if arguments.cpu else "cuda",
        small=arguments.cpu,
        inductor=arguments.compile or not arguments.cpu,
        folder=folder,
        kept=kept,
        deadline_s=time.monotonic() + arguments.limit,
    )


def run_section(arguments: argparse.Namespace) -> int:
    """Run one section in this process, as the runner requested."""
    from gpu.runner import run_here
    from gpu.sections import chosen

    _, (section,) = chosen(arguments.run_section)
    check = make_check(arguments, arguments.folder, arguments.kept).at(section.name)
    check.earlier.update(json.loads((arguments.folder / "earlier.json").read_text()))
    return run_here(section, check)


if __name__ == "__main__":
    sys.exit(main())
