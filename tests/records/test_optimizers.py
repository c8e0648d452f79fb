"""The tables of optimizers and precisions: whole, and what they say goes together."""

from typing import get_args

import pytest

from outpace.records.optimizers import (
    EXACT,
    LOW,
    OPTIMIZER_TRAITS,
    PLAIN_ADAMW,
    OptimizerName,
    default_optimizer,
)
from outpace.records.precisions import (
    AUTOCAST,
    LEVELS,
    MASTERS,
    MEANS,
    PRECISION_TRAITS,
    PURE,
    SHARD_DTYPES,
    WEIGHTS,
    WHERE_OFFLOADED,
    WIDE,
    AskedPrecision,
    Precision,
)


def test_each_is_declared_once_in_the_order_of_its_names():
    assert tuple(OPTIMIZER_TRAITS) == get_args(OptimizerName)
    assert tuple(PRECISION_TRAITS) == get_args(Precision)
    assert set(get_args(AskedPrecision)) == {*get_args(Precision), *LEVELS} - {"fp64"}
    assert set(LEVELS) == set(MEANS)


@pytest.mark.parametrize("traits", OPTIMIZER_TRAITS.values(), ids=OPTIMIZER_TRAITS)
def test_an_optimizer_reads_and_writes_what_it_keeps(traits):
    # The weight is read and written, and the gradient read; so are moments, unless they are sums.
    state = 0 if traits.factored or traits.kept is not None else 8
    assert traits.bytes >= 12 + state
    assert (traits.compiled_bytes is None) == (traits.compiled_operators is None)
    for fewer in (traits.compiled_bytes, traits.kernel_bytes):
        assert fewer is None or 12 < fewer < traits.bytes
    assert traits.tensors.fp32 <= traits.tensors.fp16 <= traits.tensors.bf16


def test_what_draws_random_numbers_is_not_exact():
    assert not set(LOW) & set(EXACT)
    assert set(PLAIN_ADAMW) < set(EXACT)
    assert all(OPTIMIZER_TRAITS[name].lr_factor == 1.0 for name in (*LOW, *PLAIN_ADAMW))


@pytest.mark.parametrize("name", PRECISION_TRAITS)
def test_what_a_precision_keeps_goes_together(name):
    traits = PRECISION_TRAITS[name]
    assert (traits.low is None) == (name in WIDE)
    assert traits.weights in ("fp64", "fp32", traits.low)
    assert traits.operand_bytes <= traits.weight_bytes
    assert not traits.masters or name in WEIGHTS  # or they would be what they are masters of
    assert (name in PURE) == (name in WEIGHTS and name not in MASTERS)
    # Shards in fp32 can be gathered in 16 bits: those of autocast, or masters.
    assert name not in SHARD_DTYPES or name in (*AUTOCAST, *MASTERS)
    assert default_optimizer(name) in (LOW if name in PURE else PLAIN_ADAMW)
    assert WHERE_OFFLOADED.get(name, name) not in MASTERS or name == "fp16-master"
