"""Factors by which ranks of a pipeline scaled their gradients: only known ones are compared."""

import math

import pytest
import torch

from outpace.parallel.stage_scaling import StageScaling


def told(*ranks):
    """What ranks say that had these gradients and scaled them by these functions."""
    looks = [StageScaling() for _ in ranks]
    for look, (gradients, scale) in zip(looks, ranks, strict=True):
        look.note(gradients)
        look.measure(scale(gradients))
    factors = torch.tensor([look.factor for look in looks], dtype=torch.float64)
    return [look.explain(factors) for look in looks]


def by(factor):
    def scale(gradients):
        for one in gradients:
            one.mul_(factor)
        return gradients

    return scale


def drawn(dtype=torch.float32):
    return [torch.randn(40, 8, generator=torch.Generator().manual_seed(n)).to(dtype)
            for n in range(2)]  # fmt: skip


def test_different_factors_are_told_on_ranks_that_scaled():
    first, second, third = told((drawn(), by(0.5)), (drawn(), by(1.0)), (drawn(), by(0.25)))
    assert "by different factors, from 0.25 to 1," in first == third
    assert second is None


@pytest.mark.parametrize(
    ("other", "scale"),
    [
        ([], by(0.5)),  # a frozen stage
        ([torch.zeros(9, 64)], by(0.5)),  # an embedding whose first row is padding
        ([torch.full((9,), math.inf)], by(0.5)),
        (drawn(), lambda gradients: by(0.5)([one.clone() for one in gradients])),  # replaced
        (drawn(), lambda gradients: [one.clamp_(-0.1, 0.1) for one in gradients]),
    ],
)
def test_a_rank_whose_factor_is_unknown_is_not_compared(other, scale):
    assert told((drawn(), by(0.5)), (other, scale)) == [None, None]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_fewer_bits_are_rounded_when_scaled(dtype):
    """Also the factor, if the norm is of that dtype."""
    norm = torch.tensor(2.797, dtype=dtype)
    assert told((drawn(), by(1 / 2.797)), (drawn(dtype), by(1 / norm))) == [None, None]
    assert all(told((drawn(), by(0.5)), (drawn(dtype), by(0.4))))


def test_gradients_that_no_optimizer_used_are_freed():
    look = StageScaling()
    look.note(drawn())
    look.drop_gradients()
    assert not look._noted
