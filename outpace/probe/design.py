"""What a model's own sizes cost on a machine: its vocabulary, and its number of heads."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.probe.compare import Gain, gain
from outpace.probe.matmul import TORCH, Bench
from outpace.probe.measure import Case
from outpace.probe.sawtooth import next_multiple
from outpace.records.figure import Figure, Key
from outpace.records.hardware import Dtype
from outpace.records.model import ModelSpec
from outpace.records.probed import Advice

_PADDED_TO = (8, 64, 128)
_HEAD_DIMS = range(16, 257)
# Less than this is not worth changing a model for.
_WORTH = 0.005
_WHOLE = ("forward and backward",)


def vocabulary_cases(on: Bench, dtype: Dtype, spec: ModelSpec, tokens: int) -> list[Case]:
    """The head's three products, forward and backward, with the vocabulary as it is and padded."""
    sizes = sorted({spec.vocab, *(next_multiple(spec.vocab, of) for of in _PADDED_TO)})
    return [
        Case(
            Key(kind="vocabulary", what="time",
                of={"dtype": dtype, "vocab": vocab, "hidden": spec.hidden, "tokens": tokens}),
            "s", partial(_head, on, dtype, vocab, spec.hidden, tokens), check=_finite,
        )
        for vocab in sizes
    ]  # fmt: skip


def _head(on: Bench, dtype: Dtype, vocab: int, hidden: int, tokens: int) -> Callable[[], Tensor]:
    pool = on.pools[dtype]
    x_TH = pool[: tokens * hidden].view(tokens, hidden)
    w_VH = pool[-vocab * hidden :].view(vocab, hidden)
    g_TV = torch.empty(tokens, vocab, device=on.device, dtype=TORCH[dtype])

    def call() -> Tensor:
        torch.mm(x_TH, w_VH.t(), out=g_TV)
        torch.mm(g_TV.t(), x_TH)
        return torch.mm(g_TV, w_VH)

    return call


def _finite(found: Tensor) -> str | None:
    return None if bool(found.isfinite().all()) else "it gives values that are not finite"


def head_counts(hidden: int) -> list[int]:
    """Numbers of heads that divide a model's width into heads of a usual size, most heads first."""
    counts = [hidden // dim for dim in _HEAD_DIMS if hidden % dim == 0]
    return sorted(set(counts), reverse=True)


def attention_cases(
    on: Bench, dtype: Dtype, spec: ModelSpec, seq_len: int, quick: bool
) -> list[Case]:
    """Attention of one sequence by number of heads, forward, and forward with backward."""
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
            "s", partial(_attention, on, dtype, count, width // count, seq_len, spec.causal, what),
            check=_right_attention if what == "forward" else None,
        )
        for count in counts
        for what in (_WHOLE if quick else ("forward", _WHOLE[0]))
    ]  # fmt: skip


def _attention(
    on: Bench, dtype: Dtype, heads: int, head_dim: int, seq_len: int, causal: bool, what: str
) -> Callable[[], Any]:
    count = heads * seq_len * head_dim
    shape = (1, heads, seq_len, head_dim)
    q, k, v, g = (on.pools[dtype][n * count : (n + 1) * count].view(shape) for n in range(4))
    if what == "forward":
        return lambda: (F.scaled_dot_product_attention(q, k, v, is_causal=causal), q, k, v, causal)
    q, k, v = leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]

    def both() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return torch.autograd.grad(out, leaves, g)

    return both


def _right_attention(given: tuple[Tensor, Tensor, Tensor, Tensor, bool]) -> str | None:
    """The last query sees all keys, causal or not: its output by hand, in double precision."""
    out, q, k, v, _ = given
    scores = (q[:, :, -1:].double() @ k.double().transpose(-1, -2)) / q.shape[-1] ** 0.5
    apart = (scores.softmax(-1) @ v.double() - out[:, :, -1:].double()).abs().max().item()
    return None if apart <= 0.02 else f"attention is off by {apart:.3g}"


def vocabulary_advice(figures: Sequence[Figure], spec: ModelSpec) -> list[Advice]:
    """Whether to pad the vocabulary, for each dtype."""
    return [
        found for dtype in _dtypes(figures, "vocabulary")
        if (found := _vocabulary(_of(figures, "vocabulary", dtype), dtype, spec))
    ]  # fmt: skip


def _vocabulary(figures: Sequence[Figure], dtype: str, spec: ModelSpec) -> Advice | None:
    own = next((f for f in figures if f.key.has(vocab=spec.vocab)), None)
    padded = _best(own, [f for f in figures if f is not own])
    if own is None or padded is None:
        return None
    better, by = padded
    size = int(better.key.of["vocab"])
    change = f"vocabulary {spec.vocab} → {size} ({dtype})"
    text = f"{change}: the head's products {by}"
    return _said("vocabulary", text, by, own, better)


def heads_advice(figures: Sequence[Figure], spec: ModelSpec) -> list[Advice]:
    """Whether another number of heads is faster at the same width, for each dtype."""
    found = []
    for dtype in _dtypes(figures, "attention"):
        mine = [f for f in _of(figures, "attention", dtype)
                if f.key.what == "forward and backward"]  # fmt: skip
        own = next((f for f in mine if f.key.has(heads=spec.heads)), None)
        near = [f for f in mine if f is not own and _alike(int(f.key.of["heads"]), spec.heads)]
        best = _best(own, near)
        if own is None or best is None:
            continue
        better, by = best
        change = (
            f"{spec.heads} heads of {own.key.of['head_dim']} → {better.key.of['heads']} of "
            f"{better.key.of['head_dim']} ({dtype})"
        )
        text = f"{change}: attention {by}; what a model learns with them is another matter"
        found.append(_said("heads", text, by, own, better))
    return found


def _alike(count: int, own: int) -> bool:
    """Far fewer or more heads make another model."""
    return own / 2 <= count <= 2 * own


def _said(about: str, text: str, by: Gain, own: Figure, better: Figure) -> Advice:
    if not by.sure or by.value < _WORTH:
        text += " — no gain that is sure: leave it as it is"
    return Advice(about=about, text=text, gain=by.value, low=by.low, high=by.high,
                  of=(own.key, better.key))  # fmt: skip


def _dtypes(figures: Sequence[Figure], kind: str) -> list[str]:
    return list(dict.fromkeys(str(f.key.of["dtype"]) for f in figures if f.key.kind == kind))


def _of(figures: Sequence[Figure], kind: str, dtype: str) -> list[Figure]:
    return [f for f in figures if f.key.kind == kind and f.key.has(dtype=dtype)]


def _best(own: Figure | None, others: Sequence[Figure]) -> tuple[Figure, Gain] | None:
    """The one that gains most over `own`."""
    if own is None:
        return None
    gains = [(other, by) for other in others if (by := gain(own, other, len(others))) is not None]
    return max(gains, key=lambda one: one[1].value, default=None)
