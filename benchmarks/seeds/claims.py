"""Claims of a seed document, the planner's predictions and measurements, in one record.

Each program in this folder is an experiment. It predicts, measures, prints its tables and records
results/seeds_NAME.json; with `--quick` it does all of this on a small scale and records nothing.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the other benchmarks

# The documents, by their titles; one has only headings.
FIT = "Performance and Scalability: How To Fit a Bigger Model and Train It Faster"
THROUGHPUT = "How to Maximize Training Throughput"
TRAINING = "Automatic Mixed Precision; Distributed Training"
PRETRAINING = "Modern Distributed Data-Parallel Large-Scale Pre-training Strategies For NLP models"
FOUND = "found.json"  # of a job's first rank
DOCUMENTS = (FIT, THROUGHPUT, TRAINING, PRETRAINING)


@dataclass(frozen=True)
class Claim:
    """A document's claim, in words and figures.

    `hardware` is what the document names, or an assumption if it names none.
    """

    document: str
    says: str
    hardware: str
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class Experiment:
    """An experiment; `predict` and `measure` are told whether to be quick.

    `instead`: what is measured in place of what this machine cannot do, and why. `worker` runs a
    rank of the experiment's own jobs, and is given the output file and whether to be quick.
    """

    name: str
    claims: tuple[Claim, ...]
    predict: Callable[[bool], dict[str, Any]]
    measure: Callable[[bool], dict[str, Any]]
    instead: str
    worker: Callable[[Path, bool], None] | None = None


def found(experiment: Experiment, quick: bool) -> dict[str, Any]:
    """Return the record without machine and versions, as it is after a round trip through JSON."""
    document = {
        "claims": [asdict(claim) for claim in experiment.claims],
        "instead": experiment.instead,
        "predicted": experiment.predict(quick),
        "measured": experiment.measure(quick),
    }
    again: dict[str, Any] = json.loads(json.dumps(document))
    return again


def job(program: str, ranks: int, quick: bool, start: Callable[[int, list[str]], None]) -> Any:
    """Return what rank 0 of an experiment's job found; `start` starts the ranks of `program`."""
    with tempfile.TemporaryDirectory() as folder:
        start(ranks, [program, "--worker", folder, *(["--quick"] if quick else [])])
        return json.loads((Path(folder) / FOUND).read_text())


def run(experiment: Experiment, about: str) -> dict[str, Any] | None:
    """Run the whole program; return what was recorded, or None for a quick run."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small; nothing is recorded")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    quick = asked.quick
    if asked.worker and experiment.worker:
        experiment.worker(asked.worker, quick)
        return None
    from figures_seeds import TABLES
    from recording import save

    result = found(experiment, quick)
    name = f"seeds_{experiment.name}"
    print(TABLES[name](result), flush=True)
    if quick:
        return None
    print(save(name, result))
    return result
