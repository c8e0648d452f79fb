"""Backward compared with forward, by kind of module: time, and bytes moved.

    python benchmarks/forward_backward.py            # records results/forward_backward.json
    python benchmarks/forward_backward.py --quick    # small, records nothing

The folklore: linear layers and convolutions have twice the FLOPs in the backward, so it takes about
twice as long; an activation reads once and writes once in the forward, and its backward reads twice
(the gradient and what was kept) and writes once. Here, each kind of module runs forward and
backward in turn with the others; the gradients of its input and its weights are computed. Bytes are
not assumed, but counted from the tensors that each operator receives and returns.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from overhead import interval
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROWS, WIDTH, HEADS = 2048, 768, 12
RULE = 2.0


class Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write inside the context.

    An operator reads each of its tensor arguments once, and writes its results. A tensor that is
    changed in place counts as both, and one that is filled counts as written. Views move nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0
        self.written_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = func(*args, **kwargs)
        if not _moves_nothing(func, given.values(), made):
            written = {id(t): t for t in tree_leaves(made) if isinstance(t, Tensor)}
            if func._schema.name in _FILLS:
                given = {key: t for key, t in given.items() if key not in written}
            self.read_bytes += sum(_bytes(t) for t in given.values())
            self.written_bytes += sum(_bytes(t) for t in written.values())
        return made


_FILLS = frozenset({"aten::bernoulli_", "aten::fill_", "aten::zero_"})


def _moves_nothing(func: Any, given: Iterable[Tensor], made: Any) -> bool:
    """Return whether an operator only creates views, or allocates memory without filling it."""
    if func._schema.name in ("aten::empty", "aten::empty_like"):
        return True
    there = {tensor.untyped_storage().data_ptr() for tensor in given}
    results = [t.untyped_storage().data_ptr() for t in tree_leaves(made) if isinstance(t, Tensor)]
    return not func._schema.is_mutable and bool(results) and there.issuperset(results)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Attention(nn.Module):
    """Attention alone, without its projections: softmax(q·kᵀ/√C)·v of a (B, H, S, C) input."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x_BHSC: Tensor) -> Tensor:
        """Apply attention to equal queries, keys and values."""
        if self.fused:
            return F.scaled_dot_product_attention(x_BHSC, x_BHSC, x_BHSC)
        scores = x_BHSC @ x_BHSC.transpose(-1, -2) / x_BHSC.shape[-1] ** 0.5
        return scores.softmax(-1) @ x_BHSC


class Residual(nn.Module):
    """x + x·0.5: an element-wise sum."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        return x + x * 0.5


def kinds(rows: int) -> dict[str, tuple[str, nn.Module, tuple[int, ...]]]:
    """Return, by name, each kind with its module and the shape of its input."""
    tokens = (rows, WIDTH)
    heads = (rows // 256, HEADS, 256, WIDTH // HEADS)
    image = (rows // 256, 64, 32, 32)
    return {
        "linear 768 → 3072": ("linear", nn.Linear(WIDTH, 4 * WIDTH), tokens),
        "linear 3072 → 768": ("linear", nn.Linear(4 * WIDTH, WIDTH), (rows, 4 * WIDTH)),
        "conv2d 3×3, 64 → 64": ("convolution", nn.Conv2d(64, 64, 3, padding=1), image),
        "attention, fused": ("attention", Attention(True), heads),
        "attention, scores kept": ("attention", Attention(False), heads),
        "LayerNorm": ("normalisation", nn.LayerNorm(WIDTH), tokens),
        "RMSNorm": ("normalisation", nn.RMSNorm(WIDTH), tokens),
        "BatchNorm2d": ("normalisation", nn.BatchNorm2d(64), image),
        "GELU": ("element-wise", nn.GELU(), (rows, 4 * WIDTH)),
        "ReLU": ("element-wise", nn.ReLU(), (rows, 4 * WIDTH)),
        "SiLU": ("element-wise", nn.SiLU(), (rows, 4 * WIDTH)),
        "tanh": ("element-wise", nn.Tanh(), (rows, 4 * WIDTH)),
        "dropout": ("element-wise", nn.Dropout(0.1), (rows, 4 * WIDTH)),
        "x + 0.5 x": ("element-wise", Residual(), tokens),
    }


def moved(module: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the bytes read and written in forward and backward, in multiples of the input."""
    x = torch.randn(shape, requires_grad=True)
    forward, backward = Moved(), Moved()
    with forward:
        y = module(x)
    grad = torch.ones_like(y)
    with backward:
        torch.autograd.grad(y, x, grad)
    unit = _bytes(x)
    return {
        "forward_read": forward.read_bytes / unit,
        "forward_written": forward.written_bytes / unit,
        "backward_read": backward.read_bytes / unit,
        "backward_written": backward.written_bytes / unit,
        "input_bytes": unit,
    }


def pair(module: nn.Module, shape: tuple[int, ...]) -> Callable[[], tuple[float, float]]:
    """Run a forward and a backward; return the seconds of each."""
    x = torch.randn(shape, requires_grad=True)
    wanted = [x, *module.parameters()]
    grad = torch.randn_like(module(x))

    def once() -> tuple[float, float]:
        began = time.perf_counter()
        y = module(x)
        between = time.perf_counter()
        torch.autograd.grad(y, wanted, grad)
        return between - began, time.perf_counter() - between

    return once


def measure(rows: int, rounds: int) -> dict[str, Any]:
    """Measure all kinds in turn; ratios are those of pairs."""
    torch.manual_seed(0)
    cases = kinds(rows)
    steps = {name: pair(module, shape) for name, (_, module, shape) in cases.items()}
    for step in steps.values():
        step()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in steps if number % 2 == 0 else reversed(steps):
            seconds[name].append(steps[name]())
    found: dict[str, Any] = {}
    for name, (kind, module, shape) in cases.items():
        ratio, low, high = interval([backward / forward for forward, backward in seconds[name]])
        one = found[name] = {
            "kind": kind, "shape": shape, "seconds": seconds[name],
            "ratio": ratio, "low": low, "high": high,
        }  # fmt: skip
        if kind == "element-wise":
            one["moved_inputs"] = moved(module, shape)
    return found


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="small; nothing is recorded")
    asked = parser.parse_args()
    rows, rounds = (256, 2) if asked.quick else (ROWS, asked.rounds)
    found = measure(rows, rounds)
    for name, one in found.items():
        forward = statistics.median(pair[0] for pair in one["seconds"])
        print(f"{one['kind']:14} {name:22} forward {forward * 1000:7.2f} ms, backward "
              f"{one['ratio']:.2f} times ({one['low']:.2f} – {one['high']:.2f})",
              one.get("moved_inputs", ""))  # fmt: skip
    if not asked.quick:
        from recording import save

        shape = {"rows": rows, "width": WIDTH, "heads": HEADS}
        print(save("forward_backward", {
            "shape": shape, "rounds": rounds, "rule": RULE, "threads": torch.get_num_threads(),
            "modules": found,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
