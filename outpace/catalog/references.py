"""Small training steps that `outpace probe` times, for costs that isolated operators do not show.

In a step, operators are slower than in isolation: caches are cold, and allocators, autograd and
hooks of the strategies run. One model is bound by operators, one by computation and one by both;
another has long sequences. Each runs with every strategy that supports the number of ranks.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from outpace.records.model import ModelSpec
from outpace.records.plan import Plan

Size = Literal["small", "medium", "large", "long"]
Kind = Literal["cpu", "cuda"]

_SPECS: dict[Kind, dict[Size, dict[str, Any]]] = {
    "cpu": {
        "small": {"family": "gpt2", "layers": 4, "hidden": 128, "heads": 8, "vocab": 1024},
        "medium": {"family": "llama", "layers": 4, "hidden": 320, "heads": 8, "ffn": 896,
                   "vocab": 3072},
        "large": {"family": "gpt2", "layers": 4, "hidden": 448, "heads": 8, "vocab": 6144},
        "long": {"family": "gpt2", "layers": 2, "hidden": 256, "heads": 8, "vocab": 1024},
    },
    "cuda": {
        "small": {"family": "gpt2", "layers": 8, "hidden": 768, "heads": 16, "vocab": 8192},
        "medium": {"family": "llama", "layers": 4, "hidden": 1536, "heads": 16, "ffn": 4096,
                   "vocab": 8192},
        "large": {"family": "gpt2", "layers": 4, "hidden": 2048, "heads": 16, "vocab": 16384},
        "long": {"family": "gpt2", "layers": 2, "hidden": 2048, "heads": 16, "vocab": 8192},
    },
}  # fmt: skip
_SEQ_LEN: dict[Kind, int] = {"cpu": 64, "cuda": 1024}
_LONGER = 4  # factor on the sequence length in "long"
_OFTEN = ("single", "ddp", "zero3", "tp")
_AGAIN = ("single", "ddp", "zero3")  # also with recomputation
_BATCH = 8  # or more, if the ranks need it


@dataclass(frozen=True)
class Reference:
    """A training step that `outpace probe` times: a model, a plan and a batch."""

    name: str
    spec: ModelSpec
    seq_len: int
    global_batch: int
    plan: Plan

    @property
    def digest(self) -> str:
        """Return a hash of everything that defines the step, to detect changes between versions."""
        values = (self.spec.model_dump_json(), self.plan.model_dump_json(), self.seq_len,
                  self.global_batch)  # fmt: skip
        return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


def references(ranks: int, kind: Kind, quick: bool = False) -> dict[str, Reference]:
    """Return the steps that `outpace probe` times on `ranks` processes, by name.

    With `quick`, there are fewer sizes and variants.
    """
    found = {}
    for size, values in _reference_cases(ranks, kind, quick):
        spec = ModelSpec.parse({**_SPECS[kind][size], "max_positions": 4096}, size)
        plan = Plan.parse(values, size)
        batch = plan.micro_batch * plan.pp_microbatches * plan.dp_replicate * plan.dp_shard
        batch = max(batch, -(-_BATCH // batch) * batch)
        name = f"{size}: {_format_values(values)}"
        seq_len = _SEQ_LEN[kind] * (_LONGER if size == "long" else 1)
        found[name] = Reference(name, spec, seq_len, batch, plan)
    return found


def _format_values(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" if name != "strategy" else str(value)
                     for name, value in values.items())  # fmt: skip


def _reference_cases(ranks: int, kind: Kind, quick: bool) -> Iterator[tuple[Size, dict[str, Any]]]:
    share = -(-_BATCH // ranks)
    plain = "bf16" if kind == "cuda" else "fp32"
    for layout in _layouts(ranks):
        sizes: tuple[Size, ...] = ("small", "medium", "large")
        if quick:
            sizes = ("small", "medium") if layout["strategy"] in _OFTEN else ("medium",)
        micro = share if layout.get("dp_replicate", 1) * layout.get("dp_shard", 1) > 1 else _BATCH
        base = {**layout, "micro_batch": micro, "precision": plain}
        if layout.get("pp", 1) > 1:
            count = max(layout["pp"], 4)
            base |= {"micro_batch": max(1, _BATCH // count), "pp_microbatches": count}
        for size in sizes:
            yield size, base
        if ranks == 1 or layout["strategy"] == "ddp":
            other = {**base, "precision": "fp32" if plain == "bf16" else "bf16"}
            yield from ((size, other) for size in sizes if size != "small")
            yield from (("long", one) for one in (base, other))
        if layout.get("pp", 1) == 1 and micro > 1 and not quick:
            yield "medium", {**base, "micro_batch": 1}
            if layout["strategy"] in _AGAIN:
                yield "medium", {**base, "checkpointing": "full"}


def _layouts(ranks: int) -> Iterator[dict[str, Any]]:
    if ranks == 1:
        yield {"strategy": "single"}
        return
    yield {"strategy": "ddp", "dp_replicate": ranks}
    for name in ("zero1", "zero2", "zero3"):
        yield {"strategy": name, "dp_shard": ranks}
    if 8 % ranks == 0:
        yield {"strategy": "tp", "tp": ranks}
    if ranks <= 4:
        yield {"strategy": "1f1b", "pp": ranks}
    if ranks % 4 == 0:
        yield {"strategy": "3d", "tp": 2, "dp_shard": ranks // 2}
