"""Evaluation: the loss on held-out data."""

import math
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from outpace.nn.compilation import without_compilation
from outpace.nn.evaluation_mode import evaluation_mode
from outpace.nn.mixed_precision import MixedPrecision
from outpace.parallel import Layout, StepHooks
from outpace.parallel.layout import divisor
from outpace.records.measurement import Evaluation
from outpace.training.step import Batch

# Steps between checks for stop requests on other ranks, so that the checks cost little time.
_ASK_EVERY = 8


class EvaluationStopped(Exception):  # noqa: N818  # not an error
    """The evaluation stopped on every rank without a result, because one was asked to stop."""


def evaluate(
    layout: Layout,
    steps: Iterable[list[Batch]],
    *,
    step: int,
    mixed: MixedPrecision,
    device: torch.device,
    group: dist.ProcessGroup | None,
    stop: Callable[[], bool] | None = None,
) -> Evaluation:
    """Return the mean loss per target over all ranks, and the objective's metrics, if any.

    `steps` are lists of micro-batches: this rank's part of the data, with the same number of steps
    on all ranks. Dropout is off. Raises EvaluationStopped on all ranks if `stop` returns True on
    any of them.
    """
    names: Sequence[str] = getattr(layout.objective, "sums", ())
    totals = torch.zeros(2 + len(names), dtype=torch.float64)
    found: list[torch.Tensor] = []
    began_s = time.perf_counter()
    objective = layout.objective
    with evaluation_mode(objective), torch.no_grad(), without_compilation(objective):
        for number, batches in enumerate(steps, 1):
            for batch in batches:
                found.append(layout.evaluate(batch, StepHooks(mixed.cast)))
            if stop is not None and number % _ASK_EVERY == 0 and _is_on_any_rank(stop(), group):
                layout.free_gathered()
                raise EvaluationStopped
    layout.free_gathered()
    for part in found:  # at the end, because this waits for the device
        totals[: len(part)] += part.cpu()  # pipeline ranks without the output have two zeros
    if group is not None:
        dist.all_reduce(totals, group=group)
    took_s = time.perf_counter() - began_s
    loss = float(totals[0] / divisor(totals[1]))
    count = int(totals[1])
    sums = dict(zip(names, totals[2:].tolist(), strict=True))
    return Evaluation(
        step=step,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        tokens=count,
        tokens_per_s=count / took_s,
        sums=sums,
        metrics=layout.objective.metrics(sums, count) if names else {},  # type: ignore[operator]
    )


def _is_on_any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether the flag is set on any rank. Collective."""
    if group is None or group.size() == 1:
        return flag
    flags = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return bool(flags)
