"""What there is to report on: real runs, a comparison, plans, a probe; made once for all tests."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from outpace.cli.main import main
from outpace.records.certificate import Certificate
from outpace.records.figure import Figure, Key
from outpace.records.machine import Machine
from outpace.records.plan import Plan
from outpace.records.probe_results import Advice, LinkFit, ProbeRecord
from outpace.records.tuning import PlanTrial, Tuning

ROOT = Path(__file__).parents[2]
EVIL = '"><img src=x onerror="window.hacked=1"><script>window.hacked=1</script><b>bold</b> & `x` |'


def printed(*words):
    """Standard output of a command that ends well."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*map(str, words)]) == 0
    return out.getvalue()


@pytest.fixture(scope="session")
def train_words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report-corpus")
    for path in sorted((ROOT / "outpace" / "data").glob("*.py"))[:6]:
        (folder / f"{path.stem}.txt").write_text(path.read_text(encoding="utf-8"))
    cache = tmp_path_factory.mktemp("report-cache")
    return ["train", "--model=outpace-tiny", "--seq-len=32", "--global-batch=8", "--steps=8",
            "--eval-batches=1", "--eval-every=4", "--sample-tokens=8", "--precision=fp32",
            "--device=cpu", f"--data={folder}", f"--cache-dir={cache}"]  # fmt: skip


@pytest.fixture(scope="session")
def run(train_words, tmp_path_factory):
    """One process, with its memory followed."""
    out = tmp_path_factory.mktemp("report-runs") / "alone"
    printed(*train_words, "--memory", f"--out={out}", "--json")
    return out


@pytest.fixture(scope="session")
def pipeline_run(train_words, tmp_path_factory):
    """Two stages, two passes a step, with a trace."""
    out = tmp_path_factory.mktemp("report-runs") / "pipeline"
    printed(*train_words, "--nproc=2", "--strategy=1f1b", "--pp-microbatches=4",
            "--micro-batch=1", "--profile", f"--out={out}", "--json")  # fmt: skip
    return out


@pytest.fixture(scope="session")
def comparison(run, pipeline_run, tmp_path_factory):
    """Of the two runs."""
    out = tmp_path_factory.mktemp("report-compared") / "c"
    printed("compare", "--runs", run, pipeline_run, f"--out={out}", "--json")
    return out


@pytest.fixture(scope="session")
def plans(tmp_path_factory):
    """What outpace plan --json prints."""
    path = tmp_path_factory.mktemp("report-plans") / "plans.json"
    path.write_text(printed("plan", "--model=llama-3-8b", "--machine=hgx-h100", "--seq-len=4096",
                            "--global-batch=64", "--keep=pp=2", "--json"))  # fmt: skip
    return path


def figure(kind, what, value, unit="s", unstable=None, **of):
    return Figure(
        key=Key(kind=kind, what=what, of=of), unit=unit, value=None if unstable else value,
        origin="measured", low=0.9 * value, high=1.1 * value, level=0.95, rounds=((value,),) * 5,
        unstable=unstable,
    )  # fmt: skip


@pytest.fixture(scope="session")
def probe(run, tmp_path_factory):
    """Matmuls, memory and all-reduce of two ranks; one figure is unstable."""
    path = tmp_path_factory.mktemp("report-probe") / "machine.json"
    of = {"axis": "all", "backend": "gloo", "device": "cpu", "ranks": 2}
    sides = [dict.fromkeys("mnk", 2**power) for power in range(6, 11)]
    figures = (
        *(figure("matmul", "curve", 1e9 * side["m"], "FLOP/s", dtype="fp32", **side)
          for side in sides),
        figure("matmul", "best", 1e12, "FLOP/s", dtype="fp32", **sides[-1]),
        *(figure("memory", what, 1e10, "B/s", bytes=2**26) for what in ("copy", "read")),
        figure("memory", "write", 1e10, "B/s", "it drifted", bytes=2**26),
        *(figure("all-reduce", "time", 1e-4 + size / 1e9, bytes=size, **of)
          for size in (2**10, 2**20, 2**24)),
    )  # fmt: skip
    fit = LinkFit(
        collective="all-reduce", axis="all", backend="gloo", device="cpu", ranks=2,
        latency=figure("all-reduce", "latency", 1e-4, **of),
        bandwidth=figure("all-reduce", "bandwidth", 1e9, "B/s", **of), residual=0.02,
    )  # fmt: skip
    probed = ProbeRecord(
        date="2026-11-22", versions={"torch": "2.13.0"}, command="outpace probe --quick",
        sections=("matmul", "memory", "collectives"), quick=True, took_s=30.0, world_size=2,
        figures=figures, fits=(fit,),
        advice=(Advice(about="heads", text="25 heads of 64 → 20 of 80", gain=0.03),),
    )  # fmt: skip
    machine = Machine.parse(json.loads((run / "run.json").read_text())["machine"], "run.json")
    machine.model_copy(update={"probed": probed}).save(path)
    return path


@pytest.fixture(scope="session")
def tuning(run, tmp_path_factory):
    """Three trials, one of which failed; the run of the first is there."""
    path = tmp_path_factory.mktemp("report-tuning") / "tuning.json"
    machine = Machine.parse(json.loads((run / "run.json").read_text())["machine"], "run.json")
    trials = tuple(
        PlanTrial(number=number, why="the planner's fastest", title=f"plan {number}",
              plan=Plan(micro_batch=number),
              first_predicted_s=0.1 * number, predicted_s=0.12 * number, step_time_s=step_time_s,
              tokens_per_s=step_time_s and 750 / step_time_s,
              peak_memory_bytes=number * 2**28, failure=failure, took_s=3.0, run=str(run))
        for number, step_time_s, failure in ((1, 0.15, None), (2, None, "out of memory"),
                                             (3, 0.3, None))
    )  # fmt: skip
    Tuning(
        settings={"model": "outpace-tiny"}, trials=trials, best=1, default=3, gain=0.5,
        step_time_s=0.15,
        stopped="no plan left that may be faster", considered=100, took_s=9.0, machine=machine,
        started="2026-11-22T12:00:00+00:00", command=("outpace", "tune", "--model", "outpace-tiny"),
    ).save(path)  # fmt: skip
    return path


@pytest.fixture(scope="session")
def certificate(on_ranks):
    """Of DDP on two processes."""
    return Certificate.parse(on_ranks(2, "outpace", "verify", "ddp", "--json"), "verify")


@pytest.fixture(scope="session")
def evil(comparison, tmp_path_factory):
    """A comparison whose arms have names that are no friends of HTML."""
    folder = tmp_path_factory.mktemp("report-evil")
    document = json.loads((comparison / "comparison.json").read_text())
    del document["xxh3_128"]  # changed on purpose
    first = document["arms"][0]["arm"]
    text = json.dumps(document).replace(json.dumps(first), json.dumps(EVIL))
    (folder / "comparison.json").write_text(text)
    return folder / "comparison.json"
