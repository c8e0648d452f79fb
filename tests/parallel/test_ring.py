"""The ring: sums of any length on any number of ranks, replicas that are one process's equal."""

from pathlib import Path

import pytest
import torch
from torch import nn

from outpace.parallel.fusion import fuse

RANKS = Path(__file__).with_name("ring_ranks.py")


@pytest.mark.gloo
@pytest.mark.parametrize("processes", [2, 3])
def test_the_ring_adds_up_what_one_process_has(processes, on_ranks):
    said = on_ranks(processes, RANKS)
    assert all(said["right"])
    assert said["worst"] < 1e-12
    assert said["without"] == ["never"]
    # Patarasuk and Yuan 2009: 2(N - 1)/N of the buffers a rank, here over all ranks.
    assert said["sent_by_all"] == said["formula"]
    assert said["sends"] > 2 * 2 * (processes - 1)  # each matrix fills a buffer of its own


def test_buffers_keep_their_limit_and_the_order():
    sizes = (10, 20, 30, 500, 1, 1)
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    buffers = fuse(parameters, 4 * 60)
    assert [p for buffer in buffers for p in buffer.parameters] == parameters
    assert [len(buffer.parameters) for buffer in buffers] == [3, 1, 2]


def test_a_buffer_gives_back_what_it_took():
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
    (buffer,) = fuse(parameters, 1000)
    parameters[0].grad = torch.ones(2, 3)
    buffer.take_all()
    assert parameters[0].grad is None
    buffer.buffer.mul_(3)
    buffer.assign_gradients()
    assert torch.equal(parameters[0].grad, torch.full((2, 3), 3.0))
    assert parameters[1].grad is None
