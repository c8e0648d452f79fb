"""The same from Python: what `outpace.train`, `outpace.generate` and `outpace.evaluate` call."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from outpace.cli import options
from outpace.cli.resume import require_inputs
from outpace.cli.train import merge
from outpace.launch import job, local, use
from outpace.launch.environment import ranks_from, restart_count
from outpace.launch.micro_batch import trier
from outpace.records.errors import BadInputError, nearest
from outpace.records.measurement import Evaluation, Measurement
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.train.callbacks import Callback

ORIGIN = "python"


def train(
    model: str | Path | nn.Module | Callable[[], Any] | None = None,
    data: str | Path | Iterable[str | Path] | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    **settings: Any,
) -> Measurement:
    """Train a model and return what was measured; `.run` is the directory of the run.

    Without arguments: a small GPT on Python's own source. `model` is what `--model` takes, a live
    module, or a function that builds one. `data` is what `--data` takes, one or several. Every
    flag of `outpace train` is a keyword: `steps=200`, `global_batch=32`, `nproc=2`,
    `out="runs/first"`, `resume=True`. `callbacks` are called on rank 0; `progress=False` silences
    the lines on standard error. Under torchrun each process calls this and is one rank.

    Raises BadInputError for what cannot be done as asked, DivergedError when the loss becomes
    NaN or infinite, InterruptedRunError when a signal ended the run after a save.
    """
    _check_callbacks(callbacks)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A loader's worker that is spawned runs the script again, and would train itself. Its end
        # is what the process that trains hears of.
        sys.exit(1)
    live = None if model is None or isinstance(model, (str, Path)) else model
    reference = model if live is None else _name_of(live)
    given = {"model": reference, "data": data, **settings}
    merged, origins = _merge(given)
    require_inputs(merged, origins)
    ranks = ranks_from(os.environ)
    if ranks is None and (merged.nproc or 1) > 1:
        _check_startable(live, callbacks, merged.nproc or 1)
        return local.start_settings(merged, origins, merged.nproc or 1, progress)
    heard = [*_progress(progress), *callbacks]
    return job.train(
        merged,
        ranks=ranks or Ranks(),
        origins=origins,
        command=sys.argv,
        callbacks=heard if ranks is None or ranks.rank == 0 else [],
        restart=restart_count(os.environ),
        model=live,
        attempt=trier(os.environ),
    )


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse what is not a sequence of Callback objects."""
    wanted = "callbacks is a list of objects of outpace.Callback, as in callbacks=[Mine()]"
    if isinstance(callbacks, Callback):
        raise BadInputError(f"{wanted}; one alone was given")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise BadInputError(f"{wanted}; {callback!r} is not one")


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
) -> str:
    """Continue `prompt` with the model of a run, and return the text. Raises BadInputError.

    With `chat` the prompt is what a user says, and the answer is returned.
    """
    return use.generate(
        Path(run),
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        device=device,
        chat=chat,
    )


def evaluate(
    run: str | Path,
    data: str | Path | Iterable[str | Path] | None = None,
    *,
    batches: int | None = None,
    batch_size: int | None = None,
    text_field: str | None = None,
    device: str = "auto",
) -> Evaluation:
    """Measure the loss of a run's model on `data`, or on what the run held out.

    `batches` of `batch_size` samples are read; by default all there are, in the run's batches.
    Raises BadInputError.
    """
    return use.evaluate(
        Path(run),
        None if data is None else _words(data),
        batches=batches,
        batch_size=batch_size,
        device=device,
        text_field=text_field,
    )


def _merge(given: dict[str, Any]) -> tuple[TrainSettings, dict[str, str]]:
    fields = TrainSettings.model_fields
    for name in given:
        if name not in fields:
            raise BadInputError(
                f"outpace.train has no keyword {name!r}.{nearest(name, fields)} "
                "The keywords are the flags of outpace train, with _ for -."
            )
    values = {
        name: options.convert(name, _plain(value), f"outpace.train: {name}")
        for name, value in given.items()
        if value is not None
    }
    return merge({ORIGIN: values})


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _words(value: str | Path | Iterable[str | Path]) -> tuple[str, ...]:
    return (str(value),) if isinstance(value, (str, Path)) else tuple(str(part) for part in value)


def _name_of(live: object) -> str:
    """How run.json names a model that lives in the caller's program."""
    kind = live if callable(live) and not isinstance(live, nn.Module) else type(live)
    return f"python:{getattr(kind, '__qualname__', type(live).__qualname__)}"


def _check_startable(live: object, callbacks: Sequence[Callback], nproc: int) -> None:
    """Refuse what cannot be carried to other processes. Raises BadInputError."""
    if live is not None:
        raise BadInputError(
            f"nproc={nproc} starts new processes, and a live model cannot be carried there. Name "
            "it instead (model='file.py:build'), or start your program with torchrun."
        )
    if callbacks:
        raise BadInputError(
            f"nproc={nproc} starts new processes, and callbacks stay in this one. Start your "
            "program with torchrun --nproc-per-node instead, or read metrics.jsonl."
        )


def _progress(wanted: bool) -> list[Callback]:
    from outpace.report.progress import Progress

    return [Progress()] if wanted else []
