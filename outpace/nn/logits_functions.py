"""Eager and compiled functions that overwrite logits with the gradient of their loss."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.nn.compilation import copy_with_code
from outpace.nn.torch_versions import compiler_reads_before_it_writes
from outpace.records.errors import error_summary

# Bytes of temporary fp32 logits in the eager functions.
BLOCK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class LogitsFunctions:
    """Functions that read and write logits (N, P), of which all but `vocab` columns are padding.

    `columns_N`: the column of each target, −1 if these logits do not contain it. `counts_N`:
    whether a token has a target at all.

    - `scores(logits_NP, columns_N, vocab)`: log Σ exp and the targets' logits (0 for no target),
      both (N), in at least fp32.
    - `gradient(logits_NP, lse_N, columns_N, scales_N, vocab)`: overwrites the logits with
      (softmax − one-hot) · scale. Call it after `scores`.
    - `loss_and_gradient(logits_NP, columns_N, counts_N, vocab)`: returns the sum of losses, and
      overwrites the logits with its gradient.
    """

    scores: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, int], None]
    loss_and_gradient: Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _scores(logits_NP: Tensor, columns_N: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    # Compiled, this is one kernel over the logits and one for the targets.
    return _log_sum_exp(logits_NP, vocab), _targets_logits(logits_NP, columns_N)


def _log_sum_exp(logits_NP: Tensor, vocab: int) -> Tensor:
    wide_NP = _fill_padding(_to_fp32_or_wider(logits_NP), vocab, -torch.inf)
    largest_N1 = wide_NP.amax(1, keepdim=True)
    sums_N1 = (wide_NP - largest_N1).exp().sum(1, keepdim=True)  # a pattern that Inductor fuses
    return (largest_N1 + sums_N1.log()).squeeze(1)


def _gradient(
    logits_NP: Tensor, lse_N: Tensor, columns_N: Tensor, scales_N: Tensor, vocab: int
) -> None:
    # Padded columns are set to 0, because exp(0 − lse) may be infinite there.
    p_NP = _fill_padding((_to_fp32_or_wider(logits_NP) - lse_N.unsqueeze(1)).exp(), vocab, 0.0)
    at_NP = torch.arange(logits_NP.shape[1], device=p_NP.device) == columns_N.unsqueeze(1)
    logits_NP.copy_((p_NP - at_NP.to(p_NP.dtype)) * scales_N.unsqueeze(1))


def _loss_and_gradient(
    logits_NP: Tensor,
    columns_N: Tensor,
    counts_N: Tensor,
    vocab: int,
    targets_logits_N: Tensor | None = None,
) -> Tensor:
    own_N = _targets_logits(logits_NP, columns_N) if targets_logits_N is None else targets_logits_N
    lse_N = _log_sum_exp(logits_NP, vocab)
    loss = ((lse_N - own_N) * counts_N).sum()
    _gradient(logits_NP, lse_N, columns_N, counts_N.to(lse_N.dtype), vocab)
    return loss


def _fill_padding(values_NP: Tensor, vocab: int, value: float) -> Tensor:
    if values_NP.shape[1] == vocab:
        return values_NP
    real_P = torch.arange(values_NP.shape[1], device=values_NP.device) < vocab
    return torch.where(real_P, values_NP, value)


def _targets_logits(logits_NP: Tensor, columns_N: Tensor) -> Tensor:
    own_N = _to_fp32_or_wider(logits_NP.gather(1, columns_N.clamp(min=0).unsqueeze(1)).squeeze(1))
    return torch.where(columns_N >= 0, own_N, 0.0)


def _to_fp32_or_wider(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _eager_scores(logits_NP: Tensor, columns_N: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    logits_NP[:, vocab:] = -torch.inf
    own_N = _targets_logits(logits_NP, columns_N)
    parts = []
    for rows in _row_blocks(logits_NP):
        largest_R1 = logits_NP[rows].amax(1, keepdim=True)
        exps_RP = logits_NP[rows].to(own_N.dtype, copy=True).sub_(largest_R1).exp_()
        parts.append(exps_RP.sum(1).log_().add_(largest_R1.squeeze(1)))
        del exps_RP  # before the next block is computed
    return torch.cat(parts), own_N


def _eager_gradient(
    logits_NP: Tensor, lse_N: Tensor, columns_N: Tensor, scales_N: Tensor, vocab: int
) -> None:
    for rows in _row_blocks(logits_NP):
        p_RP = _to_fp32_or_wider(logits_NP[rows]).sub_(lse_N[rows].unsqueeze(1)).exp_()
        _subtract_one_hot(p_RP, columns_N[rows])
        torch.mul(p_RP, scales_N[rows].unsqueeze(1), out=logits_NP[rows])
        del p_RP  # before the next block is computed


def _eager_loss_and_gradient(
    logits_NP: Tensor,
    columns_N: Tensor,
    counts_N: Tensor,
    vocab: int,
    targets_logits_N: Tensor | None = None,
) -> Tensor:
    logits_NP[:, vocab:] = -torch.inf
    own_N = _targets_logits(logits_NP, columns_N) if targets_logits_N is None else targets_logits_N
    loss = own_N.new_zeros(())
    for rows in _row_blocks(logits_NP):
        # log Σ exp is the largest logit minus its log softmax.
        largest_R, at_R = logits_NP[rows].max(1)
        p_RP = logits_NP[rows].softmax(1, dtype=own_N.dtype)
        lse_R = _to_fp32_or_wider(largest_R) - p_RP.gather(1, at_R.unsqueeze(1)).squeeze(1).log()
        loss += ((lse_R - own_N[rows]) * counts_N[rows]).sum()
        _subtract_one_hot(p_RP, columns_N[rows])
        torch.mul(p_RP, counts_N[rows].unsqueeze(1), out=logits_NP[rows])
        del p_RP  # before the next block is computed
    return loss


def _subtract_one_hot(p_RP: Tensor, columns_R: Tensor) -> None:
    ones_R = (columns_R >= 0).to(p_RP.dtype)
    p_RP.scatter_add_(1, columns_R.clamp(min=0).unsqueeze(1), -ones_R.unsqueeze(1))


def _row_blocks(logits_NP: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK_BYTES // (4 * logits_NP.shape[1]))
    for start in range(0, len(logits_NP), rows):
        yield slice(start, start + rows)


EAGER = LogitsFunctions(_eager_scores, _eager_gradient, _eager_loss_and_gradient)


class CompiledPass:
    """A function compiled for each shape, with an eager fallback if the compiler fails.

    Shapes beyond torch's recompile limit (8 by default) also run eagerly.
    """

    def __init__(self, function: Callable[..., Any], eager: Callable[..., Any]) -> None:
        self._compiled = torch.compile(copy_with_code(function), fullgraph=True, dynamic=False)
        self._eager = eager
        self._failed = False
        self._too_many: set[torch.Size] = set()

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function, or the eager one if it cannot be compiled."""
        if self._failed or args[0].shape in self._too_many:
            return self._eager(*args)
        try:
            return self._compiled(*args)
        except _compiler_errors() as error:  # before anything is computed
            if _is_recompile_limit(error):
                self._too_many.add(args[0].shape)
                return self._eager(*args)
            self._failed = True
            warnings.warn(
                f"torch.compile fails on the loss ({error_summary(error)}), so the loss runs "
                "uncompiled. Avoid the attempt with --no-compile.",
                stacklevel=2,
            )
            return self._eager(*args)


def _compiler_errors() -> tuple[type[Exception], ...]:
    """Return the compiler's error types, which loads it: call this only after an error."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return (TorchDynamoException, FailOnRecompileLimitHit)


def _is_recompile_limit(error: Exception) -> bool:
    text = f"{type(error).__name__} {error}".lower()  # as of torch 2.13
    return "recompilelimit" in text or "recompile limit" in text


def compiled_passes() -> LogitsFunctions:
    """Return functions that are compiled at their first call. This loads the compiler."""
    both = CompiledPass(_loss_and_gradient, EAGER.loss_and_gradient)
    return LogitsFunctions(
        CompiledPass(_scores, EAGER.scores),
        CompiledPass(_gradient, EAGER.gradient),
        both if compiler_reads_before_it_writes() else _with_targets_logits_first(both),
    )


def _with_targets_logits_first(compiled: CompiledPass) -> Callable[..., Tensor]:
    """Wrap `compiled` so that a separate kernel reads the targets' logits before it runs.

    Before torch 2.13, compiled code overwrites these logits with the gradient too early.
    """

    def loss_and_gradient(
        logits_NP: Tensor, columns_N: Tensor, counts_N: Tensor, vocab: int
    ) -> Tensor:
        targets_logits_N = _targets_logits(logits_NP, columns_N)
        loss: Tensor = compiled(logits_NP, columns_N, counts_N, vocab, targets_logits_N)
        return loss

    return loss_and_gradient
