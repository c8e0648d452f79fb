"""The matmul section on real matmuls: right results, its figures, and advice from planted ones."""

from dataclasses import replace
from statistics import median

import pytest
import torch

from outpace.catalog.models import preset
from outpace.probing.compute import matmul, model_shapes
from outpace.probing.compute.benchmark import _report_granularity, probe_matmul
from outpace.probing.compute.tile_detection import next_multiple
from outpace.probing.timing.interleave import run_turns
from outpace.probing.timing.measure import Case, Effort, HostClock, WrongResultError, measure
from outpace.records.figure import Figure, Key

CPU = torch.device("cpu")


def figure(kind, what, rounds, unit="s", **of):
    return Figure(
        key=Key(kind=kind, what=what, of=of), unit=unit, value=median(rounds), origin="measured",
        low=min(rounds), high=max(rounds), rounds=tuple((one,) for one in rounds),
    )  # fmt: skip


def test_a_quick_section_has_a_best_rate_for_each_dtype_and_the_models_own_matmuls():
    spec = preset("outpace-tiny")
    shares = []
    section = run_turns(probe_matmul(CPU, ("avx512_bf16",), spec, True, 1.0, shares.append))
    kinds = {(f.key.kind, f.key.what, f.key.of.get("dtype")) for f in section.figures}
    for dtype in ("fp32", "bf16"):
        assert {("matmul", "curve", dtype), ("matmul", "candidate", dtype)} <= kinds
    parts = {f.key.of["part"] for f in section.figures if f.key.what == "model"}
    assert parts == {*matmul.model_shapes(spec, 1)}
    assert any(f.key.kind == "attention" for f in section.figures)
    assert max(shares) >= 0.9


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(33, 65, 17), (128, 64, 256)])
def test_matmuls_are_checked(dtype, shape):
    on = matmul.bench(CPU, [dtype], quick=True)
    case = matmul.case(on, dtype, shape, "curve")
    result = case.make()()
    assert case.check(result) is None
    result[0, 3] += 1e3
    assert "times its rounding error" in case.check(result)
    broken = Case(case.key, case.unit, lambda: lambda: result, case.amount, case.check)
    with pytest.raises(WrongResultError, match="matmul curve"):
        run_turns(measure([broken], HostClock(), Effort(1.0, rounds=1)))


def test_a_result_that_is_no_number_is_wrong():
    a = torch.randn(4, 4)
    assert matmul.wrong_matmul(a @ a, a, a, "fp32") is None
    assert matmul.wrong_matmul(torch.full((4, 4), torch.nan), a, a, "fp32") is not None


def test_shapes_that_a_dtype_does_not_have_are_left_out():
    """torch._scaled_mm takes multiples of 16 only, and gpt2's vocabulary is odd."""
    on = matmul.Bench(CPU, 0.02, {"fp8": torch.empty(1 << 26)}, {"fp8": 1e15})
    spec = preset("gpt2")
    cases, left = matmul.model_cases(on, "fp8", spec, 64)
    forward = matmul.model_shapes(spec, 64)
    assert left == ["head", "head dX"]
    assert {case.key.of["part"] for case in cases} == {
        *forward, *matmul.backward_shapes(forward)
    } - {*left}  # fmt: skip
    for case in matmul.unlucky_cases(on, "fp8", 512, quick=False):
        assert case.key.of["n"] % 16 == case.key.of["k"] % 16 == 0
    assert not on.supports("fp8", (64, 64, 1 << 26))


def test_the_backward_of_a_matmul_is_of_its_sizes():
    shapes = matmul.backward_shapes({"head": (64, 50257, 768)})
    assert shapes == {"head dX": (64, 768, 50257), "head dW": (50257, 768, 64)}


def test_as_many_tokens_as_are_given_and_what_takes_too_long_is_left_out():
    on = matmul.Bench(CPU, 0.02, {"fp32": torch.empty(1 << 28)}, {"fp32": 1e11})
    spec = preset("gpt2")
    assert matmul.tokens_for(on, "fp32", spec, 4096) == 4096
    assert matmul.tokens_for(on, "fp32", spec) < 256
    cases, left = matmul.model_cases(on, "fp32", spec, 4096)
    assert left == [] and len(cases) == 15
    # All but the head's take 0.17 s each at most, 1.6 s together; the head's 3.2 s each.
    cases, left = matmul.model_cases(on, "fp32", spec, 4096, within_s=2.5)
    assert left == ["head", "head dX", "head dW"]
    assert all(case.key.of["m"] == 4096 for case in cases if " d" not in case.key.of["part"])
    cases, left = matmul.model_cases(on, "fp32", spec, 4096, forward_only=True)
    assert {case.key.of["part"] for case in cases} == {*matmul.model_shapes(spec, 1)}


@pytest.mark.parametrize("what", ["forward", "forward and backward"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_attention_is_checked(what, causal, dtype):
    on = matmul.bench(CPU, [dtype], quick=True)
    spec = preset("outpace-tiny").model_copy(update={"causal": causal})
    cases = model_shapes.attention_cases(on, dtype, spec, 32, quick=False)
    case = next(case for case in cases if case.key.what == what and case.key.of["heads"] > 1)
    found = case.make()()
    assert case.check(found) is None
    assert "the output is off" in case.check(replace(found, out=found.out + 1))
    for number, name in enumerate(("dQ", "dK", "dV") if found.grads else ()):
        wrong = list(found.grads)
        wrong[number] = 1.1 * wrong[number]
        assert f"{name} is off" in case.check(replace(found, grads=tuple(wrong)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_heads_three_matmuls_are_checked(dtype):
    on = matmul.bench(CPU, [dtype], quick=True)
    spec = preset("outpace-tiny").model_copy(update={"vocab": 5003})
    case, *_ = model_shapes.vocabulary_cases(on, dtype, spec, 48)
    assert case.check(case.make()()) is None
    for number in range(3):
        found = list(case.make()())
        found[number] = found[number].clone()
        found[number][-1, 7] += 1e3
        assert "times its rounding error" in case.check(tuple(found))


def test_a_vocabulary_that_does_not_fit_is_left_out():
    on = matmul.Bench(CPU, 0.02, {"fp32": torch.empty(1 << 20)}, {"fp32": 1e11})
    assert model_shapes.vocabulary_cases(on, "fp32", preset("gpt2"), 32) == []


def test_heads_are_all_divisors_of_the_width():
    counts = model_shapes.head_counts(1600)
    assert counts == [1600 // dim for dim in range(8, 1601) if 1600 % dim == 0]
    assert {25, 20, 10, 100, 200, 1} <= set(counts)


def test_numbers_of_heads_that_a_device_cannot_compute_are_left_out(monkeypatch):
    on = matmul.bench(CPU, ["fp32"], quick=True)
    real = torch.nn.functional.scaled_dot_product_attention

    def narrow(q, *rest, **more):
        if q.shape[-1] > 64:
            raise RuntimeError("no kernel for this head dimension")
        return real(q, *rest, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", narrow)
    spec = preset("outpace-tiny")
    cases = model_shapes.attention_cases(on, "fp32", spec, 16, quick=False)
    dims = {case.key.of["head_dim"] for case in cases}
    width = spec.heads * spec.head_dim
    assert dims == {dim for dim in range(8, 65) if width % dim == 0}


def test_unlucky_sizes_are_several_multiples_of_each_step():
    on = matmul.Bench(CPU, 0.02, {"fp32": torch.empty(1 << 24)}, {"fp32": 1e11})
    many = {1, 2, 3, 8, 16, 24, 32, 48, 64, 128, 192, 256, 384}
    for quick, above in ((True, {1}), (False, many)):
        keys = [case.key for case in matmul.unlucky_cases(on, "fp32", 512, quick)]
        assert len(set(keys)) == len(keys)
        for dim in "mnk":
            assert {key.of[dim] - 512 for key in keys if key.has(dim=dim)} == above


def swept(dim, seconds, **more):
    """Matmuls of 512 with one dimension of another size, each of which takes so long."""
    figures = []
    for size, took_s in seconds.items():
        of = {"m": 512, "n": 512, "k": 512, "dtype": "fp32", dim: size, "dim": dim, **more}
        rate = 2.0 * of["m"] * of["n"] * of["k"] / took_s
        rates = [rate * (1 + 0.0001 * n) for n in (-2, 2, -1, 1, 0) * 5]
        figures.append(figure("matmul", "fine", rates, "FLOP/s", **of))
    return figures


def test_tiles_are_said_in_registers_and_threads_with_what_they_gain(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    sizes = range(520, 513 + 160, 8)
    alone = {n: 1e-3 * -(-n // 16) for n in sizes}
    both = {n: 1e-3 * -(-n // 32) for n in sizes}
    (advice,) = _report_granularity(
        [*swept("n", both), *swept("n", alone, threads=1)], CPU, ("avx2", "avx512f")
    )
    assert "in steps of 32" in advice.text
    assert "32 = 2 times a 512-bit register of fp32" in advice.text
    assert "2 threads divide it in blocks of 16" in advice.text
    assert "multiples of 32 leave none idle" in advice.text
    assert "from n = 520 to n = 608 operations are +4.6%" in advice.text
    assert advice.gain == pytest.approx(17 * 32 / 520 - 1, rel=0.02)
    assert 0 < advice.low <= advice.gain <= advice.high


def test_padding_a_vocabulary_is_advised_by_what_was_measured():
    spec = preset("gpt2")
    padded = next_multiple(spec.vocab, 64)
    times = [1.0 + 0.001 * n for n in range(15)]
    figures = [
        figure(
            "vocabulary",
            "time",
            [1.1 * t for t in times],
            dtype="bf16",
            vocab=spec.vocab,
            tokens=64,
        ),
        figure("vocabulary", "time", times, dtype="bf16", vocab=padded, tokens=64),
    ]
    (advice,) = model_shapes.vocabulary_advice(figures, spec)
    assert "50257 → 50304 (bf16, 64 tokens)" in advice.text
    assert advice.gain == pytest.approx(0.1)
    assert advice.low > 0
    (none,) = model_shapes.vocabulary_advice([figures[1].model_copy(update={"key": figures[0].key}),
                                        figures[1]], spec)  # fmt: skip
    assert "leave it unchanged" in none.text


def test_fewer_heads_are_advised_within_twice_the_number():
    spec = preset("gpt2-xl")
    times = [1.0 + 0.002 * n for n in range(15)]
    of = {"dtype": "fp32", "seq_len": 1024}
    figures = [
        figure("attention", "forward and backward", [share * t for t in times],
               heads=heads, head_dim=1600 // heads, **of)
        for heads, share in ((25, 1.2), (20, 1.0), (10, 0.5))
    ]  # fmt: skip
    (advice,) = model_shapes.heads_advice(figures, spec)
    assert "25 heads of 64 → 20 of 80 (fp32, 1024 tokens)" in advice.text
    assert advice.gain == pytest.approx(0.2)


def test_a_sweep_of_which_one_size_is_steady_gives_no_advice():
    from outpace.probing.compute.benchmark import _report_granularity

    key = Key(
        kind="matmul", what="fine", of={"dim": "n", "m": 64, "n": 65, "k": 64, "dtype": "fp32"}
    )
    one = Figure(key=key, unit="FLOP/s", value=1e9, origin="measured", rounds=((1e9,),))
    assert _report_granularity([one], torch.device("cpu"), ()) == []
