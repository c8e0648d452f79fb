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

# Batches between checks for other ranks' signals: rare enough not to cost time.
_ASK_EVERY = 8


class EvaluationStopped(Exception):  # noqa: N818  # not an error, on any rank
    """Evaluation stopped on every rank, without a result, because one was asked to stop."""


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
    """Return the mean loss per target of all ranks over `steps` (lists of micro-batches).

    The result includes the objective's metrics, if any. Dropout is off. Each rank passes its own
    share of the data, and all ranks pass the same number of steps. Raises EvaluationStopped on all
    ranks if `stop` returns True on any of them.
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
    for part in found:  # at the end, since reading them waits for the device
        totals[: len(part)] += part.cpu()  # ranks without the output have two zeros
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
    """Return whether the flag is set on any rank."""
    if group is None or group.size() == 1:
        return flag
    flags = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return bool(flags)
