"""The matmul section of a probe: products by size, unlucky sizes, tiles, and a model's own."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import torch

from outpace.catalog.processors import flops_per_cycle
from outpace.probe import design, matmul
from outpace.probe.compare import gain
from outpace.probe.matmul import Bench
from outpace.probe.measure import Case, Effort, clock_of, measure, rounds_of
from outpace.probe.sawtooth import find_tile, find_waves
from outpace.probe.section import Section
from outpace.probe.turns import Turns
from outpace.records.figure import Figure
from outpace.records.hardware import Dtype
from outpace.records.model import ModelSpec
from outpace.records.probed import Advice

Progress = Callable[[float], None]
# What 16-bit training computes in, where there is a choice.
_FIRST: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
_UNLUCKY = 0.03  # less than this is no advice


def probe_matmul(
    device: torch.device,
    features: Collection[str],
    spec: ModelSpec,
    quick: bool,
    budget_s: float,
    progress: Progress,
) -> Turns[Section]:
    """Time products on a device. `features`: of its processor. Raises WrongResultError."""
    dtypes = matmul.dtypes_of(device, features, _capability(device))
    on = matmul.bench(device, dtypes, quick)
    cases = _cases(on, dtypes, spec, quick)
    cases += [one for dtype in dtypes for one in matmul.best_cases(on, dtype, cases)]
    effort = Effort(budget_s, rounds_of(quick))
    figures = yield from measure(cases, clock_of(device), effort, progress)
    figures += [one for dtype in dtypes if (one := matmul.best(figures, dtype))]
    advice = [
        *design.vocabulary_advice(figures, spec),
        *design.heads_advice(figures, spec),
        *_unlucky(figures),
        *_granularity(figures, device),
    ]
    return Section(tuple(figures), tuple(advice), _notes(device, features, figures, quick))


def _capability(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    major, minor = torch.cuda.get_device_capability(device)
    return major + minor / 10


def _cases(on: Bench, dtypes: Sequence[Dtype], spec: ModelSpec, quick: bool) -> list[Case]:
    main = next(dtype for dtype in _FIRST if dtype in dtypes)
    cases = [case for dtype in dtypes for case in matmul.curve_cases(on, dtype, quick)]
    base = matmul.largest(on, main, at_most=4096 if on.device.type == "cuda" else 512)
    for dtype in (main,) if quick else dtypes:
        tokens = matmul.tokens_for(on, dtype, spec)
        cases += matmul.unlucky_cases(on, dtype, base, quick)
        cases += matmul.model_cases(on, dtype, spec, tokens)
    seq_len = min(spec.max_positions, 2048 if on.device.type == "cuda" else 256)
    cases += design.attention_cases(on, main, spec, seq_len, quick)
    if not quick:
        tokens = matmul.tokens_for(on, main, spec)
        cases += design.vocabulary_cases(on, main, spec, tokens)
        cases += matmul.fine_cases(on, main, base)
    return cases


def _notes(
    device: torch.device, features: Collection[str], figures: Sequence[Figure], quick: bool
) -> tuple[str, ...]:
    notes = []
    if quick:
        notes.append("the vocabulary's padding and tiles are measured without --quick only")
    if device.type != "cuda":
        notes.append(f"threads that products ran on: {torch.get_num_threads()}")
        notes.append("fp16 on a CPU is for correctness only: not timed")
        best = [f for f in figures if f.key.what == "best" and f.value]
        notes += [note for figure in best if (note := _by_clock(figure, features))]
        if not any(f.key.has(dtype="bf16") for f in figures):
            notes.append("this processor has no instructions for bf16: not timed")
    return tuple(notes)


def _by_clock(figure: Figure, features: Collection[str]) -> str | None:
    """What clock a processor would need for its best rate, if nothing else took time."""
    dtype: Dtype = figure.key.of["dtype"]  # type: ignore[assignment]
    span = flops_per_cycle(features, dtype)
    if span is None or figure.value is None:
        return None
    threads = torch.get_num_threads()
    most, least = (figure.value / threads / count / 1e9 for count in (span.least, span.most))
    clock = f"{least:.2f} GHz" if least == most else f"{least:.2f} to {most:.2f} GHz"
    return (
        f"the best {dtype} rate is what {threads} core{'s'[: threads > 1]} would do at {clock} "
        f"with all units busy ({span.least} to {span.most} operations a cycle, by the catalog); a "
        "clock near the processor's own says that little is left to gain"
    )


def _unlucky(figures: Sequence[Figure]) -> list[Advice]:
    """For each dtype and dimension, what the worst size above the round one costs for its work."""
    sweeps: defaultdict[tuple[str, str], list[Figure]] = defaultdict(list)
    for figure in figures:
        if figure.key.kind == "matmul" and figure.key.what == "unlucky":
            sweeps[str(figure.key.of["dtype"]), str(figure.key.of["dim"])].append(figure)
    found = []
    for (dtype, dim), sweep in sweeps.items():
        (base,) = sweeps[dtype, matmul.ROUND]
        costs = [
            (other, by) for other in sweep
            if other is not base and (by := gain(other, base, len(sweep)))
        ]  # fmt: skip
        worst, by = max(costs, key=lambda one: one[1].value, default=(base, None))
        if by is None or by.low < _UNLUCKY:
            continue
        size, odd = base.key.of[dim], worst.key.of[dim]
        found.append(
            Advice(
                about="unlucky sizes",
                text=f"{dim} = {odd} instead of {size} ({dtype}): operations are {by} faster at "
                f"the round size",
                gain=by.value, low=by.low, high=by.high, of=(worst.key, base.key),
            )
        )  # fmt: skip
    return found


def _granularity(figures: Sequence[Figure], device: torch.device) -> list[Advice]:
    """The tiles that fine sweeps show, and on a GPU the waves."""
    found = []
    for dim in "mnk":
        sweep = [f for f in figures if f.key.what == "fine" and f.key.has(dim=dim) and f.value]
        if not sweep:
            continue
        of = sweep[0].key.of
        sizes = [int(figure.key.of[dim]) for figure in sweep]
        seconds = [_seconds(figure) for figure in sweep]
        said = []
        if steps := find_tile(sizes, seconds):
            said.append(
                f"time rises by {steps.rise:.1%} in steps of {steps.tile} (that explains "
                f"{steps.explained:.0%} of what a straight line leaves): sizes that are multiples "
                f"of {steps.tile} waste nothing"
            )
        if dim == "n" and device.type == "cuda":
            count = torch.cuda.get_device_properties(device).multi_processor_count
            if waves := find_waves(sizes, seconds, int(of["m"]), count):
                (high, wide), share = waves
                said.append(
                    f"waves of {count} tiles of {high} × {wide} explain {share:.0%} of what a "
                    "straight line leaves"
                )
        text = "; ".join(said) or "no steps stand out from the noise"
        found.append(
            Advice(
                about="tiles",
                text=f"{dim} from {min(sizes)} to {max(sizes)} ({of['dtype']}): {text}",
                of=tuple(figure.key for figure in sweep),
            )
        )
    return found


def _seconds(figure: Figure) -> float:
    m, n, k = (int(figure.key.of[name]) for name in "mnk")
    assert figure.value is not None
    return 2.0 * m * n * k / figure.value
