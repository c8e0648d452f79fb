"""Memory rates: reading, writing, copying, elementwise operations and allocation.

Sizes range from arrays that fit in a cache to arrays larger than all caches, which show the rate of
memory itself. As in McCalpin, "STREAM: Sustainable Memory Bandwidth in High Performance Computers",
bytes read and written count, but not bytes that a cache reads before a write.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.probing.collectives.overlap import compute_nothing, share_hidden
from outpace.probing.compute.matmul import wrong_matmul
from outpace.probing.hardware.cpus import read_cpus
from outpace.probing.timing.interleave import Turns
from outpace.probing.timing.measure import Case, Effort, clock_of, measure, rounds_of
from outpace.probing.timing.section import ProbeSection
from outpace.records.figure import Figure, Key
from outpace.records.probe_results import Advice

# Numbers of fp32 elements; `large_elements` gives the largest.
_QUICK = (1 << 14, 1 << 18)
_FULL = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
# Size of an array in multiples of the caches, which would hold much of a smaller one.
_BEYOND = 2
_LEAST, _MOST = 1 << 24, 1 << 28
WAYS = ("to the host", "to the device", "both ways")
_OVERLAPPED_ELEMENTS = 1 << 26  # elements of transfers during a matmul
_USUAL_L2_BYTES = 128 << 20  # assumed if a GPU does not report it


def large_elements(device: torch.device) -> int:
    """Return the number of fp32 elements in an array that exceeds all caches.

    The array is smaller if it would take a large part of the free memory.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        cache = getattr(properties, "L2_cache_size", 0) or _USUAL_L2_BYTES
        free = torch.cuda.mem_get_info(device)[0]
    else:
        cache = max((c.cache_bytes * c.count for c in read_cpus().caches), default=0)
        free = psutil.virtual_memory().available
    wanted = max(_LEAST, min(_MOST, _BEYOND * cache // 4))
    return int(min(wanted, free // 64))


def memory_cases(device: torch.device, quick: bool) -> list[Case]:
    """Return cases that time a device's memory and, on a GPU, transfers to and from the host."""
    large = large_elements(device)
    elements = [count for count in (_QUICK if quick else _FULL) if count < large] + [large]
    pool = torch.empty(large, device=device).normal_()
    out = torch.empty_like(pool)
    cases = [case for count in elements for case in _stream_cases(pool[:count], out[:count])]
    cases += _elementwise_cases(pool, out, quick)
    cases += _allocation_cases(device, quick)
    cases += [_optimizer_case(device, large // 4)]  # elements of each of the step's four arrays
    if device.type == "cuda":
        cases += list(_transfer_cases(device, quick))
    return cases


def _key(what: str, **of: str | int) -> Key:
    return Key(kind="memory", what=what, of=of)


def _returns(call: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
    return lambda: call


def _stream_cases(x: Tensor, out: Tensor) -> Iterator[Case]:
    size = x.nbytes

    def copy_fault(result: Tensor) -> str | None:
        return None if torch.equal(result, x) else "the copy is not equal"

    def write_fault(result: Tensor) -> str | None:
        return None if bool((result == 1.5).all()) else "not all was written"

    yield Case(
        _key("copy", bytes=size), "B/s", _returns(lambda: out.copy_(x)), 2 * size, copy_fault
    )
    yield Case(
        _key("write", bytes=size), "B/s", _returns(lambda: out.fill_(1.5)), size, write_fault
    )
    yield Case(_key("read", bytes=size), "B/s", _returns(x.sum), size, lambda s: _sum_fault(s, x))


def _sum_fault(result: Tensor, x: Tensor) -> str | None:
    """Check a sum; its allowed error is relative to the sum of absolute values."""
    true = x.sum(dtype=torch.float64).item()
    allowed = 1e-6 * x.abs().sum(dtype=torch.float64).item()
    return None if abs(result.item() - true) <= allowed else f"sum {result.item()} is not {true}"


def _elementwise_cases(x: Tensor, out: Tensor, quick: bool) -> Iterator[Case]:
    """Yield elementwise operations of transformers, on arrays larger than any cache."""
    size = x.nbytes

    def make_check(reference: Callable[[Tensor], Tensor]) -> Callable[[Tensor], str | None]:
        few = slice(0, 1 << 16)

        def check(found: Tensor) -> str | None:
            flat, true = found.view(-1)[few], reference(x[few].double())
            return None if torch.allclose(flat.double(), true, atol=1e-4) else "wrong values"

        return check

    gelu = partial(torch.ops.aten.gelu.out, x, out=out)
    yield Case(_key("gelu", bytes=size), "B/s", _returns(gelu), 2 * size, make_check(F.gelu))
    if quick:
        return
    yield Case(_key("add", bytes=size), "B/s", _returns(lambda: torch.add(x, x, out=out)), 2 * size,
               make_check(lambda few: few + few))  # fmt: skip
    rows, softened = (whole[: 1024 * (whole.numel() // 1024)].view(-1, 1024) for whole in (x, out))
    yield Case(_key("softmax", bytes=size), "B/s",
               _returns(lambda: torch.softmax(rows, -1, out=softened)), 2 * size,
               make_check(lambda few: few.view(-1, 1024).softmax(-1).view(-1)))  # fmt: skip


def _allocation_cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for size in (1 << 16, 1 << 22) if quick else (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27):
        count = size // 4
        fill = partial(_allocate, count, device)
        yield Case(_key("allocate and fill", bytes=size), "s", _returns(fill),
                   check=partial(_fill_fault, count))  # fmt: skip


def _fill_fault(count: int, result: Tensor) -> str | None:
    right = result.numel() == count and bool((result == 1.0).all())
    return None if right else "not all was written"


def _allocate(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, device=device).fill_(1.0)


def _optimizer_case(device: torch.device, elements: int) -> Case:
    """Return a case of AdamW's step, which reads four arrays and writes all except the gradient."""
    parameter = torch.nn.Parameter(torch.randn(elements, device=device))
    parameter.grad = torch.randn_like(parameter)
    before = parameter.detach()[:1024].clone()
    optimizer = torch.optim.AdamW([parameter], lr=1e-9, weight_decay=0.0, fused=True)
    moved = 7 * parameter.nbytes

    def step_fault(_: object) -> str | None:
        """Check the first step's moment, and that the tiny learning rate left the weights alone."""
        moment = optimizer.state[parameter]["exp_avg"][:1024]
        assert parameter.grad is not None
        right = torch.allclose(moment, 0.1 * parameter.grad[:1024], rtol=1e-4)
        unmoved = torch.allclose(parameter.detach()[:1024], before, atol=1e-6)
        return None if right and unmoved else "an AdamW step gives wrong values"

    return Case(_key("AdamW step", bytes=moved), "B/s", _returns(optimizer.step), moved, step_fault)


def _transfer_cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield cases that time transfers between host and device.

    Pageable and pinned memory is copied in each direction. Then, pinned memory is copied during a
    matmul.
    """
    for size in (1 << 26,) if quick else (1 << 12, 1 << 16, 1 << 20, 1 << 26, 1 << 28):
        there = torch.empty(size // 4, device=device).normal_()
        for pinned in (False, True):
            here = torch.empty(size // 4, pin_memory=pinned).normal_()
            of = {"bytes": size, "memory": "pinned" if pinned else "pageable"}
            for what, to, source in (("to device", there, here), ("to host", here, there)):
                send = partial(to.copy_, source, non_blocking=True)
                yield Case(
                    _key(what, **of), "B/s", _returns(send), size, partial(_sending_fault, source)
                )
    yield from _overlap_cases(device)


def _sending_fault(source: Tensor, received: Tensor) -> str | None:
    torch.cuda.synchronize()
    same = torch.equal(source.cpu(), received.cpu())
    return None if same else "the received data differ from the sent data"


def _overlap_cases(device: torch.device) -> Iterator[Case]:
    """Yield cases that time a matmul, transfers, and the matmul during these transfers.

    Transfers go to the device, to the host, and in both directions at the same time.
    """
    a = torch.randn(8192, 8192, device=device, dtype=torch.float16)
    matmul = partial(torch.mm, a, a)
    ways: dict[str, _Ways] = {}
    for way in WAYS[:2]:
        there = torch.empty(_OVERLAPPED_ELEMENTS, device=device).normal_()
        here = torch.empty(_OVERLAPPED_ELEMENTS, pin_memory=True).normal_()
        to, source = (here, there) if way == "to the host" else (there, here)
        ways[way] = [(torch.cuda.Stream(device), source, to)]
    ways[WAYS[2]] = ways[WAYS[0]] + ways[WAYS[1]]  # in two streams at the same time

    def matmul_fault(result: Tensor) -> str | None:
        return wrong_matmul(result, a, a, "fp16")

    yield Case(_key("overlap", of="matmul"), "s", _returns(matmul), check=matmul_fault)
    for way, sends in ways.items():
        alone = partial(_overlap_transfers, device, sends, compute_nothing)
        check = partial(_arrival_fault, sends)
        yield Case(_key("overlap", of=f"transfer {way}"), "s", _returns(alone), check=check)
        both = partial(_overlap_transfers, device, sends, matmul)
        yield Case(_key("overlap", of=f"matmul and transfer {way}"), "s", _returns(both),
                   check=partial(_either_fault, matmul_fault, check))  # fmt: skip


# A stream, the tensor that it copies, and the destination.
_Ways = list[tuple[torch.cuda.Stream, Tensor, Tensor]]


def _overlap_transfers(device: torch.device, sends: _Ways, compute: Callable[[], Any]) -> Any:
    """Compute during transfers, each in a separate stream; make the device wait for all of them."""
    here = torch.cuda.current_stream(device)
    for stream, source, to in sends:
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
    found = compute()
    for stream, _, _ in sends:
        here.wait_stream(stream)
    return found


def _arrival_fault(sends: _Ways, _: Any) -> str | None:
    """Check the transferred data, then zero the destinations for the next check."""
    for _stream, source, to in sends:
        wrong = _sending_fault(source, to)
        if wrong is not None:
            return wrong
    for _stream, _source, to in sends:
        to.zero_()
    return None


def _either_fault(
    one: Callable[[Tensor], str | None], other: Callable[[Any], str | None], result: Tensor
) -> str | None:
    return one(result) or other(result)


def probe_memory(
    device: torch.device, quick: bool, budget_s: float, progress: Callable[[float], None]
) -> Turns[ProbeSection]:
    """Measure a device's memory and, on a GPU, transfers between it and the host."""
    effort = Effort(budget_s, rounds_of(quick))
    figures = yield from measure(memory_cases(device, quick), clock_of(device), effort, progress)
    alike = "host and device are the same, so there are no transfers to measure"
    notes = () if device.type == "cuda" else (alike,)
    hidden = hidden_shares(figures)
    advice = tuple(hidden_advice(hidden))
    return ProbeSection((*figures, *hidden), advice, (*notes, *hidden_notes(hidden)))


def hidden_shares(figures: Sequence[Figure]) -> list[Figure]:
    """Return, for each direction of transfer, the fraction that overlap with a matmul hides.

    It is a fraction of the shorter time, the matmul's or the transfer's: 1 if both together take
    only as long as the longer one alone.
    """
    took = {f.key.of["of"]: f for f in figures if f.key.what == "overlap"}
    return [
        share_hidden(
            _key("hidden share", of=f"transfer {way}"),
            [took[name] for name in ("matmul", f"transfer {way}", f"matmul and transfer {way}")],
        )
        for way in WAYS if f"transfer {way}" in took
    ]  # fmt: skip


def hidden_advice(hidden: Sequence[Figure]) -> Iterator[Advice]:
    """Describe each hidden fraction (see `hidden_shares`), with its interval."""
    for figure in hidden:
        if figure.value is not None and figure.low is not None and figure.high is not None:
            yield Advice(
                about="overlap", of=(figure.key,),
                text=f"a matmul during a {figure.key.of['of']}: {figure.value:.0%} of the "
                     f"shorter hides behind the longer ({figure.low:.0%} to {figure.high:.0%})",
            )  # fmt: skip


def hidden_notes(hidden: Sequence[Figure]) -> Iterator[str]:
    """Yield a note for each hidden fraction (see `hidden_shares`) that is too unstable."""
    for figure in hidden:
        if figure.value is None:
            yield (
                f"overlap: the hidden share of a matmul and a {figure.key.of['of']} is not "
                f"stable enough: {figure.unstable}"
            )
