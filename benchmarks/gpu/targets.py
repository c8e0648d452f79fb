"""Targets for one GPU, and the results.

Every target comes from issue 36, sections 2 to 4, for one H100 or H200 in bf16. A figure is found
by its section, row and key; if several rows have it, the worst one counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from gpu.check import measured

_OURS = "outpace, compiled"


@dataclass(frozen=True)
class Target:
    """A figure and its bound. `row` may contain wildcards; `unit` is the bound's unit."""

    what: str
    section: str
    row: str
    key: str
    least: float | None = None
    most: float | None = None
    unit: str = ""
    scale: float = 1.0  # of the bound's unit in the figure's

    @property
    def bound(self) -> str:
        """Return the bound as users would write it."""
        sign, bound = ("≥", self.least) if self.least is not None else ("≤", self.most)
        return f"{sign} {bound:g}{self.unit}"

    def reached(self, sections: dict[str, Any]) -> float | None:
        """Return the worst figure in the bound's unit; None if nothing was measured."""
        rows = sections.get(self.section, {}).get("rows", {})
        values = [row[self.key] / self.scale for name, row in rows.items()
                  if fnmatchcase(name, self.row) and measured(row)
                  and row.get(self.key) is not None]  # fmt: skip
        if not values:
            return None
        return float(min(values) if self.least is not None else max(values))

    def met(self, reached: float) -> bool:
        """Return whether a figure is within the bound."""
        if self.least is not None:
            return reached >= self.least
        assert self.most is not None
        return reached <= self.most


_LOSS_128K = "16,384 × 2,048 × 128,256, compiled"
_LOSS_50K = "16,384 × 768 × 50,257, compiled"
_GPT2, _LLAMA = "GPT-2, 16 × 1,024", "Llama-3.2-1B, 4 × 2,048"
_OVER_COMPILED = "speed relative to the compiled handwritten loop"
_TIMES = " ×"

TARGETS = (
    Target(f"{_GPT2}: {_OVER_COMPILED}", "gpt2", _OURS, "ratio", least=1.30, unit=_TIMES),
    Target(f"{_GPT2}, eager: speed relative to the eager handwritten loop", "gpt2",
           "outpace, eager", "ratio", least=1.25, unit=_TIMES),
    Target(f"{_LLAMA}: {_OVER_COMPILED}", "llama-3.2-1b", _OURS, "ratio", least=1.25, unit=_TIMES),
    Target(f"{_LLAMA}: share of the best matmul", "llama-3.2-1b", _OURS, "of_best_product",
           least=0.72),
    Target(f"Llama-3.2-1B, 8 × 2,048: {_OVER_COMPILED}", "llama-3.2-1b batch 8", _OURS,
           "ratio", least=1.25, unit=_TIMES),
    Target("Llama-3.2-1B, 8 × 2,048: share of the best matmul", "llama-3.2-1b batch 8",
           _OURS, "of_best_product", least=0.72),
    Target("LoRA of Llama-3.2-1B: speed over peft's loop", "lora", _OURS, "ratio", least=1.2,
           unit=_TIMES),
    Target(f"GPT-2, 4 × 1,024: {_OVER_COMPILED}", "gpt2 batch 4", _OURS, "ratio", least=1.2,
           unit=_TIMES),
    Target(f"{_GPT2}: reported over wall time", "gpt2", "outpace*", "told_over_wall", least=0.99),
    Target(f"{_LLAMA}: reported over wall time", "llama-3.2-1b", "outpace*", "told_over_wall",
           least=0.99),
    Target(f"{_GPT2}: memory relative to the compiled handwritten loop's", "gpt2", _OURS,
           "memory_ratio", most=0.9, unit=_TIMES),
    Target(f"{_LLAMA}: memory relative to the compiled handwritten loop's", "llama-3.2-1b", _OURS,
           "memory_ratio", most=0.9, unit=_TIMES),
    Target("measured memory, deviation from the trace", "traced memory", "*", "off", most=0.03),
    Target("waits for the device within a step", "waits", "waits", "of_a_step", most=0),
    Target("loss of 16,384 tokens, vocabulary of 128,256", "loss", _LOSS_128K, "step_time_s",
           most=43, unit=" ms", scale=1e-3),
    Target("loss of 16,384 tokens, vocabulary of 128,256: memory", "loss", _LOSS_128K, "peak_bytes",
           most=6.3, unit=" GiB", scale=2**30),
    Target("loss of 16,384 tokens, vocabulary of 50,257", "loss", _LOSS_50K, "step_time_s",
           most=8, unit=" ms", scale=1e-3),
    Target("attention within documents, over causal", "attention", "*, documents", "over_causal",
           most=1.3, unit=_TIMES),
    Target("non-finite gradients of queries, with a mask", "attention",
           "queries' gradients*", "values", most=0),
    Target("adamw-8bit at 1B, over fused AdamW", "optimizers", "adamw-8bit", "over_fused",
           most=1.1, unit=_TIMES),
    Target("time to find the micro-batch (--micro-batch auto), minus five steps",
           "micro-batch auto", "search", "beyond_five_steps_s", most=3, unit=" s"),
)  # fmt: skip


def judge(sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every target with its result: missed ones first, then those without a measurement."""
    found = []
    for target in TARGETS:
        reached = target.reached(sections)
        found.append({"target": target.what, "bound": target.bound, "reached": reached,
                      "unit": target.unit,
                      "met": None if reached is None else target.met(reached)})  # fmt: skip
    order = {False: 0, None: 1, True: 2}
    return sorted(found, key=lambda one: order[one["met"]])


def table(judged: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the targets as lines for a terminal."""
    width = max(len(one["target"]) for one in judged)
    for one in judged:
        word = {False: "MISSED", None: "not measured", True: "met"}[one["met"]]
        yield f"{word:<13}{one['target']:<{width}}  {one['bound']:>10}  {shown(one)}"


def shown(one: dict[str, Any]) -> str:
    """Return the result with its unit."""
    return "–" if one["reached"] is None else f"{one['reached']:.4g}{one['unit']}"
