"""Up to 512 ranks and models of real size: local shapes and bytes are what the formulas say."""

import json
from pathlib import Path

import pytest

from outpace.catalog.models import preset
from outpace.planner.model.flops import parameter_count
from outpace.planner.pipeline.stages import layers_per_stage

RANK_OF = Path(__file__).with_name("rank_of.py")
# Llama 3 8B (arXiv 2407.21783, table 3): layers, widths, vocabulary.
LAYERS, HIDDEN, KV_WIDTH, FFN, VOCAB = 32, 4096, 1024, 14336, 128256
MATRICES = 2 * HIDDEN * HIDDEN + 2 * KV_WIDTH * HIDDEN + 3 * HIDDEN * FFN
NORMS = 2 * HIDDEN
TABLE = VOCAB * HIDDEN
WHOLE = LAYERS * (MATRICES + NORMS) + HIDDEN + 2 * TABLE  # head and embedding are not tied
LLAMA = "llama-3-8b"
pytestmark = pytest.mark.fakeworld


# Model and plan of a large world, by name.
WORLDS = {
    "zero3": (LLAMA, {"strategy": "zero3", "dp_shard": 64}),
    "zero2": (LLAMA, {"strategy": "zero2", "dp_shard": 128}),
    "hsdp": (LLAMA, {"strategy": "hsdp", "dp_replicate": 8, "dp_shard": 64}),
    "tp": (LLAMA, {"strategy": "tp", "tp": 8, "micro_batch": 1}),
    "large": ("llama-3-70b", {"strategy": "zero3", "dp_shard": 512}),
    "gpipe": (LLAMA, {"strategy": "gpipe", "pp": 16, "pp_microbatches": 16}),
    "zbv": (LLAMA, {"strategy": "zbv", "pp": 8, "pp_microbatches": 16}),
}


@pytest.fixture
def held(tmp_path, command):
    """`held("tp", 5)`: what a rank of a world holds."""

    def ask(world, rank):
        plans = tmp_path / "plans.json"
        plans.write_text(json.dumps([[*WORLDS[world], rank]]))
        return json.loads(command(RANK_OF, plans, check=True).stdout)

    return ask


def test_the_formula_counts_the_model():
    assert parameter_count(preset(LLAMA)) == WHOLE == 8_030_261_248


@pytest.mark.parametrize(
    ("world", "rank", "shards"),
    [
        ("zero3", 63, 64),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("zero3", 0, 64), ("zero2", 77, 128), ("hsdp", 511, 64))
        ),
    ],
)
def test_shards_are_equal_parts_of_every_parameter(held, world, rank, shards):
    """Rajbhandari et al. 2020, table 1: (4 + 8) bytes per parameter over the shards, in fp32."""
    found = held(world, rank)
    assert found["weight_bytes"] == 4 * WHOLE // shards
    assert found["moment_bytes"] == 8 * WHOLE // shards
    shapes = found["shapes"]
    assert shapes["embed.tokens.weight"] == [VOCAB // shards, HIDDEN]
    assert shapes["blocks.31.mlp.down.weight"] == [HIDDEN // shards, FFN]
    assert shapes["blocks.0.attention.k.weight"] == [KV_WIDTH // shards, HIDDEN]
    assert shapes["final_norm.weight"] == [HIDDEN // shards]


@pytest.mark.slow
def test_seventy_billion_parameters_on_512_ranks(held):
    """No parameter of the model has a first dimension that 512 does not divide, but one."""
    spec = preset("llama-3-70b")
    found = held("large", 300)
    # 128,256 rows in parts of ⌈128,256 / 512⌉ = 251: the last rank in use has fewer.
    assert found["shapes"]["head.weight"] == [251, 8192]
    even = parameter_count(spec) - 2 * spec.vocab * spec.hidden
    assert found["weight_bytes"] == 4 * (even // 512 + 2 * 251 * 8192)
    assert found["moment_bytes"] == 2 * found["weight_bytes"]


def test_tensor_parallel_ranks_have_whole_heads_and_whole_norms(held):
    found = held("tp", 5)
    shapes = found["shapes"]
    assert shapes["blocks.0.attention.q.weight"] == [HIDDEN // 8, HIDDEN]
    assert shapes["blocks.0.attention.k.weight"] == [KV_WIDTH // 8, HIDDEN]  # one head of 128
    assert shapes["blocks.0.attention.out.weight"] == [HIDDEN, HIDDEN // 8]
    assert shapes["blocks.0.mlp.gate.weight"] == [FFN // 8, HIDDEN]
    assert shapes["blocks.0.mlp.down.weight"] == [HIDDEN, FFN // 8]
    assert shapes["blocks.0.mlp_norm.weight"] == [HIDDEN]
    assert shapes["head.weight"] == shapes["embed.tokens.weight"] == [VOCAB // 8, HIDDEN]
    norms = LAYERS * NORMS + HIDDEN
    assert found["weight_bytes"] == 4 * ((WHOLE - norms) // 8 + norms)


@pytest.mark.parametrize(
    "rank", [0, 15, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (1, 14))]
)
def test_stages_have_their_layers_and_the_ends_their_tables(held, rank):
    counts = layers_per_stage(preset(LLAMA), 16)
    assert sum(counts) == LAYERS
    found = held("gpipe", rank)
    ends = {0: TABLE, 15: TABLE + HIDDEN}.get(rank, 0)
    assert found["weight_bytes"] == 4 * (counts[rank] * (MATRICES + NORMS) + ends)
    assert found["moment_bytes"] == 2 * found["weight_bytes"]
    named = {name.split(".")[1] for name in found["shapes"] if name.startswith("blocks.")}
    first = sum(counts[:rank])
    assert named == {str(layer) for layer in range(first, first + counts[rank])}


@pytest.mark.parametrize("rank", [0, pytest.param(7, marks=pytest.mark.slow)])
def test_a_v_has_both_ends_on_its_first_rank(held, runnable, rank):
    runnable(["zbv"])
    counts = layers_per_stage(preset(LLAMA), 16)
    tables = 2 * TABLE + HIDDEN
    ends = {0: tables, 7: 0}[rank]
    layers = counts[rank] + counts[15 - rank]
    found = held("zbv", rank)
    assert found["weight_bytes"] == 4 * (layers * (MATRICES + NORMS) + ends)
