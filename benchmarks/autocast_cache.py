"""Autocast's cache of weight casts, on and off: casts, memory, step time.

    python benchmarks/autocast_cache.py            # records results/autocast_cache.json
    python benchmarks/autocast_cache.py --quick    # small, records nothing

Within one autocast context, a weight is cast once and the copy is reused. That can help only if a
weight is used more than once in a forward. So a transformer whose blocks have separate weights is
compared with one that repeats a single block (as in ALBERT, Lan et al., arXiv 1909.11942), and with
evaluation, where no graph holds the copies. Casts of weights are counted as operators, the peak is
of live tensors in addition to weights, and steps of the cases alternate.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from alternating import alternating
from overhead import interval
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.nn.loss import LanguageModelObjective
from outpace.nn.transformer import Transformer
from outpace.records.model import ModelSpec
from outpace.trace.allocations import Allocations

SPEC = {"family": "llama", "layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1408,
        "vocab": 2048, "max_positions": 256}  # fmt: skip
BATCH, SEQ_LEN = 2, 128
CASES = ("own weights, training", "shared block, training", "own weights, evaluation",
         "shared block, evaluation")  # fmt: skip


class Casts(TorchDispatchMode):
    """Counts casts of weights (tensors whose memory is a parameter's) inside the context."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.count = 0
        self.cast_bytes = 0
        self._weights = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and isinstance(args[0], Tensor)
        if is_cast and args[0].untyped_storage().data_ptr() in self._weights:
            self.count += 1
            self.cast_bytes += made.nbytes
        return made


def objective(shared: bool, layers: int) -> LanguageModelObjective:
    """Return a transformer with its loss; with `shared`, every block is the first one."""
    spec = ModelSpec.parse({**SPEC, "layers": layers}, "autocast_cache")
    model = Transformer(spec)
    if shared:
        model.blocks = nn.ModuleList([model.blocks[0]] * layers)
    return LanguageModelObjective(model, "plain", torch.bfloat16)


def make_step(case: str, cached: bool, layers: int) -> tuple[nn.Module, Callable[[], None]]:
    """Return a function that runs a bf16 forward, and in training the backward."""
    module = objective("shared" in case, layers)
    tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
    training = "training" in case

    def step() -> None:
        with (
            torch.set_grad_enabled(training),
            torch.autocast("cpu", torch.bfloat16, cache_enabled=cached),
        ):
            loss, count = module({"tokens": tokens, "targets": tokens})
        if training:
            (loss / count).backward()
            module.zero_grad(set_to_none=True)

    return module, step


def measure(case: str, layers: int, rounds: int) -> dict[str, Any]:
    """Measure a case with and without the cache, in turn."""
    found: dict[str, Any] = {}
    steps = {}
    for name, cached in (("cached", True), ("uncached", False)):
        module, step = make_step(case, cached, layers)
        with Casts(module) as casts:
            step()
        with Allocations() as allocated:
            step()
        found[name] = {
            "casts": casts.count,
            "cast_bytes": casts.cast_bytes,
            "peak_bytes": allocated.peak_bytes,
        }
        steps[name] = step
    times = alternating(steps, rounds)
    for name, seconds in times.items():
        found[name]["seconds"] = seconds
    pairs = zip(times["uncached"], times["cached"], strict=True)
    found["ratio"], found["low"], found["high"] = interval([off / on for off, on in pairs])
    return found


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="small; nothing is recorded")
    asked = parser.parse_args()
    layers, rounds = (2, 2) if asked.quick else (int(SPEC["layers"]), asked.rounds)
    cases = {case: measure(case, layers, rounds) for case in CASES}
    for case, one in cases.items():
        on, off = one["cached"], one["uncached"]
        print(f"{case:26} casts {on['casts']} / {off['casts']}, peak "
              f"{on['peak_bytes'] / 2**20:.1f} / {off['peak_bytes'] / 2**20:.1f} MiB, "
              f"{statistics.median(on['seconds']) * 1000:.1f} ms with the cache; without it "
              f"{one['ratio']:.3f} ({one['low']:.3f} – {one['high']:.3f}) times")  # fmt: skip
    if not asked.quick:
        from recording import save

        shape = {"model": SPEC, "batch": BATCH, "seq_len": SEQ_LEN}
        print(save("autocast_cache", {"shape": shape, "rounds": rounds, "cases": cases}))


if __name__ == "__main__":
    main()
