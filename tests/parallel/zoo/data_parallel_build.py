"""What `outpace train --model` builds of the entry that the variable ZOO_ENTRY names."""

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from zoo.common import Entry, MakeBatch
from zoo.data_parallel import MODULES, RUNNING

SAMPLES = 8  # of a batch, whose samples one entry may tell apart by their place


class Samples(Dataset[tuple[Tensor, ...]]):
    """Samples of eight batches, each batch with its own seed."""

    def __init__(self, draw: MakeBatch) -> None:
        batches = [draw(torch.Generator().manual_seed(seed), SAMPLES) for seed in range(8)]
        self._items = [tuple(t[n] for t in batch) for batch in batches for n in range(SAMPLES)]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        return self._items[number]


def build() -> tuple[Any, ...]:
    """(module, loss, dataset, evaluation's dataset)."""
    entries = {entry.__name__: entry for entry in (*MODULES, *RUNNING)}
    made: Entry = entries[os.environ["ZOO_ENTRY"]](3)
    module, loss, draw = made
    return module, loss, Samples(draw), Samples(draw)
