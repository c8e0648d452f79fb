"""Ranks that are not numbered host by host."""

import os
import subprocess
import sys

import pytest

from outpace.jobs.ranks.placement import first_stray_rank
from outpace.records.ranks import Ranks


def placed(*hosts: int) -> list[Ranks]:
    """Ranks in order, by the host that each is on."""
    return [
        Ranks(rank=rank, world_size=len(hosts), local_rank=hosts[:rank].count(host),
              local_world_size=hosts.count(host))
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("hosts", "stray"),
    [
        ((0, 0, 1, 1), None),
        ((0, 1), None),
        ((0, 0, 0, 1), None),
        ((0, 1, 1, 2, 2, 2), None),
        ((0, 1, 0, 1), 1),  # srun -m cyclic
        ((0, 0, 1, 1, 0, 0, 1, 1), 2),  # srun -m plane=2
        ((0, 0, 1, 2, 1), 3),
        ((0, 1, 2, 0), 1),
    ],
)
def test_the_first_rank_that_is_not_beside_the_one_before(hosts, stray):
    assert first_stray_rank(placed(*hosts)) == stray


@pytest.mark.gloo
@pytest.mark.slow
def test_a_cyclic_placement_is_said_before_step_1(tmp_path, hold_port):
    words = ["train", "--model=outpace-tiny", "--seq-len=16", "--global-batch=4", "--steps=1",
             "--strategy=tp", "--threads=1", "--sample-tokens=0", "--out=run"]  # fmt: skip
    port = str(hold_port())
    ranks = []
    for place in placed(0, 1, 0, 1):
        named = {name.upper(): str(value) for name, value in place.model_dump().items()}
        ranks.append(subprocess.Popen(
            [sys.executable, "-m", "outpace", *words], cwd=tmp_path, text=True,
            env={**os.environ, **named, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ))  # fmt: skip
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    assert "rank 1 is on a different host from rank 0, though" in " ".join(said[0].split())
