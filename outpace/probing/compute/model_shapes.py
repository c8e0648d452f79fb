"""Cost of a model's vocabulary size and number of heads on this machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.probing.compute.matmul import TORCH, Bench, wrong_matmul
from outpace.probing.compute.tile_detection import next_multiple
from outpace.probing.timing.gain import Gain, gain
from outpace.probing.timing.measure import Case
from outpace.records.figure import Figure, Key
from outpace.records.hardware import Dtype
from outpace.records.model import ModelSpec
from outpace.records.probe_results import Advice

_PADDED_TO = (8, 64, 128)
# Narrower heads take seconds on a processor, and are not used in practice.
_LEAST_HEAD_DIM = 8
# Allowed error of attention, relative to the largest value.
_ATTENTION_OFF: dict[Dtype, float] = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}
# Smaller gains do not justify changing a model.
_WORTH = 0.005
_WHOLE = ("forward and backward",)


def vocabulary_cases(on: Bench, dtype: Dtype, spec: ModelSpec, tokens: int) -> list[Case]:
    """Return cases of the head's matmuls, forward and backward, with and without padding."""
    sizes = sorted({spec.vocab, *(next_multiple(spec.vocab, of) for of in _PADDED_TO)})
    return [
        Case(
            Key(kind="vocabulary", what="time",
                of={"dtype": dtype, "vocab": vocab, "hidden": spec.hidden, "tokens": tokens}),
            "s", partial(_make_head_call, on, dtype, vocab, spec.hidden, tokens),
            check=partial(_find_head_error, on, dtype, vocab, spec.hidden, tokens),
        )
        for vocab in sizes
        if on.supports(dtype, (tokens, vocab, spec.hidden))
    ]  # fmt: skip


def _head_operands(
    on: Bench, dtype: Dtype, vocab: int, hidden: int, tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the head's input, (tokens, hidden), and its weight, (vocab, hidden)."""
    pool = on.pools[dtype]
    return pool[: tokens * hidden].view(tokens, hidden), pool[-vocab * hidden :].view(vocab, hidden)


Head = tuple[Tensor, Tensor, Tensor]  # output, gradient of the weight, gradient of the input


def _make_head_call(
    on: Bench, dtype: Dtype, vocab: int, hidden: int, tokens: int
) -> Callable[[], Head]:
    x_TH, w_VH = _head_operands(on, dtype, vocab, hidden, tokens)
    g_TV = torch.empty(tokens, vocab, device=on.device, dtype=TORCH[dtype])

    def call() -> Head:
        torch.mm(x_TH, w_VH.t(), out=g_TV)
        return g_TV, torch.mm(g_TV.t(), x_TH), torch.mm(g_TV, w_VH)

    return call


def _find_head_error(
    on: Bench, dtype: Dtype, vocab: int, hidden: int, tokens: int, result: Head
) -> str | None:
    x_TH, w_VH = _head_operands(on, dtype, vocab, hidden, tokens)
    g_TV, dw_VH, dx_TH = result
    return (
        wrong_matmul(g_TV, x_TH, w_VH.t(), dtype)
        or wrong_matmul(dw_VH, g_TV.t(), x_TH, dtype)
        or wrong_matmul(dx_TH, g_TV, w_VH, dtype)
    )


def head_counts(hidden: int) -> list[int]:
    """Return the numbers of heads that divide a model's width, in descending order."""
    return [hidden // dim for dim in range(_LEAST_HEAD_DIM, hidden + 1) if hidden % dim == 0]


def attention_cases(
    on: Bench, dtype: Dtype, spec: ModelSpec, seq_len: int, quick: bool
) -> list[Case]:
    """Return cases of attention by number of heads: forward, and forward with backward.

    A number of heads is omitted if the device has no kernel or too little memory for it.
    """
    width = spec.heads * spec.head_dim
    counts = head_counts(width)
    if quick:
        near = sorted(counts, key=lambda count: abs(count - spec.heads))[:3]
        counts = [count for count in counts if count in near]
    return [
        Case(
            Key(kind="attention", what=what,
                of={"dtype": dtype, "heads": count, "head_dim": width // count,
                    "seq_len": seq_len}),
            "s", partial(_make_attention_call, on, dtype, count, width // count, seq_len,
                         spec.causal, what),
            check=partial(_find_attention_error, dtype),
        )
        for count in counts
        if _supports_attention(on, dtype, count, width // count, seq_len, spec.causal)
        for what in (_WHOLE if quick else ("forward", _WHOLE[0]))
    ]  # fmt: skip


def _supports_attention(
    on: Bench, dtype: Dtype, heads: int, head_dim: int, seq_len: int, causal: bool
) -> bool:
    """Return whether this attention runs on the device, by running it."""
    try:
        _make_attention_call(on, dtype, heads, head_dim, seq_len, causal, _WHOLE[0])()
    except RuntimeError:  # no memory, or no kernel
        return False
    return True


@dataclass(frozen=True)
class _AttentionRun:
    """Inputs and outputs of attention; `grads` are those of q, k and v after a backward pass."""

    out: Tensor
    given: tuple[Tensor, Tensor, Tensor, Tensor]
    causal: bool
    grads: tuple[Tensor, ...] = ()


def _make_attention_call(
    on: Bench, dtype: Dtype, heads: int, head_dim: int, seq_len: int, causal: bool, pass_name: str
) -> Callable[[], _AttentionRun]:
    count = heads * seq_len * head_dim
    shape = (1, heads, seq_len, head_dim)
    q, k, v, g = (on.pools[dtype][n * count : (n + 1) * count].view(shape) for n in range(4))
    given = (q, k, v, g)
    if pass_name == "forward":
        return lambda: _AttentionRun(
            F.scaled_dot_product_attention(q, k, v, is_causal=causal), given, causal
        )
    q_, k_, v_ = leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]

    def forward_and_backward() -> _AttentionRun:
        out = F.scaled_dot_product_attention(q_, k_, v_, is_causal=causal)
        return _AttentionRun(out.detach(), given, causal, torch.autograd.grad(out, leaves, g))

    return forward_and_backward


def _find_attention_error(dtype: Dtype, run: _AttentionRun) -> str | None:
    """Check the outputs and gradients of the first and last head in double precision."""
    ends = [0, run.out.shape[1] - 1]
    q, k, v, g = (one[:, ends].detach().double().requires_grad_() for one in run.given)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if run.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1) @ v
    true = [out, *(torch.autograd.grad(out, (q, k, v), g) if run.grads else ())]
    names = ("the output", "dQ", "dK", "dV")
    for name, one, right in zip(names, (run.out, *run.grads), true, strict=False):
        # Relative to the largest value, because each value accumulates many rounding errors.
        away = ((one[:, ends].double() - right).abs().max() / right.abs().max()).item()
        if not away <= _ATTENTION_OFF[dtype]:
            return f"attention: {name} is off by {away:.3g} of the largest value"
    return None


def vocabulary_advice(figures: Sequence[Figure], spec: ModelSpec) -> list[Advice]:
    """Advise whether to pad the vocabulary, per dtype."""
    return [
        found for dtype in _list_dtypes(figures, "vocabulary")
        if (found := _advise_on_vocabulary(_select(figures, "vocabulary", dtype), dtype, spec))
    ]  # fmt: skip


def _advise_on_vocabulary(figures: Sequence[Figure], dtype: str, spec: ModelSpec) -> Advice | None:
    own = next((f for f in figures if f.key.has(vocab=spec.vocab)), None)
    padded = _largest_gain(own, [f for f in figures if f is not own])
    if own is None or padded is None:
        return None
    better, by = padded
    size = int(better.key.of["vocab"])
    change = f"vocabulary {spec.vocab} → {size} ({dtype}, {own.key.of['tokens']} tokens)"
    text = f"{change}: the head's matmuls {by}"
    return _make_advice("vocabulary", text, by, own, better)


def heads_advice(figures: Sequence[Figure], spec: ModelSpec) -> list[Advice]:
    """Advise whether a different number of heads is faster at the same width, per dtype."""
    found = []
    for dtype in _list_dtypes(figures, "attention"):
        mine = [f for f in _select(figures, "attention", dtype)
                if f.key.what == "forward and backward"]  # fmt: skip
        own = next((f for f in mine if f.key.has(heads=spec.heads)), None)
        near = [f for f in mine if f is not own and _is_near(int(f.key.of["heads"]), spec.heads)]
        best = _largest_gain(own, near)
        if own is None or best is None:
            continue
        better, by = best
        change = (
            f"{spec.heads} heads of {own.key.of['head_dim']} → {better.key.of['heads']} of "
            f"{better.key.of['head_dim']} ({dtype}, {own.key.of['seq_len']} tokens)"
        )
        text = f"{change}: attention {by}; the effect on learning is not considered"
        found.append(_make_advice("heads", text, by, own, better))
    return found


def _is_near(count: int, spec_count: int) -> bool:
    """Return whether a number of heads is close enough for a comparable model."""
    return spec_count / 2 <= count <= 2 * spec_count


def _make_advice(about: str, text: str, by: Gain, present: Figure, better: Figure) -> Advice:
    if not by.is_certain or by.value < _WORTH:
        text += " — no certain gain: leave it unchanged"
    return Advice(about=about, text=text, gain=by.value, low=by.low, high=by.high,
                  of=(present.key, better.key))  # fmt: skip


def _list_dtypes(figures: Sequence[Figure], kind: str) -> list[str]:
    return list(dict.fromkeys(str(f.key.of["dtype"]) for f in figures if f.key.kind == kind))


def _select(figures: Sequence[Figure], kind: str, dtype: str) -> list[Figure]:
    return [f for f in figures if f.key.kind == kind and f.key.has(dtype=dtype)]


def _largest_gain(present: Figure | None, others: Sequence[Figure]) -> tuple[Figure, Gain] | None:
    if present is None:
        return None
    gains = [
        (other, by) for other in others if (by := gain(present, other, len(others))) is not None
    ]
    return max(gains, key=lambda one: one[1].value, default=None)
