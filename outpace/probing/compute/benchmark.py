"""Matmul section of a probe: matmuls by size, odd sizes, tiles, and a model's matmuls."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from outpace.catalog.processors import flops_per_cycle, vector_bits
from outpace.probing.compute import matmul, model_shapes
from outpace.probing.compute.matmul import Bench
from outpace.probing.compute.registers import step_words
from outpace.probing.compute.tile_detection import find_threads, find_tile, find_waves
from outpace.probing.timing.gain import gain
from outpace.probing.timing.interleave import Turns
from outpace.probing.timing.measure import Case, Effort, clock_of, measure, rounds_of
from outpace.probing.timing.section import ProbeSection
from outpace.records.figure import Figure
from outpace.records.hardware import Dtype
from outpace.records.model import ModelSpec
from outpace.records.probe_results import Advice

Progress = Callable[[float], None]
# The dtype of 16-bit training, if there is a choice.
_FIRST: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
_UNLUCKY = 0.03  # smaller gains give no advice
# Fraction of the budget for calling each of a model's matmuls once. Each is called about 20 times.
_ONE_OF_EACH = 0.05


def probe_matmul(
    device: torch.device,
    features: Collection[str],
    spec: ModelSpec,
    quick: bool,
    budget_s: float,
    progress: Progress,
    tokens: int | None = None,
) -> Turns[ProbeSection]:
    """Time matmuls on a device.

    `features` are those of the host's processor. `tokens` is the number of rows in a model's
    matmuls; None chooses a number that keeps calls short. Raises WrongResultError.
    """
    dtypes = matmul.dtypes_of(device, features, _compute_capability(device))
    on = matmul.bench(device, dtypes, quick)
    cases, left_out = _list_cases(on, dtypes, spec, quick, tokens, budget_s)
    cases += [one for dtype in dtypes for one in matmul.best_cases(on, dtype, cases)]
    effort = Effort(budget_s, rounds_of(quick))
    figures = yield from measure(cases, clock_of(device), effort, progress)
    figures += [one for dtype in dtypes if (one := matmul.best(figures, dtype))]
    advice = [
        *model_shapes.vocabulary_advice(figures, spec),
        *model_shapes.heads_advice(figures, spec),
        *_report_slow_sizes(figures),
        *_report_granularity(figures, device, features),
    ]
    notes = (*_list_notes(device, figures, quick), *left_out)
    return ProbeSection(
        tuple(figures),
        tuple(advice),
        notes,
        said=_describe_implied_clocks(device, features, figures),
    )


def _compute_capability(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    major, minor = torch.cuda.get_device_capability(device)
    return major + minor / 10


def _list_cases(
    on: Bench, dtypes: Sequence[Dtype], spec: ModelSpec, quick: bool, requested_tokens: int | None,
    budget_s: float,
) -> tuple[list[Case], list[str]]:  # fmt: skip
    """Return all cases except the candidates for the best shape, and notes on omitted cases."""
    main = next(dtype for dtype in _FIRST if dtype in dtypes)
    notes: list[str] = []
    cases = [case for dtype in dtypes for case in matmul.curve_cases(on, dtype, quick)]
    base = matmul.largest(on, main, at_most=4096 if on.device.type == "cuda" else 512)
    some = (main,) if quick else tuple(dtypes)
    for dtype in some:
        tokens = matmul.tokens_for(on, dtype, spec, requested_tokens)
        cases += matmul.unlucky_cases(on, dtype, base, quick)
        own, left = matmul.model_cases(on, dtype, spec, tokens, forward_only=quick,
                                       within_s=_ONE_OF_EACH * budget_s / len(some))  # fmt: skip
        cases += own
        if left:
            notes.append(
                f"not timed with {tokens} tokens in {dtype}: {', '.join(left)}; they take too "
                "long, do not fit, or do not exist"
            )
    seq_len = min(spec.max_positions, 2048 if on.device.type == "cuda" else 256)
    cases += model_shapes.attention_cases(on, main, spec, seq_len, quick)
    if not quick:
        cases += model_shapes.vocabulary_cases(on, main, spec, matmul.tokens_for(on, main, spec))
        cases += matmul.fine_cases(on, main, base)
        if on.device.type == "cpu" and torch.get_num_threads() > 1:
            cases += matmul.one_thread_cases(on, main, base)
    return cases, notes


def _list_notes(device: torch.device, figures: Sequence[Figure], quick: bool) -> Iterator[str]:
    if quick:
        yield "vocabulary padding, backward matmuls and tiles are only measured without --quick"
    if device.type != "cuda":
        yield f"threads of the matmuls: {torch.get_num_threads()}"
        yield "fp16 on a CPU is useful only to check correctness, so it is not timed"
        if not any(f.key.has(dtype="bf16") for f in figures):
            yield "this processor has no bf16 instructions, so bf16 is not timed"


def _describe_implied_clocks(
    device: torch.device, features: Collection[str], figures: Sequence[Figure]
) -> tuple[str, ...]:
    if device.type == "cuda":
        return ()
    best = [f for f in figures if f.key.what == "best"]
    return tuple(note for figure in best if (note := _describe_implied_clock(figure, features)))


def _describe_implied_clock(figure: Figure, features: Collection[str]) -> str | None:
    """Return a note on the clock at which the best rate would be the processor's peak, or None.

    If the real clock is close to it, matmuls can hardly be faster. Returns None if the catalog does
    not have the processor's operations per cycle.
    """
    dtype: Dtype = figure.key.of["dtype"]  # type: ignore[assignment]
    span = flops_per_cycle(features, dtype)
    if span is None or figure.value is None:
        return None
    threads = torch.get_num_threads()
    most, least = (figure.value / threads / count / 1e9 for count in (span.least, span.most))
    clock = f"{least:.2f} GHz" if least == most else f"{least:.2f} to {most:.2f} GHz"
    return (
        f"the best {dtype} rate is the peak of {threads} core{'s'[: threads > 1]} at {clock}, with "
        f"all units busy ({span.least} to {span.most} operations a cycle, by the catalog); if the "
        "processor's clock is close to that, there is little left to gain"
    )


def _report_slow_sizes(figures: Sequence[Figure]) -> list[Advice]:
    """Report how much slower matmuls become if a dimension is slightly larger than a round size.

    The worst size is reported, per dtype and dimension.
    """
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


def _report_granularity(
    figures: Sequence[Figure], device: torch.device, features: Collection[str]
) -> list[Advice]:
    """Report at which multiples of a dimension the time of a matmul rises in steps.

    Such steps come from tiles of the kernel, on a GPU also from waves of tiles over its
    multiprocessors, and on a CPU from the blocks that threads divide.
    """
    found = []
    for dim in "mnk":
        fine = [f for f in figures if f.key.what == "fine" and f.key.has(dim=dim) and f.value]
        sweep = [f for f in fine if "threads" not in f.key.of]
        if len(sweep) < 2:  # all others are unstable
            continue
        sentences = [*_describe_steps(sweep, dim, device, features)]
        if device.type == "cuda":
            sentences += _describe_waves(sweep, device) if dim == "n" else []
        else:
            sentences += _describe_thread_blocks(sweep, [f for f in fine if f not in sweep], dim)
        found.append(_make_tile_advice(sweep, dim, sentences or ["no steps above the noise"]))
    return found


def _make_tile_advice(sweep: Sequence[Figure], dim: str, sentences: Sequence[str]) -> Advice:
    worst, best = (pick(sweep, key=lambda f: f.value or 0.0) for pick in (min, max))
    by = gain(worst, best, len(sweep) * (len(sweep) - 1) // 2)
    sizes = [int(figure.key.of[dim]) for figure in sweep]
    if by is not None and by.is_certain:
        ends = f"{dim} = {worst.key.of[dim]} to {dim} = {best.key.of[dim]}"
        sentences = [*sentences, f"from {ends} operations are {by} faster"]
    text = f"{dim} from {min(sizes)} to {max(sizes)} ({sweep[0].key.of['dtype']}): "
    known = {} if by is None else {"gain": by.value, "low": by.low, "high": by.high}
    return Advice(
        about="tiles", text=text + "; ".join(sentences), of=tuple(f.key for f in sweep), **known
    )


def _describe_steps(
    sweep: Sequence[Figure], dim: str, device: torch.device, features: Collection[str]
) -> Iterator[str]:
    sizes = [int(figure.key.of[dim]) for figure in sweep]
    steps = find_tile(sizes, [_matmul_s(figure) for figure in sweep])
    if steps is None:
        return
    yield (
        f"time rises by {steps.rise:.1%} in steps of {steps.tile} (this explains "
        f"{steps.explained:.0%} of the deviations from a straight line): multiples of {steps.tile} "
        "waste nothing"
    )
    dtype: Dtype = sweep[0].key.of["dtype"]  # type: ignore[assignment]
    bits = vector_bits(features, dtype) if device.type == "cpu" else None
    if bits is not None and (words := step_words(steps.tile, bits, dtype, dim)):
        yield words


def _describe_waves(sweep: Sequence[Figure], device: torch.device) -> Iterator[str]:
    count = torch.cuda.get_device_properties(device).multi_processor_count
    sizes, seconds = [int(f.key.of["n"]) for f in sweep], [_matmul_s(f) for f in sweep]
    if waves := find_waves(sizes, seconds, int(sweep[0].key.of["m"]), count):
        (high, wide), share = waves
        yield (
            f"waves of {count} tiles of {high} × {wide} explain {share:.0%} of the deviations from "
            "a straight line"
        )


def _describe_thread_blocks(
    sweep: Sequence[Figure], alone: Sequence[Figure], dim: str
) -> Iterator[str]:
    """Describe the cost of sizes that threads cannot divide evenly."""
    together = {f.key.of[dim]: _matmul_s(f) for f in sweep}
    one = {int(f.key.of[dim]): _matmul_s(f) for f in alone if f.key.of[dim] in together}
    threads = torch.get_num_threads()
    if found := find_threads([*one], [*one.values()], [together[size] for size in one], threads):
        wide, share = found
        yield (
            f"{threads} threads divide it in blocks of {wide} (this explains {share:.0%} of the "
            f"variation of their speed-up over one): multiples of {wide * threads} leave none idle"
        )


def _matmul_s(figure: Figure) -> float:
    m, n, k = (int(figure.key.of[name]) for name in "mnk")
    assert figure.value is not None
    return 2.0 * m * n * k / figure.value
