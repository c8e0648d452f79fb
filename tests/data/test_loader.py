import errno
import gc
import os
import pickle
import random
import signal
import time
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from outpace.data.loader import Loader
from outpace.data.order import samples_at
from outpace.data.samples import TokenDataset
from outpace.data.workers import worker_troubles
from outpace.records.errors import BadInputError


@pytest.fixture
def dataset(tmp_path, prepare, library_texts):
    paths = []
    for number, text in enumerate(library_texts[:2]):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text(text[:20_000], encoding="utf-8")
    return TokenDataset(
        prepare(*paths), 16, objective="causal", seed=1, document_attention=True, tokenizer=None
    )


def steps_of(dataset, **changed):
    given = {
        "seed": 3, "global_batch": 12, "micro_batch": 12, "rank": 0, "data_parallel": 1,
        "start_step": 0, "total_steps": 5, "workers": 0, "pin_memory": False,
        "device": torch.device("cpu"),
    }  # fmt: skip
    loader = Loader(dataset, **(given | changed))
    try:
        return list(loader)
    finally:
        loader.close()


def rows(batches):
    return torch.cat([batch["tokens"] for batch in batches])


@pytest.mark.parametrize(
    ("micro", "ranks"), [(12, 1), (4, 1), (1, 1), (6, 2), (3, 2), (2, 3), (1, 12), (1, 4)]
)
def test_ranks_and_passes_together_make_the_one_batch(dataset, micro, ranks):
    whole = steps_of(dataset)
    parts = [
        steps_of(dataset, micro_batch=micro, rank=r, data_parallel=ranks) for r in range(ranks)
    ]
    for step, (one,) in enumerate(whole):
        passes = 12 // (micro * ranks)
        assert all(len(part[step]) == passes for part in parts)
        # Slot order: pass by pass, and rank by rank in each.
        joined = torch.cat([part[step][a]["tokens"] for a in range(passes) for part in parts])
        assert (joined == one["tokens"]).all()


def test_a_step_has_the_samples_that_the_order_says(dataset):
    steps = steps_of(dataset, micro_batch=3)
    for step, batches in enumerate(steps):
        expected = samples_at(3, step * 12 + np.arange(12), len(dataset))
        assert (rows(batches) == torch.stack([dataset[int(i)]["tokens"] for i in expected])).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(dataset, workers):
    alone = steps_of(dataset, micro_batch=4)
    helped = steps_of(dataset, micro_batch=4, workers=workers)
    assert len(alone) == len(helped) == 5
    for one, other in zip(alone, helped, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.keys() == b.keys() == {"tokens", "targets", "documents"}
            assert all((a[name] == b[name]).all() for name in a)


@pytest.mark.parametrize("start", [0, 1, 4, 5])
def test_starting_later_is_skipping(dataset, start):
    whole, rest = steps_of(dataset), steps_of(dataset, start_step=start)
    assert len(rest) == 5 - start
    for one, other in zip(whole[start:], rest, strict=True):
        assert (rows(one) == rows(other)).all()


class Own(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.make(index)


def _pair(i):
    return torch.full((3,), i), i * 0.5


def _named(i):
    return {"x": np.full(2, i), "y": {"z": i}}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_persons_own_data_set(workers):
    expected = samples_at(3, np.arange(5), 10).tolist()
    changed = {"global_batch": 5, "micro_batch": 5, "total_steps": 2, "workers": workers}
    (x, y), *_ = [batch for step in steps_of(Own(_pair), **changed) for batch in step]
    assert x.tolist() == [[i] * 3 for i in expected] and y.tolist() == [i * 0.5 for i in expected]
    batches = [batch for step in steps_of(Own(_named), **changed) for batch in step]
    assert batches[0]["x"][:, 0].tolist() == batches[0]["y"]["z"].tolist() == expected
    seen = [int(i) for batch in batches for i in batch["y"]["z"]]
    assert sorted(seen) == list(range(10))


class Cyclic:
    """Only a collection ends it; in another process than `pid` it ends that."""

    def __init__(self, pid):
        self.me, self.pid = self, pid

    def __del__(self):
        if os.getpid() != self.pid:
            os._exit(9)


def test_a_worker_collects_its_own_garbage_and_none_that_it_inherits():
    inherited = [Cyclic(os.getpid())]

    def make(i):
        inherited.clear()
        own = Cyclic(os.getpid())
        ended = weakref.ref(own)
        del own
        gc.collect()
        return torch.tensor([gc.isenabled(), ended() is None])

    changed = {"global_batch": 5, "micro_batch": 5, "total_steps": 1, "workers": 1}
    ((collected,),) = steps_of(Own(make), **changed)
    assert collected.all()
    assert gc.isenabled()


def test_a_data_set_that_gives_many_samples_at_once_is_batched_as_any_other():
    part = torch.utils.data.Subset(Own(_pair), range(5, 10))
    changed = {"global_batch": 5, "micro_batch": 5, "total_steps": 1, "workers": 0}
    ((x, y),) = [batch for step in steps_of(part, **changed) for batch in step]
    assert x.shape == (5, 3) and sorted(y.tolist()) == [2.5, 3.0, 3.5, 4.0, 4.5]


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_do_not_make_a_batch_are_refused_with_a_way_that_works(workers):
    changed = {"global_batch": 4, "micro_batch": 4, "total_steps": 1, "workers": workers}
    own = Own(lambda index: {"x": torch.full((index + 1, 2), float(index))})
    words = r"cannot be collated: one has shape \(\d+, 2\), another \(\d+, 2\)"
    with pytest.raises(BadInputError, match=words) as caught:
        steps_of(own, **changed)
    assert "Traceback" not in str(caught.value) and "__getitems__" in str(caught.value)
    flipped = Own(lambda index: {"x": np.arange(6.0).reshape(2, 3)[:, ::-1]})
    with pytest.raises(BadInputError, match=r"strides are not .* array\.copy\(\)\.\)\. Pad"):
        steps_of(flipped, **changed)

    class Padding(Own):
        def __getitems__(self, indices):
            samples = [self[index]["x"] for index in indices]
            return {"x": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)}

    ((batch,),) = steps_of(Padding(own.make), **changed)
    assert batch["x"].shape[0] == 4 and batch["x"].shape[2] == 2

    class Listing(Own):
        def __getitems__(self, indices):
            return [torch.ones(len(indices), 2), torch.ones(len(indices))]

    with pytest.raises(BadInputError, match=r"a list of 2 for 4 indices"):
        steps_of(Listing(own.make), **changed)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_of_a_data_set_depend_on_the_place_in_training_alone(workers):
    def noisy(i):
        return torch.rand(()), np.random.rand(), random.random()

    changed = {"global_batch": 5, "micro_batch": 5, "total_steps": 4, "workers": workers}
    whole = steps_of(Own(noisy), **changed)
    torch.rand(3)
    resumed = steps_of(Own(noisy), **changed, start_step=2)
    assert [b for s in whole[2:] for b in map(str, s)] == [b for s in resumed for b in map(str, s)]
    assert len({str(batch) for step in whole for batch in step}) == 4


def test_a_data_set_without_samples_is_told():
    with pytest.raises(BadInputError, match="has no samples"):
        steps_of([])


def test_a_data_set_goes_to_workers_without_its_tokens(tmp_path, prepare):
    path = tmp_path / "x.bin"
    path.write_bytes(np.arange(60_000, dtype="<u2").tobytes() * 50)
    dataset = TokenDataset(
        prepare(path, tokenizer=None), 64,
        objective="causal", seed=0, document_attention=False, tokenizer=None,
    )  # fmt: skip
    packed = pickle.dumps(dataset)
    assert len(packed) < 5_000
    assert (pickle.loads(packed)[7]["tokens"] == dataset[7]["tokens"]).all()


class Troubled(Dataset):
    """Its workers fail in some way after the first batch."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "slow":
            time.sleep(3600)
        if self.how == "wrong":
            raise RuntimeError("no space left on device, says the data set")
        return Unsent(self.how)


class Unsent:
    def __init__(self, how):
        self.how = how

    def __reduce__(self):
        if self.how == "shm":
            raise RuntimeError(
                "unable to allocate shared memory(shm) for file </torch_1>: No space left on "
                "device (28)"
            )
        if self.how == "files":
            raise OSError(errno.EMFILE, "Too many open files")
        if self.how == "socket":
            raise OSError("AF_UNIX path too long")
        raise TypeError("it is of no kind that can be sent")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shm", r"--workers 2: the shared memory through .* is full.*/dev/shm.*--workers 0"),
        ("files", r"--workers 2: the limit on open files \(ulimit -n\) is too low.*--workers 0"),
        ("socket", r"--workers 2: .*TMPDIR=/tmp.*--workers 0"),
        ("other", r"--workers 2: a batch could not be handed over \(see above\).*--workers 0"),
        ("killed", r"--workers 2: one of them was killed.*Use fewer workers, or --workers 0"),
        ("slow", r"--workers 2: no batch arrived within the time limit.*1.* seconds"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_workers_that_bring_no_batch_end_the_training_with_advice(how, said, monkeypatch):
    monkeypatch.setattr("outpace.data.loader.collate", list)
    with pytest.raises(BadInputError, match=said):
        steps_of(Troubled(how), workers=2, timeout_s=1.0 if how == "slow" else 60.0)


def test_what_a_data_set_raises_in_a_worker_stays_its_own():
    with pytest.raises(RuntimeError, match="says the data set"):
        steps_of(Troubled("wrong"), workers=1)


def test_files_that_cannot_be_opened_for_workers_are_told(dataset, monkeypatch):
    def start(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("outpace.data.loader.DataLoader", start)
    with pytest.raises(BadInputError, match=r"--workers 4: the limit on open files"):
        steps_of(dataset, workers=4)


def test_a_worker_whose_end_is_heard_in_the_midst_of_a_step_is_told():
    with (
        pytest.raises(BadInputError, match="one of them was killed"),
        worker_troubles(1, elsewhere=True),
    ):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    with pytest.raises(OSError, match="disk"), worker_troubles(1, elsewhere=True):
        raise OSError(errno.ENOSPC, "the disk is full")
