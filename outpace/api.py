"""outpace's Python API: one function per command, which returns what the command prints.

Keywords are the command's options, with underscores instead of hyphens. All functions raise
BadInputError for an invalid request, and print hints to standard error. The examples run as tests,
in this order, in a folder with a file corpus.txt.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outpace.cli import options
from outpace.cli.output import tell_hint
from outpace.launch.launcher_env import ranks_from
from outpace.records.errors import BadInputError, suggest
from outpace.records.plan import Base, Plan
from outpace.records.precisions import Precision
from outpace.records.ranks import Ranks
from outpace.records.settings import Task, TrainSettings

if TYPE_CHECKING:
    from torch import nn

    from outpace.jobs.merge_adapter import MergedModel
    from outpace.records.comparison import Comparison
    from outpace.records.estimate import Plans, RankedPlan
    from outpace.records.finding import Examination
    from outpace.records.inventory import HostTopology
    from outpace.records.machine import Machine
    from outpace.records.measurement import Evaluation, Measurement
    from outpace.records.memory import MemoryAccount
    from outpace.records.network import NetworkReport
    from outpace.records.past_run import PastRun
    from outpace.records.tuning import Tuning
    from outpace.training.callbacks import Callback

ORIGIN = "python"


def train(
    model: "str | Path | nn.Module | Callable[[], Any] | None" = None,
    data: str | Path | Iterable[str | Path] | None = None,
    *,
    callbacks: "Sequence[Callback]" = (),
    progress: bool = True,
    **settings: Any,
) -> "Measurement":
    """Train a model and return the measurement, which has the directory of the run in `.run`.

    By default, train a small GPT on the source code of Python's standard library. `model` is a
    value of `--model`, a module, or a function that builds one. `data` is one or several values of
    `--data`. Other keywords are the options of `outpace train`: `steps=200`, `global_batch=32`,
    `nproc=2`, `out="runs/first"`, `resume=True`. `callbacks` are called on rank 0. With
    `progress=False`, no progress is printed. Under torchrun, call this function in every process;
    each process is one rank.

    Raises BadInputError for an invalid request, DivergedError if the loss becomes NaN or infinite,
    and InterruptedRunError if a signal ended the run, after its state has been saved.

    >>> first = outpace.train("outpace-tiny", "corpus.txt", steps=3, seq_len=32, out="first")
    >>> first.steps, first.run
    (3, 'first')
    """
    from outpace.cli.resume import require_inputs
    from outpace.jobs.train import job
    from outpace.jobs.train.auto_micro_batch import trial_runner
    from outpace.jobs.train.context import RunContext
    from outpace.launch import local

    _check_callbacks(callbacks)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A spawned data worker imports the caller's script again, and must not train. The training
        # process reports that the worker has ended.
        sys.exit(1)
    live = None if model is None or isinstance(model, (str, Path)) else model
    reference = model if live is None else _qualified_name(live)
    given = {"model": reference, "data": data, **settings}
    merged, origins = _merge_settings(given)
    require_inputs(merged, origins)
    ranks = ranks_from(os.environ)
    if ranks is None and (merged.nproc or 1) > 1:
        _refuse_in_new_processes(live, callbacks, merged.nproc or 1)
        return local.start_settings(merged, origins, merged.nproc or 1, progress)
    all_callbacks = [*_progress_callbacks(progress), *callbacks]
    context = RunContext(
        ranks=ranks or Ranks(),
        origins=origins,
        command=sys.argv,
        callbacks=all_callbacks if ranks is None or ranks.rank == 0 else [],
        model=live,
        attempt=trial_runner(os.environ),
    )
    return job.train(merged, context)


def generate(
    run: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    device: str = "auto",
    chat: bool = False,
    system: str | None = None,
) -> str:
    """Continue `prompt` with the model of a run, and return the text including the prompt.

    With `chat`, `prompt` is a user's message, and only the answer is returned. A `system` message
    implies `chat`. Raises BadInputError if the run's model cannot generate text.

    >>> outpace.generate("first", "the quick", max_new_tokens=2).startswith("the quick")
    True
    """
    from outpace.jobs import inference

    return inference.generate(
        Path(run),
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        device=device,
        chat=chat or system is not None,
        system=system,
        on_hint=tell_hint,
    )


def evaluate(
    run: str | Path,
    data: str | Path | Iterable[str | Path] | None = None,
    *,
    batches: int | None = None,
    batch_size: int | None = None,
    text_field: str | None = None,
    task: Task | None = None,
    seq_len: int | None = None,
    device: str = "auto",
) -> "Evaluation":
    """Measure the loss of a run's model on `data`, by default on the run's held-out data.

    `run` may also be a Hugging Face directory or an adapter. `batches` limits the number of batches
    of `batch_size` samples with `seq_len` tokens each; by default, all data is read, with the run's
    batch size and sequence length. `task` is "pretrain", "chat" or "classify"; the default is the
    run's, or "chat" if the data are conversations. Raises BadInputError if the model or the data
    cannot be read.

    >>> outpace.evaluate("first").loss > 0
    True
    """
    from outpace.jobs import inference

    return inference.evaluate(
        Path(run),
        None if data is None else _to_words(data),
        batches=batches,
        batch_size=batch_size,
        device=device,
        text_field=text_field,
        task=None if task is None else options.convert("task", task, "outpace.evaluate: task"),
        seq_len=seq_len,
        on_hint=tell_hint,
    )


def merge(
    adapter: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    base: Base | None = None,
    dtype: str = "fp32",
) -> "MergedModel":
    """Merge an adapter (a folder, or a run that trained one) into its base model, and write it.

    `out` is the folder for the merged model. `model` is the base model, by default the one that the
    adapter names. `base` is the format of its weights, "fp32" or "nf4", by default the one used in
    training. `dtype` is the dtype of the merged weights. Raises BadInputError if the adapter does
    not fit the model, or if `out` is not empty.

    >>> adapter = outpace.train("first", "corpus.txt", steps=1, seq_len=32, lora_rank=2).run
    >>> outpace.merge(adapter, "merged").model
    'merged'
    """
    from outpace.cli import merge as command

    asked = {"out": out, "model": model, "base": base, "dtype": dtype}
    return command.answer([*_format_keywords(asked), str(adapter)])


def plan(
    model: str | Path,
    machine: str | Path | None = None,
    *,
    nodes: int = 1,
    devices_per_node: int | None = None,
    network: str | None = None,
    host_memory: int | str | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Precision | None = None,
    keep: str | Mapping[str, Any] | None = None,
    vary: str | Sequence[str] | None = None,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    lora_targets: str | Sequence[str] | None = None,
    lora_dropout: float | None = None,
    base: Base | None = None,
    max_tp: int | None = None,
    trainer: str | None = None,
    trained: bool = False,
    may_idle: bool = False,
    tokens: int | None = None,
    price: float | None = None,
    count: int = 5,
) -> "Plans":
    """Predict the fastest plans for training a model on given machines.

    `machine` is a name in the catalog ("hgx-h100", "4xrtx-3090"), or a file that `probe` wrote;
    None stands for this machine. `host_memory` is the memory of a node's host, in bytes or as
    "2TiB"; plans may offload to it. `keep` are settings that every plan must have, and `vary`
    settings that are searched in addition. With `lora_rank`, plans train adapters of `lora_targets`
    on frozen weights in the format `base`. `price` is per device and hour, and needs `tokens`.

    The result's `plans` each have a `title`, the `plan`, `why` it is listed, and its `estimate`
    (`step_time_s`, `tokens_per_s`, `peak_memory_bytes`, …). Times are in seconds, memory in bytes.

    >>> found = outpace.plan("gpt2", "rtx-4090", seq_len=1024)
    >>> found.plans[0].estimate.fits
    True
    >>> found.plans[0].plan.world_size
    1
    """
    from outpace.cli import plan as command

    asked = {
        "model": model, "machine": machine, "nodes": nodes, "devices_per_node": devices_per_node,
        "network": network, "host_memory": host_memory, "seq_len": seq_len,
        "global_batch": global_batch, "precision": precision, "keep": _format_pairs(keep),
        "vary": _join_with_commas(vary), "lora_rank": lora_rank, "lora_alpha": lora_alpha,
        "lora_targets": _join_with_commas(lora_targets), "lora_dropout": lora_dropout,
        "base": base, "max_tp": max_tp,
        "trainer": trainer, "trained": trained, "may_idle": may_idle, "tokens": tokens,
        "price": price, "count": count,
    }  # fmt: skip
    return command.answer(_format_keywords(asked))


def estimate(
    model: str | Path,
    plan: Plan | str | Path,
    machine: str | Path | None = None,
    *,
    nodes: int = 1,
    devices_per_node: int | None = None,
    network: str | None = None,
    host_memory: int | str | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    depth: Literal["estimate", "trace"] = "estimate",
) -> "RankedPlan":
    """Estimate the step time and memory of a plan (a Plan or a file), and whether it fits.

    A plan file also holds the sequence length and the global batch for which the plan was made. For
    a Plan, pass both as `seq_len` and `global_batch`. With depth "trace", the model is run with
    fake tensors, which gives the exact peak memory of its tensors.

    >>> ddp = outpace.Plan(strategy="ddp", dp_replicate=8, micro_batch=4, precision="bf16")
    >>> found = outpace.estimate("gpt2", ddp, "hgx-h100", seq_len=1024, global_batch=64)
    >>> found.estimate.fits
    True
    """
    from outpace.cli import estimate as command
    from outpace.records.plan import PlanFile

    if not isinstance(plan, (Plan, str, Path)):
        raise BadInputError(f"plan is {plan!r}. Pass an outpace.Plan, or a file that contains one.")
    if isinstance(plan, Plan):
        name, file = "the plan", PlanFile.from_plan(plan, seq_len, global_batch)
    else:
        name, file = str(plan), PlanFile.load(Path(plan))
    asked = {
        "model": model, "machine": machine, "nodes": nodes, "devices_per_node": devices_per_node,
        "network": network, "host_memory": host_memory, "seq_len": seq_len,
        "global_batch": global_batch, "depth": depth, "plan": name,
    }  # fmt: skip
    return command.answer(_format_keywords(asked), file)


def memory(
    model: str | Path,
    machine: str | None = None,
    *,
    nodes: int | None = None,
    rank: int | None = None,
    **settings: Any,
) -> "MemoryAccount":
    """Trace which tensors use memory in a training step, on `rank` or on the rank that needs most.

    `model` may be "file.py:build". `machine` is a name in the catalog; without it, the figures are
    for `nproc` processes on this host's CPUs. Other keywords are as for `train`. All figures are in
    bytes.

    >>> outpace.memory("outpace-tiny", "rtx-4090", seq_len=64).peak_memory_bytes > 0
    True
    """
    from outpace.cli import memory as command

    asked = {"model": model, "machine": machine, "nodes": nodes, "rank": rank}
    return command.answer([*_format_keywords(asked), *_format_settings(settings)])


def network(
    model: str | Path,
    machine: str | None = None,
    *,
    network: str | Sequence[str] = (),
    **asked: Any,
) -> "NetworkReport":
    """Estimate the network bandwidth that training needs, and the step time on other networks.

    `network` is one network, such as "50Gbit/s", or several to compare. The last one replaces the
    machine's own network. Other keywords are the options of `outpace network`: `nodes`, `plan`,
    `probe`, `seq_len`, ….

    >>> outpace.network("gpt2", "hgx-h100", nodes=2).needs[0].title
    'DDP'
    """
    from outpace.cli import network as command

    links = [network] if isinstance(network, str) else network
    words = [f"--network={one}" for one in links]
    return command.answer(
        [*_format_keywords({"model": model, "machine": machine, **asked}), *words]
    )


def topology(
    file: str | Path | None = None, *, nvlink: str | None = None, timeout_s: float = 20.0
) -> "HostTopology":
    """Return how this host's devices are connected, and which GPUs to group for communication.

    To look at another host, pass as `file` the output of `nvidia-smi topo -m` there. `nvlink` is
    the generation of its NVLinks, 2 to 5.

    >>> outpace.topology().cpu.cpu_count > 0
    True
    """
    from outpace.probing.hardware.host_topology import read_topology

    return read_topology(None if file is None else Path(file), nvlink, timeout_s)


def doctor(run: str | Path | None = None, *, timeout_s: float = 20.0) -> "Examination":
    """Return what slows this host down, or what limited the speed of a run, worst first.

    >>> isinstance(outpace.doctor().findings, tuple)
    True
    """
    if run is not None:
        from outpace.reporting.data.run_folder import read_run
        from outpace.reporting.run_findings import run_examination

        return run_examination(read_run(Path(run)))
    from outpace.probing.doctor.examine import examine
    from outpace.probing.hardware.inventory import gather

    return examine(gather(os.environ, timeout_s=timeout_s))


def probe(
    *sections: str,
    quick: bool = False,
    budget_s: float | None = None,
    out: str | Path | None = None,
    **settings: Any,
) -> "Machine":
    """Measure this machine: matmuls, memory, links, disks, data loading and training steps.

    `sections` are any of "matmul", "memory", "storage", "loader", "collectives" and "steps", by
    default all. `quick` takes less than a minute; `budget_s` sets the number of seconds. `out` is a
    file for the result, which `plan` accepts as `machine`. Other keywords are the options of
    `outpace probe`: `device`, `nproc`, ….

    >>> outpace.probe("memory", quick=True, budget_s=1, device="cpu").probed is not None
    True
    """
    from outpace.cli import probe as command

    return command.probe_machine(sections, quick, budget_s, _to_path(out), settings)


def compare(*arms: str | Path, progress: bool = True, **settings: Any) -> "Comparison":
    """Compare the speed of several ways to train ("arms"), which are run in turn.

    Rounds are run until it is clear which arms are faster, or until a limit is reached. An arm is a
    strategy ("zero3"), settings ("precision=bf16") or a run's directory; an experiment.toml
    describes all arms. Finished runs are compared without running anything. Keywords are the
    options of `outpace compare` and `outpace train`.

    >>> two = [outpace.train("outpace-tiny", "corpus.txt", steps=12, seed=seed, seq_len=32).run
    ...        for seed in (0, 1)]
    >>> len(outpace.compare(*two).arms)
    2
    """
    from outpace.cli.compare import run_comparison

    words = [str(arm) for arm in arms]
    return run_comparison([*words, *_format_settings(settings)], quiet=not progress)


def tune(**settings: Any) -> "Tuning":
    """Find the fastest plan for a training run on this machine with short trials.

    Keywords are the options of `outpace tune` (`trials`, `budget`, `within`) and `outpace train`.
    `out` is the directory for plan.json.

    >>> found = outpace.tune(model="outpace-tiny", data="corpus.txt", trials=1, seq_len=32,
    ...                      device="cpu", nproc=1)
    >>> found.fastest.step_time_s > 0
    True
    """
    from outpace.cli.tune import run_tuning

    return run_tuning(_format_settings(settings))


def runs(
    *folders: str | Path, where: Sequence[str] = (), sort: str | None = None, reverse: bool = False
) -> "list[PastRun]":
    """List past runs in `folders`, newest first, or sorted by the field `sort`.

    `where` has conditions, such as "steps=12", all of which must hold.

    >>> [run.steps for run in outpace.runs(where=["steps=12"])]
    [12, 12]
    """
    from outpace.cli.runs import search_folders, select
    from outpace.experiment.past_runs import find_runs

    found = find_runs(search_folders([Path(folder) for folder in folders]))
    return [one.row for one in select(found, where, sort, reverse)]


def report(
    *paths: str | Path,
    out: str | Path | None = None,
    format: Literal["html", "md", "csv", "png"] | None = None,
    browser: str | None = None,
) -> Path:
    """Write a report of runs, comparisons, tunings, plans or probes, and return its path.

    >>> outpace.report(outpace.runs()[0].path, out="run.html").stat().st_size > 10_000
    True
    """
    from outpace.cli.report import write_report

    if not paths:
        raise BadInputError("outpace.report: pass a run, or another record to report on.")
    return write_report([Path(path) for path in paths], _to_path(out), format, browser)


def _check_callbacks(callbacks: "Sequence[Callback]") -> None:
    from outpace.training.callbacks import Callback

    wanted = "callbacks must be a list of outpace.Callback objects, such as callbacks=[Mine()]"
    if isinstance(callbacks, Callback):
        raise BadInputError(f"{wanted}, not a single callback")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise BadInputError(f"{wanted}; {callback!r} is not a Callback")


def _merge_settings(keywords: dict[str, Any]) -> tuple[TrainSettings, dict[str, str]]:
    from outpace.cli.train import merge

    fields = TrainSettings.model_fields
    for name in keywords:
        if name not in fields:
            raise BadInputError(
                f"outpace.train has no keyword {name!r}.{suggest(name, fields)} "
                "The keywords are the options of outpace train, with underscores for hyphens."
            )
    values = {
        name: options.convert(name, _to_json_value(value), f"outpace.train: {name}")
        for name, value in keywords.items()
        if value is not None
    }
    return merge({ORIGIN: values})


def _to_path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _format_pairs(settings: str | Mapping[str, Any] | None) -> str | None:
    """Format a mapping of settings as "precision=bf16,tp=2"; return text or None unchanged."""
    if settings is None or isinstance(settings, str):
        return settings
    return ",".join(f"{name}={value}" for name, value in settings.items())


def _join_with_commas(words: str | Sequence[str] | None) -> str | None:
    return words if words is None or isinstance(words, str) else ",".join(words)


def _format_keywords(keywords: Mapping[str, Any]) -> list[str]:
    """Format keywords as command-line options: True as a flag; False and None are left out."""
    values = {name: value for name, value in keywords.items() if value is not None}
    return [
        options.flag(name) if value is True else f"{options.flag(name)}={value}"
        for name, value in values.items()
        if value is not False
    ]


def _format_settings(settings: Mapping[str, Any]) -> list[str]:
    return options.as_flags({name: _to_json_value(value) for name, value in settings.items()})


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_to_json_value(part) for part in value] if isinstance(value, (list, tuple)) else value


def _to_words(value: str | Path | Iterable[str | Path]) -> tuple[str, ...]:
    return (str(value),) if isinstance(value, (str, Path)) else tuple(str(part) for part in value)


def _qualified_name(model: object) -> str:
    """Return the name under which run.json records a module, or a function that builds one."""
    from torch import nn

    kind = model if callable(model) and not isinstance(model, nn.Module) else type(model)
    return f"python:{getattr(kind, '__qualname__', type(model).__qualname__)}"


def _refuse_in_new_processes(model: object, callbacks: "Sequence[Callback]", nproc: int) -> None:
    """Raise BadInputError for a module or callbacks, because `nproc` > 1 starts new processes.

    Objects of this process cannot be passed to them.
    """
    if model is not None:
        raise BadInputError(
            f"nproc={nproc} starts new processes, which cannot use a module of this one. Pass its "
            "source instead (model='file.py:build'), or start your program with torchrun."
        )
    if callbacks:
        raise BadInputError(
            f"nproc={nproc} starts new processes, which cannot call callbacks of this one. Start "
            "your program with torchrun --nproc-per-node instead, or read metrics.jsonl."
        )


def _progress_callbacks(enabled: bool) -> "list[Callback]":
    from outpace.reporting.terminal.progress import TrainingProgress

    return [TrainingProgress()] if enabled else []
