"""What ranks send, by formula."""

import math

import pytest
import torch

from outpace.catalog.models import PRESETS, preset
from outpace.nn.transformer import Transformer
from outpace.planner.communication.volume import sent_bytes, step_traffic
from outpace.planner.model.flops import parameter_count
from outpace.planner.model.shapes import parameter_shapes
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan

SPECS = [
    {"family": "gpt2", "heads": 4},
    {"family": "bert", "heads": 4},
    {"family": "llama", "heads": 4, "kv_heads": 2},
    {"family": "qwen2", "heads": 4, "kv_heads": 2, "tied": True},
    {"family": "qwen3", "heads": 4, "head_dim": 16},
]


def spec_of(values):
    sizes = {"layers": 2, "hidden": 32, "vocab": 97, "max_positions": 64}
    return ModelSpec.parse({**sizes, **values}, "test")


def traffic(strategy, spec=None, rank=0, **values):
    plan = Plan.parse({"strategy": strategy, "precision": "fp32", **values}, "test")
    found = step_traffic(plan, spec or spec_of(SPECS[0]), global_batch=64, seq_len=64, rank=rank)
    assert found is not None
    return found


@pytest.mark.parametrize("values", SPECS)
def test_shapes_are_the_model_s(values):
    spec = spec_of(values)
    with torch.device("meta"):
        model = Transformer(spec)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(shapes.items()) == list(parameter_shapes(spec).items())


def test_all_reduce_is_reduce_scatter_and_all_gather():
    for ranks in (1, 2, 3, 8):
        shard = 840 // ranks
        both = sent_bytes("reduce_scatter", ranks, 840, False)
        both += sent_bytes("all_gather", ranks, shard, False)
        assert sent_bytes("all_reduce", ranks, 840, False) == both == 2 * 840 * (ranks - 1) // ranks


@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-70b"])
def test_zero3_sends_half_as_much_again_as_ddp_of_blocks_at_any_size(name):
    spec = preset(next(known for known in PRESETS if known.startswith(name)))
    ddp = traffic("ddp", spec, dp_replicate=64).bytes
    zero3 = traffic("zero3", spec, dp_shard=64).bytes
    assert ddp == pytest.approx(2 * 63 / 64 * 4 * parameter_count(spec), rel=1e-5)
    shapes = parameter_shapes(spec).items()
    outside = sum(math.prod(shape) for name, shape in shapes if not name.startswith("blocks."))
    more = 1.5 - 0.5 * outside / parameter_count(spec)
    assert zero3 == pytest.approx(more * ddp, rel=1e-2)  # shards are filled up


def test_dp_exchanges_five_times_a_batch_and_ddp_once_a_step():
    told = 2  # loss and count; the wish to stop
    dp = traffic("dp", dp_replicate=4, micro_batch=4)
    assert dp.collectives.total() == 4 * 5 + 1 + told  # the norm is told
    assert traffic("ddp", dp_replicate=4, micro_batch=4).collectives.total() == 1 + told


def test_sequence_parallelism_sends_no_more():
    split = traffic("tp", tp=4).bytes_by_kind
    whole = traffic("tp", tp=4, sequence_parallel=False).bytes_by_kind
    hidden = {"reduce_scatter", "all_gather"}
    shares = split["all_reduce"]
    assert sum(split[kind] for kind in hidden) == pytest.approx(whole["all_reduce"], rel=0.02)
    assert shares < 0.05 * whole["all_reduce"]


def test_the_first_rank_of_dp_sends_for_all():
    first, other = (traffic("dp", dp_replicate=4, micro_batch=4, rank=rank) for rank in (0, 1))
    assert first.bytes_by_kind["scatter"] > 0 == other.bytes_by_kind["scatter"]
    assert first.bytes_by_kind["gather"] == 0 < other.bytes_by_kind["gather"]
