"""Own data sets of the ranks, compared before step 1."""

import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import Dataset

from outpace.cli.main import main
from outpace.jobs.ranks.process_groups import Groups
from outpace.jobs.train.sample_check import check_samples
from outpace.launch.forked_job import run_forked
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback

SOURCE = """
import os
import numpy as np
import torch
from torch.utils.data import Dataset

class Samples(Dataset):
    def __init__(self, offset, own=False):
        self.offset, self.own = offset, np.random.default_rng(0) if own else None
    def __len__(self):
        return 16
    def __getitem__(self, index):
        noise = torch.rand(4) if self.own is None else float(self.own.random())
        return torch.ones(4) * (index + self.offset) + noise

def made(*samples):
    return torch.nn.Linear(4, 1), lambda module, x: module(x).square().mean(), *samples

def cut():
    return made(Samples(100 * int(os.environ["RANK"])))

def cut_validation():
    return made(Samples(0), Samples(100 * int(os.environ["RANK"])))

def same():
    return made(Samples(0), Samples(5))

def own_generator():
    return made(Samples(0, own=True))
"""
FLAGS = (
    "--global-batch=4", "--steps=1", "--precision=fp32", "--threads=1", "--device=cpu",
    "--eval-batches=0",
)  # fmt: skip


def train(folder: Path, build: str, *more: str) -> int:
    (folder / "samples.py").write_text(SOURCE)
    model = f"--model={folder / 'samples.py'}:{build}"
    return main(["train", model, *FLAGS, f"--out={folder / build}", *more])


def test_data_cut_by_rank_are_refused_and_taken_where_the_check_is_off(tmp_path, capfd):
    """Each rank would learn its share of its own part only: half of the data, never all."""
    assert train(tmp_path, "cut", "--nproc=2") == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "sample 0 of the dataset differs between rank 1 and rank 0" in said
    assert "complete data set" in said and "--check model" in said
    assert not (tmp_path / "cut").exists()
    assert train(tmp_path, "cut", "--nproc=2", "--check=model") == 0


@pytest.mark.slow
def test_validation_data_cut_by_rank_are_refused_and_whole_ones_are_not(tmp_path, capfd):
    assert train(tmp_path, "cut_validation", "--nproc=2") == 2
    assert "sample 0 of the eval_dataset differs between rank" in capfd.readouterr().err
    assert train(tmp_path, "same", "--nproc=2", "--workers=1") == 0


def test_samples_that_cannot_be_repeated_are_said(tmp_path, capfd):
    assert train(tmp_path, "own_generator") == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "of the dataset differs each time it is read" in said
    assert "A resumed run then trains on samples that differ" in said
    assert train(tmp_path, "same") == 0
    assert "each time it is read" not in capfd.readouterr().err


class Late(Dataset):
    """Samples of which `rank` 1 waits for the first, as where it builds an index by reading."""

    def __init__(self, rank, late_s, but):
        self.late_s, self.offset = late_s * rank, 100.0 * rank
        self.but = but

    def __len__(self):
        return 16

    def __getitem__(self, index):
        time.sleep(self.late_s)
        self.late_s = 0
        return torch.ones(4) * index + (0 if index in self.but else self.offset)


class Told(Callback):
    def __init__(self):
        self.hints = []

    def on_hint(self, sentence):
        self.hints.append(sentence)


def test_a_rank_that_reads_for_longer_than_the_limit_of_exchanges_is_waited_for(tmp_path):
    """A few samples that differ are a hint, which also shows that all were compared."""

    def act(rank):
        made = [dist.new_group(backend="gloo", timeout=timedelta(minutes=5)) for _ in range(3)]
        distributed_c10d._set_pg_timeout(timedelta(seconds=1.5), made[0])  # once it is made
        groups = Groups(rank.ranks, dist.HashStore(), *made)
        data = SimpleNamespace(dataset=Late(rank.ranks.rank, 4.0, range(1, 16)), eval_dataset=None)
        told = Told()
        check_samples(groups, TrainSettings(), data, [told])
        (tmp_path / f"{rank.ranks.rank}").write_text(" ".join(told.hints))

    ends = run_forked(2, act, 240.0, tmp_path / "job")
    assert all(end.fine for end in ends), [end.said for end in ends]
    for rank in range(2):
        said = (tmp_path / f"{rank}").read_text()
        assert "sample 0 of the dataset differs between rank 1 and rank 0, though most" in said


def test_samples_that_are_not_compared_are_said(tmp_path):
    def act(rank):
        groups = Groups(rank.ranks, dist.HashStore(), *[dist.new_group(backend="gloo")] * 3)
        data = SimpleNamespace(dataset=Unread(), eval_dataset=None)
        told = Told()
        check_samples(groups, TrainSettings(), data, [told])
        check_samples(groups, TrainSettings(check="model"), data, [told])
        (tmp_path / f"{rank.ranks.rank}").write_text("\n".join(told.hints))

    assert all(end.fine for end in run_forked(2, act, 240.0, tmp_path / "job"))
    (said,) = (tmp_path / "1").read_text().splitlines()
    assert "were not compared between ranks: on rank 0, " in said and "no such row" in said


class Unread(Late):
    def __init__(self):
        super().__init__(0, 0, ())

    def __getitem__(self, index):
        raise ValueError("no such row")
