"""Steps of outpace compared with those of a loop written by hand, in turn in one process."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from gpu.caches import LORA_RANK
from gpu.check import Check, measured
from gpu.hand_loop import HandLoop
from gpu.shapes import Shape, documents_file, little, shape_of, spec_file
from gpu.training import Trained, planned, predicted, train_shape
from outpace.probing.hardware.machine import usable_cores
from outpace.records.measurement import StepRecord
from outpace.training.callbacks import Callback
from outpace.training.threads import set_threads

# Number of steps after a pause until reports lag behind the device as usual.
_SETTLING_STEPS = 5
_LAST_STEPS = 4  # steps at a run's end, reported sooner: no further step is awaited
# GPT-2's layers, with a vocabulary for which little text suffices.
_GPT2_OF_8K = {"family": "gpt2", "layers": 12, "hidden": 768, "heads": 12, "vocab": 8192,
               "max_positions": 1024}  # fmt: skip
# Seconds that a row needs if the compilers' caches are filled (`caches`).
_HAND_LOOP_NEEDS_S, _NEEDS_S = 15.0, 10.0
Row = dict[str, Any]


@dataclass(frozen=True)
class Windows:
    """Number of steps timed together, number of repeats, and steps before the first."""

    warm: int
    steps: int
    count: int

    @property
    def total(self) -> int:
        """Return the steps of the whole run."""
        return self.warm + self.count * (_SETTLING_STEPS + self.steps) + _LAST_STEPS

    def pauses(self) -> list[int]:
        """Return the steps after which the other one has its turn."""
        return [self.warm + n * (_SETTLING_STEPS + self.steps) for n in range(self.count)]

    def counted(self, number: int) -> range:
        """Return the steps of a window, from 1."""
        first = self.pauses()[number] + _SETTLING_STEPS + 1
        return range(first, first + self.steps)


WINDOWS = Windows(warm=8, steps=12, count=3)
LONG_WINDOWS = Windows(warm=6, steps=5, count=3)  # for steps that take long
SMALL_WINDOWS = Windows(warm=4, steps=3, count=2)


class Turns(Callback):
    """Records when each step is reported, and gives `other` a turn before each window."""

    def __init__(self, windows: Windows, other: Callable[[], float] | None) -> None:
        self._pauses, self._other = set(windows.pauses()), other
        self.reported_s: dict[int, float] = {}
        self.other_s: list[float] = []

    def on_step(self, record: StepRecord) -> None:
        """Record the time of the report."""
        self.reported_s[record.step] = time.perf_counter()
        if record.step in self._pauses and self._other is not None:
            self.other_s.append(self._other())


def windows_of(check: Check, shape: Shape) -> Windows:
    """Return windows that are long enough for steady figures."""
    if check.small:
        return SMALL_WINDOWS
    return LONG_WINDOWS if shape.model != "gpt2" else WINDOWS


def ours(
    check: Check, name: str, shape: Shape, hand: HandLoop | None = None, **settings: Any
) -> Row:
    """Train a shape with outpace, in turn with `hand`; return what both took."""
    windows = windows_of(check, shape)
    turns = Turns(windows, None if hand is None else partial(hand.step_time_s, windows.steps))
    run = train_shape(check, name, shape, [turns], steps=windows.total, **settings)
    wall_s, told = [], []
    for number in range(windows.count):
        steps = windows.counted(number)
        wall_s.append(
            (turns.reported_s[steps[-1]] - turns.reported_s[steps[0] - 1]) / windows.steps
        )
        told.append(told_over_wall(run.lines, turns.reported_s, steps))
    step_s = median(wall_s)
    row: Row = {
        "settings": {key: value for key, value in settings.items() if key != "data"},
        "step_time_s": step_s,
        "windows_s": wall_s,
        "tokens_per_s": shape.tokens / step_s,
        "told_over_wall": median(told),
        "peak_bytes": _peak_bytes(check, run, windows, hand),
        "losses": [run.losses[0], run.losses[-1]],
        "took_s": run.took_s,
        "plan": planned(run.path),
        "predicted": predicted(run.path),
        **_rates(check, run, step_s),
    }
    if turns.other_s:
        row |= {
            "hand_windows_s": turns.other_s,
            "hand_step_time_s": median(turns.other_s),
            "ratio": median(turns.other_s) / step_s,
            "ratios": [theirs / mine for theirs, mine in zip(turns.other_s, wall_s, strict=True)],
        }
    return row


def told_over_wall(
    lines: Sequence[Row], reported_s: Mapping[int, float], steps: Sequence[int]
) -> float:
    """Return the reported step time relative to the wall-clock time between the same reports.

    The first step only marks the start: before it, the hand loop had its turn.
    """
    told_s: float = sum(lines[step - 1]["step_time_s"] for step in steps[1:])
    return told_s / (reported_s[steps[-1]] - reported_s[steps[0]])


def _peak_bytes(check: Check, run: Trained, windows: Windows, hand: HandLoop | None) -> int | None:
    """Return the peak bytes of outpace's tensors alone: with a hand loop, before its first turn."""
    if not check.cuda:
        return None
    if hand is None:
        return run.peak_bytes
    before_first_turn: int = run.lines[windows.warm - 1]["peak_memory_bytes"]
    return before_first_turn - run.before_bytes


def _rates(check: Check, run: Trained, step_s: float) -> Row:
    """Return model FLOP/s by the wall clock, relative to the catalog's peak and the best matmul."""
    said = run.measurement
    if said.model_flops_per_s is None or said.step_time_s is None:
        return {"model_flops_per_s": None, "mfu": None, "of_best_product": None}
    rate = said.model_flops_per_s * said.step_time_s / step_s
    mfu = None if said.mfu is None else said.mfu * said.step_time_s / step_s
    best = check.earlier.get("ceilings", {}).get("rows", {}).get("bf16 products", {})
    best_rate = best.get("best_flops_per_s")
    return {"model_flops_per_s": rate, "mfu": mfu,
            "of_best_product": None if best_rate is None else rate / best_rate}  # fmt: skip


def side_by_side(
    check: Check, shape: Shape, compiled: bool, variants: dict[str, Row],
    lora_rank: int | None = None, in_turn: bool = True,
) -> None:  # fmt: skip
    """Measure a hand loop, which is built once, and outpace's variants in turn with it.

    `in_turn`: False if both do not fit on the GPU together; the hand loop is then timed first.
    """
    how = "compiled" if compiled else "eager"
    windows = windows_of(check, shape)
    loops: list[HandLoop] = []

    def build() -> Row:
        # As many threads as a run of outpace sets, since another number would cause recompilation.
        set_threads(None, usable_cores(), 1)
        loop = HandLoop(check, shape, compiled, lora_rank)
        warm = loop.warm_up(2 if check.small else 4)
        times = [loop.step_time_s(windows.steps) for _ in range(1 if in_turn else windows.count)]
        if in_turn:
            loops.append(loop)
        return {**warm, "step_time_s": median(times), "windows_s": times,
                "tokens_per_s": shape.tokens / median(times)}  # fmt: skip

    check.clean()
    theirs = check.row(f"hand loop, {how}", _HAND_LOOP_NEEDS_S, build)
    if not in_turn:
        check.clean()
    trained: set[str] = set()  # measured so far, to skip the default's
    for name, settings in variants.items():
        if settings.get("precision") in trained:
            continue
        make = partial(ours, check, name, shape, loops[0] if loops else None, **settings)
        mine = check.row(name, _NEEDS_S, make)
        if measured(mine):
            trained.add(mine["plan"]["precision"])
        if measured(mine) and measured(theirs):
            check.put(name, {**mine, **_over(mine, theirs)})
    loops.clear()
    check.clean()


def _over(mine: Row, theirs: Row) -> Row:
    """Return outpace's figures relative to the hand loop's."""
    found: Row = {}
    if "ratio" not in mine:
        found |= {"hand_windows_s": theirs["windows_s"],
                  "hand_step_time_s": theirs["step_time_s"],
                  "ratio": theirs["step_time_s"] / mine["step_time_s"]}  # fmt: skip
    if mine["peak_bytes"] and theirs["peak_bytes"]:
        found["memory_ratio"] = mine["peak_bytes"] / theirs["peak_bytes"]
    return found


def gpt2(check: Check) -> None:
    """Measure GPT-2, 16 × 1,024: compiled, without CUDA graphs, and eager."""
    shape = shape_of(check, "gpt2")
    side_by_side(check, shape, True, {**_precisions(check), **_without_graphs(check)})
    side_by_side(check, shape, False, {"outpace, eager": {"compile": False}})


def gpt2_host(check: Check) -> None:
    """Measure GPT-2 with 4,096 tokens, where the host is the limit."""
    variants = {**_compiled(check), **_without_graphs(check)}
    side_by_side(check, shape_of(check, "gpt2 batch 4"), True, variants)


def llama_1b(check: Check) -> None:
    """Measure Llama-3.2-1B, 4 × 2,048."""
    side_by_side(check, shape_of(check, "llama-3.2-1b"), True, _compiled(check))


def lora_1b(check: Check) -> None:
    """Measure adapters of Llama-3.2-1B, compared with peft's."""
    variants = _compiled(check, lora_rank=LORA_RANK)
    side_by_side(check, shape_of(check, "llama-3.2-1b"), True, variants, lora_rank=LORA_RANK)


def large_llama(check: Check) -> None:
    """Measure Llama-3.2-1B, 8 × 2,048; an H100 cannot hold both trainers' state at once."""
    shape = shape_of(check, "llama-3.2-1b batch 8")
    side_by_side(check, shape, True, _compiled(check), in_turn=False)


def large_gpt2(check: Check) -> None:
    """Measure GPT-2, 48 × 1,024, for its highest throughput."""
    check.clean()
    ((name, settings),) = _compiled(check).items()
    shape = shape_of(check, "gpt2 batch 48")
    check.row(name, 20.0, partial(ours, check, name, shape, **settings))


def _precisions(check: Check) -> dict[str, Row]:
    """Measure the default precision, and the other one of fp32 and bf16 weights."""
    named = {f"outpace, compiled, {one}": {"compile": check.inductor, "precision": one}
             for one in ("bf16", "bf16-master")}  # fmt: skip
    return {**_compiled(check), **named}


def _without_graphs(check: Check) -> dict[str, Row]:
    settings = {"compile": check.inductor, "cuda_graphs": False}
    return {"outpace, compiled, kernel by kernel": settings}


def _compiled(check: Check, **settings: Any) -> dict[str, Row]:
    return {"outpace, compiled": {"compile": check.inductor, **settings}}


def optimizers(check: Check) -> None:
    """Measure Llama-3.2-1B, 4 × 2,048, with optimizers relative to fused AdamW in bf16."""
    shape = shape_of(check, "llama-3.2-1b")
    fused = None
    for name, settings in {
        "adamw-fused": {}, "adamw-8bit": {"optimizer": "adamw-8bit"},
        "muon": {"optimizer": "muon"}, "fp8": {"precision": "fp8"},
    }.items():  # fmt: skip
        if check.small and name == "fp8":
            continue
        check.clean()
        make = partial(ours, check, name, shape, compile=check.inductor, **settings)
        row = check.row(name, 20.0, make)
        fused = row if name == "adamw-fused" else fused
        if measured(row) and measured(fused):
            over = row["step_time_s"] / fused["step_time_s"]
            check.put(name, {**row, "over_fused": over})


def documents(check: Check) -> None:
    """Measure GPT-2's layers on real text, with attention within documents and across them."""
    shape = Shape(spec_file(check, _GPT2_OF_8K), {}, 1024, 16, 8192)
    if check.small:
        shape = Shape(little(check), {}, 32, 2, 1024)
    causal, text = None, documents_file(check)
    for name, within in (("causal", False), ("documents", True)):
        make = partial(ours, check, name, shape, data=(text,), document_attention=within,
                       compile=check.inductor)  # fmt: skip
        row = check.row(name, 20.0, make)
        causal = causal or row
        if within and measured(row) and measured(causal):
            over = row["step_time_s"] / causal["step_time_s"]
            check.put(name, {**row, "over_causal": over})
