"""A store that other ranks have used: the names of theirs lead nobody astray."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from outpace.jobs.ranks.session import agree_on_session
from outpace.records.ranks import Ranks


@pytest.fixture
def store():
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def join(store, world_size, order=None, limit_s=60.0):
    """What each rank is told, of ranks that come in an `order`."""
    names = {}

    def enter(rank):
        ranks = Ranks(rank=rank, world_size=world_size, local_world_size=world_size,
                      local_rank=rank)  # fmt: skip
        names[rank] = agree_on_session(store.clone(), ranks, limit_s)

    order = range(world_size) if order is None else order
    threads = [threading.Thread(target=enter, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        thread.join(0.2)
    for thread in threads:
        thread.join()
    return [names[rank] for rank in range(world_size)]


def test_each_gathering_has_one_name_of_its_own(store):
    gatherings = [join(store, size, order) for size, order in
                  ((3, (0, 1, 2)), (3, (2, 1, 0)), (2, (1, 0)), (3, (1, 0, 2)))]  # fmt: skip
    for names in gatherings:
        assert len(set(names)) == 1
    assert len({names[0] for names in gatherings}) == len(gatherings)


class Counted:
    """A store, and how often it was asked."""

    def __init__(self, store):
        self.store, self.asked = store, 0

    def __getattr__(self, name):
        self.asked += 1
        return getattr(self.store, name)


@pytest.mark.parametrize(("rank", "most"), [(0, 40), (1, 5)])
def test_who_waits_asks_the_store_rarely(store, rank, most):
    """Of rank 0 it does not depend on how many ranks are missing, until it gives up."""
    world_size, counted = 64, Counted(store)
    ranks = Ranks(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    with pytest.raises(RuntimeError, match=f"rank {1 - rank} did not come"):
        agree_on_session(counted, ranks, 1.0)
    assert counted.asked <= most


def test_a_process_that_ended_before_it_showed_its_token_holds_up_nobody(store):
    store.add("tokens", 1)
    assert len(set(join(store, 3, (1, 0, 2)))) == 1


def test_a_rank_that_comes_twice_is_not_taken_for_two(store):
    ranks = [Ranks(rank=1, world_size=3, local_rank=1, local_world_size=3)] * 2
    threads = [threading.Thread(target=agree_on_session, args=(store.clone(), one, 60.0))
               for one in ranks]  # fmt: skip
    for thread in threads:
        thread.start()
    with pytest.raises(RuntimeError, match="rank 2 did not come"):
        agree_on_session(store, Ranks(world_size=3, local_world_size=3), 1.0)
    for thread in threads:
        thread.join()


def test_a_rank_that_was_there_before_does_not_count_as_there(store):
    join(store, 2)
    ranks = Ranks(world_size=2, local_world_size=2)
    with pytest.raises(RuntimeError, match="rank 1 did not come"):
        agree_on_session(store, ranks, 0.3)
    late = Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2)
    with pytest.raises(RuntimeError, match="rank 0 did not come"):
        agree_on_session(store, late, 0.3)
    first, second = join(store, 2, (1, 0))
    assert first == second
