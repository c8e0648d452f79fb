"""Cross-entropy over the vocabulary, whole or in chunks that never hold all logits.

Legend: N tokens (B·S), D hidden width, V vocabulary.

Accelerators use `head_loss`. On a CPU, large logits are computed in chunks: in bf16, by `low_loss`,
above 256 MiB of logits; in fp32 (also for fp16), with gradients accumulated in place, above 32 MiB.

torch's chunked operator (`F.linear_cross_entropy`, since 2.13) is not used: it sums the loss in the
dtype of its input, so a bf16 sum over 2,048 tokens is off by up to 0.4 % and an fp16 sum above
65,504 is infinite; and torch 2.11 lacks it.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.nn.bf16_loss import IGNORED as IGNORED
from outpace.nn.bf16_loss import gradient_in_place, low_loss
from outpace.nn.block import to_fp32
from outpace.nn.head_loss import head_loss_sum
from outpace.nn.logits_functions import EAGER, LogitsFunctions, compiled_passes
from outpace.nn.transformer import Transformer

LossKind = Literal["auto", "plain", "chunked"]

_CPUS = ("cpu", "meta")

CHUNK_ROWS = 512
# "auto" uses chunks from this many bytes of fp32 logits. Measured on a 2-core Xeon (fp32, D 256):
# plain and chunked take equal time at 8 MiB (V 512 × 4,096 tokens); chunked takes 0.52 of the time
# at 64 MiB (V 4,096) and 0.58 at 128 MiB (V 8,192). Smaller logits fit the caches.
CHUNK_FROM_BYTES_CPU = 32 * 2**20
# Up to this size, 16-bit logits are computed at once on a CPU, as their gradient replaces them.
LOW_LOGITS_BYTES_CPU = 256 * 2**20


class LanguageModelObjective(nn.Module):
    """A transformer with its loss, for a strategy to wrap.

    `compute_dtype` is the dtype of the head's matmuls (None: fp32), since the loss ignores
    autocast. `loss`: "plain" holds all logits, "chunked" never does, "auto" decides by their size
    and by `runs_on`, the device type of training (tensors may be traced on another). `compiles`:
    whether to compile the functions on logits, on an accelerator. `passes` are the compiled
    functions, or replacements.
    """

    runs_on: str | None = None
    passes: LogitsFunctions | None = None

    def __init__(
        self,
        model: Transformer,
        loss: LossKind = "auto",
        compute_dtype: torch.dtype | None = None,
        compiles: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.compute_dtype = compute_dtype
        self.compiles = compiles

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of losses in nats (fp32, with gradient) and the number of targets (int64).

        `batch` has int64 `tokens` and `targets` (B, S), with −100 for no target, and optionally
        `documents`, `segments`, `padding_mask` (B, S) and `positions`.
        """
        return self.loss_from_hidden(self.hidden_states(batch), batch["targets"])

    def hidden_states(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the model's hidden states (B, S, D). `batch` needs no targets."""
        hidden_BSD: Tensor = self.model(
            batch["tokens"],
            batch.get("documents"),
            batch.get("segments"),
            batch.get("padding_mask"),
            positions=batch.get("positions"),
        )
        return hidden_BSD

    def loss_from_hidden(self, hidden_BSD: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the result of `forward` from the model's hidden states."""
        targets_N = targets_BS.flatten()
        loss_sum = linear_loss_sum(
            hidden_BSD.flatten(0, -2),
            self.model.head_weight,
            self.model.head_bias,
            targets_N,
            self.loss,
            self.compute_dtype,
            self.runs_on,
            self.functions_for(hidden_BSD.device.type),
        )
        return loss_sum, (targets_N != IGNORED).sum()

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on an accelerator, or traced as if it were."""
        return (self.runs_on or tensor.device.type) not in _CPUS

    def functions_for(self, device_type: str) -> LogitsFunctions:
        """Return the functions that read and write logits, compiled or eager.

        They are compiled on an accelerator if `compiles` is set, except without gradients, as in
        evaluation. On a CPU, whose loss does not use them, the compiler is not loaded.
        """
        eager = not self.compiles or not torch.is_grad_enabled()
        if eager or (self.runs_on or device_type) in _CPUS:
            return EAGER
        if self.passes is None:
            self.passes = compiled_passes()
        return self.passes


def linear_loss_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    kind: LossKind = "auto",
    dtype: torch.dtype | None = None,
    runs_on: str | None = None,
    passes: LogitsFunctions = EAGER,
) -> Tensor:
    """Return the sum over targets of −log softmax(hidden · weightᵀ + bias)[target], with gradient.

    The sum is in fp32. Targets of −100 are ignored; if all are, the loss is 0. `dtype` is the dtype
    of the matmuls, `runs_on` the device type to optimize for (None: that of the tensors), and
    `passes` the functions on logits for an accelerator.
    """
    if (runs_on or hidden_ND.device.type) not in _CPUS:
        return head_loss_sum(hidden_ND, weight_VD, bias_V, targets_N, kind, dtype, passes)
    rows, vocab = hidden_ND.shape[0], weight_VD.shape[0]
    low = None if dtype in (None, torch.float32) else dtype
    if kind == "auto" and low == torch.bfloat16 and rows <= _most_whole_rows(vocab):
        whole: Tensor = low_loss(hidden_ND, weight_VD, bias_V, targets_N)[0]
        return whole
    if kind == "plain" or (kind == "auto" and not prefers_chunks(rows, vocab)):
        return _plain_sum(hidden_ND, weight_VD, bias_V, targets_N, low)
    if low != torch.bfloat16:
        return _fp32_chunked_sum(hidden_ND, weight_VD, bias_V, targets_N)
    chunk_rows = CHUNK_ROWS if kind == "chunked" else _most_whole_rows(vocab)
    track = torch.is_grad_enabled()
    loss_sum: Tensor = ChunkedSum.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, bias_V, targets_N, chunk_rows, track
    )
    return loss_sum


def _fp32_chunked_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        operands = to_fp32(hidden), to_fp32(weight), None if bias is None else to_fp32(bias)
        loss_sum: Tensor = WideChunkedSum.apply(  # type: ignore[no-untyped-call]
            *operands, targets, torch.is_grad_enabled()
        )
    return loss_sum


def _most_whole_rows(vocab: int) -> int:
    """Return the largest number of tokens whose bf16 logits "auto" computes at once on a CPU."""
    return max(CHUNK_ROWS, LOW_LOGITS_BYTES_CPU // (2 * vocab))


def prefers_chunks(rows: int, vocab: int) -> bool:
    """Return whether "auto" uses chunks for this many tokens and this vocabulary on a CPU."""
    return rows > CHUNK_ROWS and 4 * rows * vocab > CHUNK_FROM_BYTES_CPU


def _plain_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, low: torch.dtype | None
) -> Tensor:
    """Compute the sum of losses from all logits at once.

    `low`: the dtype of the matmuls under autocast, while softmax and sum are in fp32; None: no
    autocast.
    """
    with torch.autocast(hidden.device.type, dtype=low, enabled=low is not None):
        if low is None:
            hidden = to_fp32(hidden)
        logits = F.linear(hidden, weight, bias)
        return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)


def _scale_saved_gradients(ctx: Any, loss_grad: Tensor) -> list[Tensor | None]:
    """Multiply the gradients in `ctx.grads` by `loss_grad`, in place. Raises if called twice."""
    if ctx.grads is None:
        raise RuntimeError("the chunked loss supports one backward; use the plain loss for more")
    grads = [None if grad is None else grad.mul_(loss_grad) for grad in ctx.grads]
    ctx.grads = None
    return grads


class ChunkedSum(torch.autograd.Function):
    """The loss on a CPU by chunks of rows: matmuls in bf16, sums and gradients in fp32.

    It has the same three matmuls as the plain loss. The forward computes the gradients, and the
    backward only scales them, so a second backward raises an error.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk_rows: int,
        track: bool,
    ) -> Tensor:
        """Compute the loss; with `track` also the gradients of all three operands."""
        operands = [one.to(torch.bfloat16) for one in (weight, bias) if one is not None]
        operands = [operand.detach().requires_grad_(track) for operand in operands]
        sums = [torch.zeros_like(o, dtype=torch.float32) for o in operands if track]
        hidden_grad = torch.empty_like(hidden) if track else None
        loss_sum = torch.zeros((), device=hidden.device)
        with torch.set_grad_enabled(track):
            for start in range(0, hidden.shape[0], chunk_rows):
                rows = slice(start, start + chunk_rows)
                chunk = hidden[rows].detach().requires_grad_(track)
                part = low_loss(chunk, operands[0], (*operands, None)[1], targets[rows])[0]
                loss_sum += part.detach()
                if hidden_grad is not None:
                    hidden_grad[rows], *grads = torch.autograd.grad(part, [chunk, *operands])
                    torch._foreach_add_(sums, grads)
        ctx.grads = (hidden_grad, *sums)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients of the forward."""
        hidden, weight, *bias = _scale_saved_gradients(ctx, loss_grad)
        return hidden, weight, (*bias, None)[0], None, None, None


class WideChunkedSum(torch.autograd.Function):
    """The loss on a CPU by chunks of rows, in the dtype of the operands (fp32 or fp64).

    Each chunk's gradient replaces its logits, and the head's gradient is summed in place.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, track: bool
    ) -> Tensor:
        """Compute the loss; with `track` also the gradients of operands that need one."""
        wanted = [track and one for one in ctx.needs_input_grad[:3]]
        hidden_grad, weight_grad, bias_grad = (
            torch.zeros_like(one) if one is not None and wants else None
            for one, wants in zip((hidden, weight, bias), wanted, strict=True)
        )
        loss_sum = hidden.new_zeros(())
        for start in range(0, hidden.shape[0], CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            grad = F.linear(hidden[rows], weight, bias)
            loss_sum += gradient_in_place(grad, targets[rows])
            if hidden_grad is not None:
                torch.mm(grad, weight, out=hidden_grad[rows])
            if weight_grad is not None:
                weight_grad.addmm_(grad.T, hidden[rows])
            if bias_grad is not None:
                bias_grad += grad.sum(0)
            del grad  # free it before the next chunk's
        ctx.grads = hidden_grad, weight_grad, bias_grad
        return loss_sum

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients of the forward."""
        return *_scale_saved_gradients(ctx, loss_grad), None, None
