"""Rates of matmuls by size, and the cost of unfavourable sizes.

The rate of the best matmul on a machine is an upper bound for training (MAMF: Bekman, "Machine
Learning Engineering", "Maximum Achievable Matmul FLOPS"). Matmuls multiply A (m × k) by B (k × n)
and count as 2·m·n·k operations.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf

import torch
from torch import Tensor

from outpace.probing.timing.measure import Case
from outpace.records.figure import Figure, Key
from outpace.records.hardware import Dtype
from outpace.records.model import ModelSpec

Shape = tuple[int, int, int]  # m, n, k
TORCH: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip
# Allowed errors. Relative to the result: the resolution of its dtype. Relative to the sum of
# magnitudes: the rounding of fp32 sums and, for tf32, of the inputs.
_STORED: dict[Dtype, float] = {
    "fp32": 2**-23, "tf32": 2**-23, "bf16": 2**-7, "fp16": 2**-10, "fp8": 2**-7,
}  # fmt: skip
_SUMMED: dict[Dtype, float] = {
    "fp32": 2e-6, "tf32": 1e-3, "bf16": 2e-6, "fp16": 2e-6, "fp8": 2e-3,
}  # fmt: skip
_FP8_MULTIPLE = 16  # torch._scaled_mm supports only multiples of this
_LEAST_TIMED_S = 1e-3
_STEPS = (1, 8, 16, 64, 128)
_TIMES = (1, 2, 3)  # number of multiples of each step
ROUND = "none"  # name of a sweep's starting point
# Widths of square matmuls, smallest first.
_CURVE = tuple(1 << power for power in range(5, 15))


@dataclass(frozen=True)
class Bench:
    """A device for timing matmuls, and the longest time that one matmul may take.

    Random values are created once per dtype, and operands are slices of them. `rates` are rough
    FLOP/s of large matmuls, used only to choose sizes.
    """

    device: torch.device
    longest_s: float
    pools: dict[Dtype, Tensor]
    rates: dict[Dtype, float] = field(default_factory=dict)

    def supports(self, dtype: Dtype, shape: Shape) -> bool:
        """Return whether the operands fit into the pool and the dtype allows this shape."""
        m, n, k = shape
        fine = dtype != "fp8" or n % _FP8_MULTIPLE == k % _FP8_MULTIPLE == 0
        return fine and m * k + k * n <= self.pools[dtype].numel()

    def is_fast_enough(self, dtype: Dtype, shape: Shape) -> bool:
        """Return whether a matmul of this shape takes no longer than allowed."""
        m, n, k = shape
        return 2.0 * m * n * k / self.rates[dtype] <= self.longest_s


def dtypes_of(device: torch.device, features: Iterable[str], capability: float) -> list[Dtype]:
    """Return the dtypes whose matmuls are worth timing on a device.

    On CPUs, fp16 is left out, because it is over a hundred times slower than fp32, and so is bf16
    without instructions for it.
    """
    if device.type == "cuda":
        found: list[Dtype] = ["fp32", "fp16"]
        if capability >= 8.0:
            found += ["tf32", "bf16"]
        if capability >= 8.9:
            found += ["fp8"]
        return found
    return ["fp32", "bf16"] if {"avx512_bf16", "amx_bf16", "bf16"} & set(features) else ["fp32"]


def bench(device: torch.device, dtypes: Sequence[Dtype], quick: bool) -> Bench:
    """Create random operands for matmuls on a device, and estimate its rates."""
    pools: dict[Dtype, Tensor] = {}
    generator = torch.Generator(device).manual_seed(0)
    for dtype in dtypes:
        if dtype == "tf32" and "fp32" in pools:  # the same values with another matmul
            pools[dtype] = pools["fp32"]
            continue
        values = torch.empty(_pool_size(device, quick), device=device, dtype=torch.bfloat16)
        pools[dtype] = values.normal_(generator=generator).to(TORCH[dtype])
    on = Bench(device, 0.008 if quick else 0.02, pools)
    return replace(on, rates={dtype: _rough_rate(on, dtype) for dtype in dtypes})


def _pool_size(device: torch.device, quick: bool) -> int:
    if device.type != "cuda":
        return 1 << (26 if quick else 27)
    free, _ = torch.cuda.mem_get_info(device)
    return min(1 << 29, free // 64)


def matmul(on: Bench, dtype: Dtype, shape: Shape) -> Callable[[], Tensor]:
    """Return a call that computes a matmul."""
    m, n, k = shape
    pool = on.pools[dtype]
    a_MK = pool[: m * k].view(m, k)
    b_KN = pool[pool.numel() - k * n :].view(k, n)
    if dtype == "fp8":
        one = torch.ones((), device=on.device)
        b_KN = pool[pool.numel() - k * n :].view(n, k).t()
        return lambda: torch._scaled_mm(a_MK, b_KN, one, one, out_dtype=torch.bfloat16)
    return lambda: torch.mm(a_MK, b_KN)


@contextmanager
def _in_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _make_check(on: Bench, dtype: Dtype, shape: Shape) -> Callable[[Tensor], str | None]:
    """Return a check of a matmul's first and last row in double precision."""
    m, n, k = shape

    def check(found_MN: Tensor) -> str | None:
        pool = on.pools[dtype]
        tail = pool[pool.numel() - k * n :]
        b_KN = tail.view(n, k).t() if dtype == "fp8" else tail.view(k, n)
        return wrong_matmul(found_MN, pool[: m * k].view(m, k), b_KN, dtype)

    return check


def wrong_matmul(found_MN: Tensor, a_MK: Tensor, b_KN: Tensor, dtype: Dtype) -> str | None:
    """Check a matmul's first and last row in double precision; return the error, if any."""
    ends = [0, len(a_MK) - 1]
    a_2K, b_KN = a_MK[ends].double(), b_KN.double()
    true = a_2K @ b_KN
    allowed = 2 * _STORED[dtype] * true.abs() + _SUMMED[dtype] * (a_2K.abs() @ b_KN.abs())
    away = (found_MN[ends].double() - true).abs()
    # Written so that NaN counts as wrong, and 0 equals 0.
    if bool((away <= allowed).all()):
        return None
    return f"a matmul's error is {(away / allowed).max().item():.3g} times its rounding error"


@contextmanager
def _on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def case(on: Bench, dtype: Dtype, shape: Shape, what: str, **more: str | int) -> Case:
    """Return a case that measures the FLOP/s of one matmul."""
    m, n, k = shape
    key = Key(kind="matmul", what=what, of={"dtype": dtype, "m": m, "n": n, "k": k, **more})
    return Case(key, "FLOP/s", lambda: matmul(on, dtype, shape), 2.0 * m * n * k,
                _make_check(on, dtype, shape),
                _in_tf32 if dtype == "tf32" else nullcontext)  # fmt: skip


def _rough_rate(on: Bench, dtype: Dtype) -> float:
    """Estimate the FLOP/s of a matmul that takes longer than its launch, by the host's clock."""
    for size in _CURVE[4:]:
        if not on.supports(dtype, (size, size, size)):
            break
        rate = _estimate_rate(on, dtype, (size, size, size))
        if 2.0 * size**3 / rate >= _LEAST_TIMED_S:
            break
    return rate


def _estimate_rate(on: Bench, dtype: Dtype, shape: Shape) -> float:
    m, n, k = shape
    call = matmul(on, dtype, shape)
    with _in_tf32() if dtype == "tf32" else nullcontext():
        return 2.0 * m * n * k / min(_time_call_s(call, on.device) for _ in range(4))


def _time_call_s(call: Callable[[], Tensor], device: torch.device) -> float:
    begin_s = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin_s


def curve_cases(on: Bench, dtype: Dtype, quick: bool) -> list[Case]:
    """Return cases of square matmuls by size, up to the longest allowed time."""
    cubes = [(n, n, n) for n in _CURVE[1 :: 2 if quick else 1]]
    sizes = [one[0] for one in cubes if on.is_fast_enough(dtype, one) and on.supports(dtype, one)]
    return [case(on, dtype, (n, n, n), "curve") for n in sizes]


def largest(on: Bench, dtype: Dtype, at_most: int) -> int:
    """Return the largest power-of-two width whose square matmul is short enough."""
    fitting = [n for n in _CURVE if n <= at_most and on.is_fast_enough(dtype, (n, n, n))]
    return max(fitting, default=_CURVE[0])


def tokens_for(on: Bench, dtype: Dtype, spec: ModelSpec, given: int | None = None) -> int:
    """Return the given number of tokens, or else one that keeps a model's matmuls short.

    By default, this is the largest power of two for which all matmuls are short enough.
    """
    if given is not None:
        return given
    for power in range(14, 4, -1):
        shapes = model_shapes(spec, 1 << power).values()
        if all(on.is_fast_enough(dtype, shape) for shape in shapes):
            return 1 << power
    return 1 << 4


def fine_cases(on: Bench, dtype: Dtype, base: int) -> list[Case]:
    """Return matmuls with each dimension in small steps.

    Their times show the tiles of the kernel, and a GPU's waves of tiles over its multiprocessors.
    """
    by = (16, 64) if on.device.type == "cuda" else (8, 16)
    sweeps = [[*range(1, 9), *range(by[0], by[0] * by[1] + 1, by[0])] for _ in range(3)]
    if on.device.type == "cuda":
        sweeps[1] += range(16 * 64, 16 * 64 + 64 * 48, 64)  # several waves of tiles along n
    shapes = [
        (dim, _offset_shape(base, dim, offset))
        for dim, sweep in enumerate(sweeps)
        for offset in sweep
    ]
    return [
        case(on, dtype, shape, "fine", dim="mnk"[dim])
        for dim, shape in dict.fromkeys(shapes)
        if on.supports(dtype, shape)
    ]


def one_thread_cases(on: Bench, dtype: Dtype, base: int) -> list[Case]:
    """Return matmuls with m and n in steps of 8, on a single thread of a CPU.

    `fine_cases` has the same shapes on all threads; the ratio shows how threads divide the work.
    """
    shapes = [
        (dim, _offset_shape(base, dim, 8 * step)) for dim in range(2) for step in range(1, 17)
    ]
    return [
        replace(case(on, dtype, shape, "fine", dim="mnk"[dim], threads=1), within=_on_one_thread)
        for dim, shape in shapes
        if on.supports(dtype, shape)
    ]


def unlucky_cases(on: Bench, dtype: Dtype, base: int, quick: bool) -> list[Case]:
    """Return matmuls with one dimension slightly above a round size, and one with none above it.

    Sizes are larger by a multiple (1 to 3 times) of 1, 8, 16, 64 or 128.
    """
    round_one = case(on, dtype, (base, base, base), "unlucky", dim=ROUND)
    above = {step * times for step in _STEPS for times in _TIMES}
    shapes = [
        (dim, _offset_shape(base, dim, offset))
        for dim in range(3)
        for offset in (_STEPS[:1] if quick else sorted(above))
    ]
    return [round_one] + [
        case(on, dtype, shape, "unlucky", dim="mnk"[dim])
        for dim, shape in shapes
        if on.supports(dtype, shape)
    ]


def _offset_shape(base: int, dim: int, offset: int) -> Shape:
    m, n, k = (base + offset if number == dim else base for number in range(3))
    return m, n, k


def model_shapes(spec: ModelSpec, tokens: int) -> dict[str, Shape]:
    """Return the shapes of the matmuls in a model's forward pass, by name."""
    kv = 2 * spec.kv_heads * spec.head_dim
    hidden, ffn = spec.hidden, spec.ffn
    wide = 2 * ffn if spec.gated else ffn
    return {
        "attention in": (tokens, spec.heads * spec.head_dim + kv, hidden),
        "attention out": (tokens, hidden, spec.heads * spec.head_dim),
        "feed-forward in": (tokens, wide, hidden),
        "feed-forward out": (tokens, hidden, ffn),
        "head": (tokens, spec.vocab, hidden),
    }


def backward_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of the backward matmuls: dX for the input, dW for the weight."""
    found: dict[str, Shape] = {}
    for part, (tokens, n, k) in shapes.items():
        found |= {f"{part} dX": (tokens, k, n), f"{part} dW": (n, k, tokens)}
    return found


def model_cases(
    on: Bench, dtype: Dtype, spec: ModelSpec, tokens: int, forward_only: bool = False,
    within_s: float = inf,
) -> tuple[list[Case], list[str]]:  # fmt: skip
    """Return cases of a model's matmuls, and the names of omitted ones.

    A matmul is omitted if its operands do not fit, if the dtype does not support its shape, or if
    it and all smaller ones, called once each, would take longer than `within_s`.
    """
    shapes = model_shapes(spec, tokens)
    shapes |= {} if forward_only else backward_shapes(shapes)
    left_s, taken = within_s, set()
    for part, shape in sorted(shapes.items(), key=lambda one: _matmul_flops(one[1])):
        left_s -= _matmul_flops(shape) / on.rates[dtype]
        if left_s >= 0 and on.supports(dtype, shape):
            taken.add(part)
    cases = [case(on, dtype, s, "model", part=p) for p, s in shapes.items() if p in taken]
    return cases, [part for part in shapes if part not in taken]


def _matmul_flops(shape: Shape) -> float:
    m, n, k = shape
    return 2.0 * m * n * k


def best_cases(on: Bench, dtype: Dtype, cases: Sequence[Case], count: int = 3) -> list[Case]:
    """Return candidates for the fastest shape: the fastest so far, and the first of them doubled.

    Candidates are timed again, because the best of many timings is partly due to luck.
    """
    of = [one.key for one in cases if one.key.kind == "matmul" and one.key.has(dtype=dtype)]
    tried = dict.fromkeys(_shape_of_key(key) for key in of)
    shapes = sorted(tried, key=lambda shape: -_estimate_rate(on, dtype, shape))[:count]
    m, n, k = shapes[0]
    larger = [(2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k), (2 * m, 2 * n, 2 * k)]
    shapes += [one for one in larger if on.supports(dtype, one) and one not in shapes]
    return [case(on, dtype, shape, "candidate") for shape in shapes]


def _shape_of_key(key: Key) -> Shape:
    m, n, k = (int(key.of[name]) for name in "mnk")
    return m, n, k


def best(found: Sequence[Figure], dtype: Dtype) -> Figure | None:
    """Return the fastest candidate, renamed "best", or None."""
    known = [f for f in found if f.value and f.key.what == "candidate" and f.key.has(dtype=dtype)]
    if not known:
        return None
    top = max(known, key=lambda figure: figure.value or 0)
    # The shape is not in the key: two probes may find different shapes, but their rates are
    # compared.
    return top.model_copy(update={"key": Key(kind="matmul", what="best", of={"dtype": dtype})})
