"""Valid trees of what outpace itself writes: runs, checkpoints, caches, comparisons, tunings."""

import contextlib
import copy
import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

from documents import MACHINE, ROWS, TOPOLOGIES, files_of, of_record, probed_machine, tokenizer
from trees import Tree

from outpace.catalog.models import preset
from outpace.records.certificate import Certificate, ParityVerdict
from outpace.records.comparison import Arm, ArmResult, Comparison, Experiment, Outcome
from outpace.records.comparison import Verdict as Claim
from outpace.records.hang_report import CollectiveEvent, HangReport, RankSnapshot, State
from outpace.records.measurement import PARTS, Evaluation, Measurement, StepRecord, TimeParts
from outpace.records.memory import MemoryAccount, MemoryUse, Moment
from outpace.records.pipelines import traced_name
from outpace.records.plan import Plan
from outpace.records.run import Failure, RunRecord
from outpace.records.settings import TrainSettings
from outpace.records.tuning import PlanTrial, Tuning
from outpace.records.utilisation import DeviceLoad, HostLoad, Load, series

STARTED = "2026-11-22T00:00:00+00:00"
_STEPS = 5
_PARTS = TimeParts(**{f"{part}_s": 0.1 for part in PARTS})


def _record(plan: Plan) -> RunRecord:
    settings = TrainSettings(model="gpt2", global_batch=8, steps=_STEPS, seq_len=64)
    return RunRecord(
        outpace="0.1.0", command=("outpace", "train", "--model", "gpt2"), settings=settings,
        origins={"model": "command line", "steps": "command line"}, plan=plan,
        identity=plan.identity(8), model=preset("gpt2"), parameters=124_000_000,
        total_steps=_STEPS, seq_len=64, train_data="x", eval_data=None, environment={"A": "b"},
        versions={"torch": "2.13.0"}, commit="c0ffee", uncommitted_changes=True, machine=MACHINE,
        device="cpu", threads=1, started=STARTED, resumes=({"at": STARTED, "ranks": 2},),
    )  # fmt: skip


def _step(number: int) -> StepRecord:
    return StepRecord(
        step=number, tokens=512 * number, samples=8 * number, loss=10.0 / number, lr=1e-3,
        grad_norm=1.0, step_time_s=0.6, **_PARTS.model_dump(), tokens_per_s=853.0,
        samples_per_s=13.0, model_flops_per_s=1e12, hardware_flops_per_s=None, mfu=None,
        peak_memory_bytes=2**30, loss_scale=None, skipped_steps=0,
    )  # fmt: skip


def _loads(node: int) -> Any:
    device = DeviceLoad(index=0, name="a GPU", utilisation=0.9, memory_bytes=2**30)
    host = HostLoad(cores=(0.5, 0.9), run_cores=1.5, memory_bytes=2**32)
    loads = [Load(node=node, duration_s=1.0, devices=(device,), host=host)] * 3
    return series(loads, started=STARTED, period_s=1.0, sampler_cpu_s=0.1)


def _measurement() -> Measurement:
    return Measurement(
        run="x", steps=_STEPS, tokens=2560, samples=40, parameters=124_000_000, world_size=2,
        strategy="1f1b", device="cpu", step_time_s=0.6, tokens_per_s=853.0, samples_per_s=13.0,
        model_flops_per_s=1e12, hardware_flops_per_s=1e12, mfu=None, hfu=None,
        peak_memory_bytes=2**30, peak_memory_by_rank=(2**30, 2**29), parts=_PARTS,
        parts_by_rank=(_PARTS,) * 2, first_loss=10.0, final_loss=2.0, sample="It is",
        utilisation=_loads(0).loads[:1], train_runtime=3.0, train_samples_per_second=13.0,
        train_steps_per_second=1.6, train_loss=4.0,
    )  # fmt: skip


def _memory() -> MemoryUse:
    peak = Moment(step=1, part="backward", module="blocks.0", operator="mm",
                  by_kind={"weights": 2**20, "activations": 2**21})  # fmt: skip
    account = MemoryAccount(
        source="traced", device="cpu", rank=0, world_size=2, peak=peak, timeline=(peak,) * 3,
        activations_by_module={"blocks.0": 2**21},
    )  # fmt: skip
    return MemoryUse(traced=account, measured=account.model_copy(update={"source": "measured"}))


def _certificate() -> Certificate:
    verdict = ParityVerdict(
        strategy="ddp", mesh="dp_replicate 2", precision="fp64", passed=True,
        worst_relative_difference=1e-12, worst_tensor="head.weight", tolerance=1e-9,
        bytes_on_wire=1000, bytes_formula=1000, collectives={"all-reduce": 1},
        collectives_formula=None, bytes_by_kind={"all-reduce": 1000}, bytes_by_kind_formula=None,
    )  # fmt: skip
    return Certificate(
        verdicts=(verdict,), model=preset("gpt2"), processes=2, steps=3, global_batch=8, seq_len=16,
        versions={"torch": "2.13.0"}, commit=None, uncommitted_changes=False, machine=MACHINE,
        date=STARTED, skipped={"horovod": "it is not installed"},
    )  # fmt: skip


def _lines(*records: Any) -> bytes:
    return b"".join(one.model_dump_json().encode() + b"\n" for one in records)


@cache
def runs() -> Sequence[Tree]:
    """A finished one with all that it may have, one that is cut short, one of a single process."""
    pipeline = Plan(strategy="1f1b", pp=2, pp_microbatches=4)
    evaluations = [Evaluation(step=step, loss=3.0, perplexity=20.0, tokens=99, tokens_per_s=9.0)
                   for step in (0, _STEPS)]  # fmt: skip
    steps = _lines(*map(_step, range(1, _STEPS + 1)))
    whole = {
        "run.json": of_record(_record(pipeline)),
        "metrics.jsonl": steps,
        "evals.jsonl": _lines(*evaluations),
        "result.json": of_record(_measurement()),
        "memory.json": of_record(_memory()),
        "certificate.json": of_record(_certificate()),
        "utilisation/host-0.json": of_record(_loads(0)),
        **{f"trace-rank{rank}.json": _trace(rank) for rank in (0, 1)},
    }
    failure = of_record(Failure(reason="the disk is full", ended=STARTED))
    cut = {name: whole[name] for name in ("run.json", "memory.json")}
    single = {"run.json": of_record(_record(Plan())), "metrics.jsonl": steps}
    left = json.loads(single["run.json"])
    left["settings"]["seq_len"] = None
    return [
        whole, {**cut, "metrics.jsonl": steps[:-40], "failure.json": failure}, single,
        {**single, "run.json": json.dumps(left).encode()},
    ]  # fmt: skip


def _trace(rank: int) -> bytes:
    """As --profile writes it: a step, and the actions of a pipeline's rank in it."""
    events = [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0, "dur": 99}]
    events += [
        {"ph": "X", "cat": "user_annotation", "name": traced_name(kind, rank), "ts": at, "dur": 1}
        for at, kind in enumerate("FB" * 4)
    ]
    return json.dumps({"traceEvents": events, "baseTimeNanoseconds": 0}).encode()


@cache
def reported() -> Sequence[Tree]:
    """What `outpace report` reads beside runs."""
    return [
        {"comparison.json": of_record(_comparison())},
        {"tuning.json": of_record(_tuning())},
        {"machine.json": of_record(_with_topology())},
        {"machine.json": of_record(MACHINE)},
        {"plans.json": of_record(Plan())},
        {"note.txt": b"nothing to report on"},
        {"note.txt": b"nothing", "run": b"to report on"},
        {"standstill.json": of_record(_standstill())},
        {"standstill.json": of_record(_standstill()), "note.txt": b"beside it"},
        {"run.json": of_record(_record(Plan()))},
        {"certificate.json": of_record(_certificate())},
        *({"plans.json": text} for text in _answers()),
    ]


def _standstill() -> HangReport:
    exchange = CollectiveEvent(group="all", number=3, name="all_reduce", state="started")
    ranks = tuple(
        RankSnapshot(rank=rank, host="a", pid=rank + 1, doing="step 3", state=state, place="x.py:3",
                 processes={0: "sleeping"}, stacks="main:\n", collectives=(exchange,))
        for rank, state in enumerate(get_args(State))
    )  # fmt: skip
    return HangReport(sentence="rank 1 on a does not come to it", when=STARTED, ranks=ranks)


def _comparison() -> Comparison:
    arms = (Arm(name="a"), Arm(name="b", settings={"strategy": "zero3"}, environment={"A": "1"}))
    claim = Claim(rounds=3, slowdown=0.1, low=0.05, high=0.2, level=0.95, claimed=True,
                  slower=True, alpha=0.05)  # fmt: skip
    result = ArmResult(
        arm="a", step_time_s=0.5, peak_memory_bytes=2**30, parts=_PARTS,
        peak_memory_by_rank=(2**30,), final_loss=2.0, facts={"torch": "2.13.0"},
    )  # fmt: skip
    return Comparison(
        experiment=Experiment(arms=arms, common={"model": "gpt2"}, price=2.0),
        command=("outpace", "compare", "a", "b"),
        arms=(result, result.model_copy(update={"arm": "b", "verdict": claim})),
        outcomes=tuple(Outcome(arm=arm.name, round=n, value=0.5 + n / 10, run=f"runs/{n}")
                       for n in range(3) for arm in arms),
        losses="Losses agree.", stopped="it is clear", took_s=9.0, machine=MACHINE, started=STARTED,
    )  # fmt: skip


def _tuning() -> Tuning:
    trials = tuple(
        PlanTrial(number=number, why="the planner's fastest", title=f"plan {number}", plan=Plan(),
              first_predicted_s=0.1 * number, predicted_s=0.12 * number, step_time_s=step_time_s,
              peak_memory_bytes=2**28, failure=failure, took_s=3.0, run=f"trial-{number}")
        for number, step_time_s, failure in ((1, 0.15, None), (2, None, "out of memory"))
    )  # fmt: skip
    return Tuning(
        settings={"model": "gpt2"}, trials=trials, best=1, default=2, gain=0.5, step_time_s=0.15,
        stopped="no plan left", considered=100, took_s=9.0, machine=MACHINE, started=STARTED,
        command=("outpace", "tune"),
    )  # fmt: skip


def _with_topology() -> Any:
    from outpace.probing.hardware.nvidia_smi import parse

    text = (TOPOLOGIES / "4x-gpu-4-nics.txt").read_text()
    return probed_machine().model_copy(update={"topology": parse(text, "nvidia-smi topo -m")})


def _answers() -> Iterator[bytes]:
    """As `outpace plan --json` prints it."""
    from outpace.jobs.planning.request import PlanQuestion, job
    from outpace.planner.plan import plans

    for keep in (None, "pp=2"):
        asked = PlanQuestion(model="gpt2", machine="hgx-h100", global_batch=64, keep=keep, count=2)
        answer = plans(job(asked))
        yield of_record(answer.model_copy(update={"took_s": 1.0, "rejected": answer.rejected[:2]}))


def small() -> tuple[Any, Any]:
    """A model, and its optimizer after a step."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@cache
def group() -> Any:
    """Of this process alone, for as long as it lives."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.new_group(backend="gloo")


def saver(folder: Path) -> Any:
    """A checkpointer that tells nobody."""
    from outpace.training.checkpoint import Checkpointer

    return Checkpointer(folder, 2, 0, group(), lambda _: None, lambda _: None)


@cache
def checkpoints() -> Sequence[Tree]:
    """Two whole ones with their markers, and without: those are marked when they have been broken.

    So what their checksums would find out comes to be loaded, too.
    """
    from outpace.training.checkpoint import MARKER, Progress

    with tempfile.TemporaryDirectory() as name, contextlib.closing(saver(Path(name))) as own:
        for step in (1, 2):
            progress = Progress(step=step, tokens=10, samples=1, loss_sum=1.5, skipped_steps=0,
                                scaler={"scale": 2.0}, first_loss=3.0, world_size=1)  # fmt: skip
            own.save(*small(), progress)
            own.wait()
        whole = files_of(Path(name))
    return [whole, {name: content for name, content in whole.items() if MARKER not in name}]


@cache
def texts() -> bytes:
    """That are kept as tokens."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS * 9)


@cache
def caches() -> Sequence[Tree]:
    """A text, and its tokens as they are kept for the next time."""
    from outpace.data.corpus import prepare

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "data.jsonl"
        path.write_bytes(texts())
        with contextlib.redirect_stdout(io.StringIO()):
            prepare((str(path),), cache_dir=Path(name) / "cache", **prepared())
        found = files_of(Path(name))
    left = (".lock", ".jsonl")
    whole = {name: content for name, content in found.items() if not name.endswith(left)}
    (place,) = (name for name in whole if name.endswith("index.json"))
    index = json.loads(whole[place])
    first, second = index["splits"]
    others = [copy.deepcopy(index) for _ in range(4)]
    del others[0]["splits"][first]
    others[1]["splits"][first]["documents"] = "other"
    others[2]["files"]["more"] = index["files"][index["splits"][first]["documents"]]
    others[3]["splits"][second]["tokens"] += 1
    changed = ({**whole, place: json.dumps(one).encode()} for one in others)
    return [whole, {"note": b"no cache"}, *changed]


def prepared() -> dict[str, Any]:
    """What else `prepare` is told."""
    return {"weights": None, "text_field": "text", "tokenizer": tokenizer(), "split": "all",
            "eval_fraction": 0.2, "processes": 0}  # fmt: skip
