"""Ranks of one host that read each other's memory: right sums, and no waiting without end."""

from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("peer_memory_ranks.py")
# Of a sum of three in each dtype.
ROUNDING = {"torch.float32": 1e-7, "torch.float64": 2e-16, "torch.bfloat16": 6e-3}


@pytest.mark.gloo
@pytest.mark.parametrize("processes", [2, 3])
def test_ranks_add_up_where_others_buffers_lie(processes, on_ranks):
    said = on_ranks(processes, RANKS)
    if not any(own["there"] for own in said):
        pytest.skip("this system lets no process read another's memory: gloo does it here")
    for own in said:
        for dtype, most in ROUNDING.items():
            assert own[dtype]["worst"] < most and own[dtype]["same"]
        assert own["elsewhere"]
        for dtype in ("torch.float32", "torch.bfloat16"):
            half = own[f"halves, {dtype}"]
            assert half["worst"] < ROUNDING[dtype] and half["whole"]
        # Patarasuk and Yuan 2009: of all ranks' bytes (N - 1)/N in each half.
        others = 24 * (processes - 1)
        assert own["counted"] == {"all_reduce": 2 * others // processes, "all_gather": others,
                                  "reduce_scatter": others}  # fmt: skip
    missed = f"rank {processes - 1} did not join a collective of gradients within"
    assert all(own["late"].startswith(missed) for own in said[:-1])
    assert said[-1]["late"] == "rank 0 abandoned a collective"
