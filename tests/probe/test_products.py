"""The matmul section on real products: right results, its figures, and advice from planted ones."""

from statistics import median

import pytest
import torch

from outpace.catalog.models import preset
from outpace.probe import design, matmul
from outpace.probe.measure import Case, Effort, HostClock, WrongResultError, measure
from outpace.probe.products import probe_matmul
from outpace.probe.sawtooth import next_multiple
from outpace.probe.turns import finished
from outpace.records.figure import Figure, Key

CPU = torch.device("cpu")


def figure(kind, what, rounds, unit="s", **of):
    return Figure(
        key=Key(kind=kind, what=what, of=of), unit=unit, value=median(rounds), origin="measured",
        low=min(rounds), high=max(rounds), rounds=tuple((one,) for one in rounds),
    )  # fmt: skip


def test_a_quick_section_has_a_best_rate_for_each_dtype_and_the_models_own_products():
    spec = preset("outpace-tiny")
    shares = []
    section = finished(probe_matmul(CPU, ("avx512_bf16",), spec, True, 1.0, shares.append))
    kinds = {(f.key.kind, f.key.what, f.key.of.get("dtype")) for f in section.figures}
    for dtype in ("fp32", "bf16"):
        assert {("matmul", "curve", dtype), ("matmul", "candidate", dtype)} <= kinds
    parts = {f.key.of["part"] for f in section.figures if f.key.what == "model"}
    assert parts == {*matmul.model_shapes(spec, 1)}
    assert any(f.key.kind == "attention" for f in section.figures)
    assert max(shares) >= 0.9


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(33, 65, 17), (128, 64, 256)])
def test_products_are_checked(dtype, shape):
    on = matmul.bench(CPU, [dtype], quick=True)
    case = matmul.case(on, dtype, shape, "curve")
    result = case.make()()
    assert case.check(result) is None
    result[0, 3] += 1e3
    assert "off by" in case.check(result)
    broken = Case(case.key, case.unit, lambda: lambda: result, case.amount, case.check)
    with pytest.raises(WrongResultError, match="matmul curve"):
        finished(measure([broken], HostClock(), Effort(1.0, rounds=1)))


def test_shapes_that_a_dtype_does_not_have_are_left_out():
    """torch._scaled_mm takes multiples of 16 only, and gpt2's vocabulary is odd."""
    on = matmul.Bench(CPU, 0.02, {"fp8": torch.empty(1 << 26)}, {"fp8": 1e15})
    spec = preset("gpt2")
    parts = {case.key.of["part"] for case in matmul.model_cases(on, "fp8", spec, 64)}
    assert parts == {*matmul.model_shapes(spec, 64)} - {"head"}
    for case in matmul.unlucky_cases(on, "fp8", 512, quick=False):
        assert case.key.of["n"] % 16 == case.key.of["k"] % 16 == 0
    assert not on.takes("fp8", (64, 64, 1 << 26))


def test_attention_is_checked():
    on = matmul.bench(CPU, ["fp32"], quick=True)
    spec = preset("outpace-tiny")
    forward = next(
        case for case in design.attention_cases(on, "fp32", spec, 32, quick=False)
        if case.key.what == "forward"
    )  # fmt: skip
    out, *rest = forward.make()()
    assert forward.check((out, *rest)) is None
    assert "off by" in forward.check((out + 1, *rest))


def test_heads_are_all_divisors_of_the_width():
    counts = design.head_counts(1600)
    assert {25, 20, 10, 100} <= set(counts)
    assert all(1600 % count == 0 and 16 <= 1600 // count <= 256 for count in counts)


def test_padding_a_vocabulary_is_advised_by_what_was_measured():
    spec = preset("gpt2")
    padded = next_multiple(spec.vocab, 64)
    times = [1.0 + 0.001 * n for n in range(15)]
    figures = [
        figure("vocabulary", "time", [1.1 * t for t in times], dtype="bf16", vocab=spec.vocab),
        figure("vocabulary", "time", times, dtype="bf16", vocab=padded),
    ]
    (advice,) = design.vocabulary_advice(figures, spec)
    assert "50257 → 50304" in advice.text
    assert advice.gain == pytest.approx(0.1)
    assert advice.low > 0
    (none,) = design.vocabulary_advice([figures[1].model_copy(update={"key": figures[0].key}),
                                        figures[1]], spec)  # fmt: skip
    assert "leave it as it is" in none.text


def test_fewer_heads_are_advised_within_twice_the_number():
    spec = preset("gpt2-xl")
    times = [1.0 + 0.002 * n for n in range(15)]
    of = {"dtype": "fp32", "seq_len": 1024}
    figures = [
        figure("attention", "forward and backward", [share * t for t in times],
               heads=heads, head_dim=1600 // heads, **of)
        for heads, share in ((25, 1.2), (20, 1.0), (10, 0.5))
    ]  # fmt: skip
    (advice,) = design.heads_advice(figures, spec)
    assert "25 heads of 64 → 20 of 80" in advice.text
    assert advice.gain == pytest.approx(0.2)
