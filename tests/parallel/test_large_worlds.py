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


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, runnable, command):
    """What ranks hold, by (plan, rank), all asked of one process."""
    asked = {
        "zero3 first": (LLAMA, {"strategy": "zero3", "dp_shard": 64}, 0),
        "zero3 last": (LLAMA, {"strategy": "zero3", "dp_shard": 64}, 63),
        "zero2": (LLAMA, {"strategy": "zero2", "dp_shard": 128}, 77),
        "hsdp": (LLAMA, {"strategy": "hsdp", "dp_replicate": 8, "dp_shard": 64}, 511),
        "tp": (LLAMA, {"strategy": "tp", "tp": 8, "micro_batch": 1}, 5),
        "large": ("llama-3-70b", {"strategy": "zero3", "dp_shard": 512}, 300),
        **{
            f"gpipe {rank}": (LLAMA, {"strategy": "gpipe", "pp": 16, "pp_microbatches": 16}, rank)
            for rank in (0, 1, 14, 15)
        },
        **{
            f"zbv {rank}": (LLAMA, {"strategy": "zbv", "pp": 8, "pp_microbatches": 16}, rank)
            for rank in (0, 7)
        },
    }
    possible = runnable(sorted({plan["strategy"] for _, plan, _ in asked.values()}))
    asked = {name: case for name, case in asked.items() if case[1]["strategy"] in possible}
    plans = tmp_path_factory.mktemp("plans") / "plans.json"
    plans.write_text(json.dumps(list(asked.values())))
    done = command(RANK_OF, plans)
    assert done.returncode == 0, done.stderr
    return dict(zip(asked, map(json.loads, done.stdout.splitlines()), strict=True))


def test_the_formula_counts_the_model():
    assert parameter_count(preset(LLAMA)) == WHOLE == 8_030_261_248


@pytest.mark.parametrize(
    ("name", "shards"), [("zero3 first", 64), ("zero3 last", 64), ("zero2", 128), ("hsdp", 64)]
)
def test_shards_are_equal_parts_of_every_parameter(ranks, name, shards):
    """Rajbhandari et al. 2020, table 1: (4 + 8) bytes per parameter over the shards, in fp32."""
    found = ranks[name]
    assert found["weight_bytes"] == 4 * WHOLE // shards
    assert found["moment_bytes"] == 8 * WHOLE // shards
    shapes = found["shapes"]
    assert shapes["embed.tokens.weight"] == [VOCAB // shards, HIDDEN]
    assert shapes["blocks.31.mlp.down.weight"] == [HIDDEN // shards, FFN]
    assert shapes["blocks.0.attention.k.weight"] == [KV_WIDTH // shards, HIDDEN]
    assert shapes["final_norm.weight"] == [HIDDEN // shards]


def test_seventy_billion_parameters_on_512_ranks(ranks):
    """No parameter of the model has a first dimension that 512 does not divide, but one."""
    spec = preset("llama-3-70b")
    found = ranks["large"]
    # 128,256 rows in parts of ⌈128,256 / 512⌉ = 251: the last rank in use has fewer.
    assert found["shapes"]["head.weight"] == [251, 8192]
    even = parameter_count(spec) - 2 * spec.vocab * spec.hidden
    assert found["weight_bytes"] == 4 * (even // 512 + 2 * 251 * 8192)
    assert found["moment_bytes"] == 2 * found["weight_bytes"]


def test_tensor_parallel_ranks_have_whole_heads_and_whole_norms(ranks):
    found = ranks["tp"]
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


def test_stages_have_their_layers_and_the_ends_their_tables(ranks):
    counts = layers_per_stage(preset(LLAMA), 16)
    assert sum(counts) == LAYERS
    for rank in (0, 1, 14, 15):
        found = ranks[f"gpipe {rank}"]
        ends = {0: TABLE, 15: TABLE + HIDDEN}.get(rank, 0)
        assert found["weight_bytes"] == 4 * (counts[rank] * (MATRICES + NORMS) + ends)
        assert found["moment_bytes"] == 2 * found["weight_bytes"]
        held = {name.split(".")[1] for name in found["shapes"] if name.startswith("blocks.")}
        first = sum(counts[:rank])
        assert held == {str(layer) for layer in range(first, first + counts[rank])}


def test_a_v_has_both_ends_on_its_first_rank(ranks, runnable):
    runnable(["zbv"])
    counts = layers_per_stage(preset(LLAMA), 16)
    tables = 2 * TABLE + HIDDEN
    for rank, ends in ((0, tables), (7, 0)):
        layers = counts[rank] + counts[15 - rank]
        found = ranks[f"zbv {rank}"]
        assert found["weight_bytes"] == 4 * (layers * (MATRICES + NORMS) + ends)
