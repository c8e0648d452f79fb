"""A store that other ranks have used: the names of theirs lead nobody astray."""

import os
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from outpace.jobs.ranks.session import agree_on_session
from outpace.records.errors import BadInputError
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
        names[rank] = agree_on_session(store.clone(), ranks, limit_s).name

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
    with pytest.raises(RuntimeError, match=f"rank {1 - rank} did not join"):
        agree_on_session(counted, ranks, 1.0)
    assert counted.asked <= most


def test_a_process_that_ended_before_it_showed_its_token_holds_up_nobody(store):
    store.add("tokens", 1)
    assert len(set(join(store, 3, (1, 0, 2)))) == 1


def enter(found, store, rank, world_size, restarted=False, **job):
    """Note the session of a rank of a job, or why there is none."""
    ranks = Ranks(rank=rank, world_size=world_size, local_world_size=world_size, local_rank=rank)
    try:
        found.append(agree_on_session(store.clone(), ranks, 60.0, job, restarted))
    except BadInputError as error:
        found.append(str(error))


def start(*arguments, **job):
    thread = threading.Thread(target=enter, args=arguments, kwargs=job)
    thread.start()
    return thread


def test_a_rank_that_comes_twice_is_refused_and_not_taken_for_two(store):
    """Both may be of this job, so that rank 0 is told of it, too."""
    found = []
    for _ in range(2):
        start(found, store, 1, 3)
    while store.add("tokens", 0) < 2:
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="rank 2 did not join"):
        agree_on_session(store, Ranks(world_size=3, local_world_size=3), 3.0)
    (refused,) = [one for one in found if isinstance(one, str)]
    assert (
        "rank 1 (process" in refused
        and "another process had already joined as this rank" in refused
    )


def test_rank_0_is_told_of_a_rank_that_came_twice(store, monkeypatch):
    monkeypatch.setattr(os, "getpid", threading.get_ident)  # as if each were a process
    found, leader = [], []
    threads = [start(found, store, 1, 2), start(found, store, 1, 2)]
    start(leader, store, 0, 2).join()
    with pytest.raises(BadInputError, match=r"tried to join as rank 1.*MASTER_PORT of its own"):
        while any(thread.is_alive() for thread in threads):
            leader[0].require_no_surplus(store)
        leader[0].require_no_surplus(store)
    for thread in threads:
        thread.join()
    assert any(isinstance(one, str) and "found another job" in one for one in found)


def test_a_process_of_another_job_is_refused_and_takes_no_place(store):
    """Whether it comes first or last, and whatever its rank is."""
    found, leader, others = [], [], []
    first = start(others, store, 1, 2, SLURM_JOB_ID="13")
    first.join(0.2)
    member = start(leader, store, 0, 2, SLURM_JOB_ID="12")
    strange = start(others, store, 2, 4)
    for thread in (member, start(found, store, 1, 2, SLURM_JOB_ID="12")):
        thread.join()
    assert [one.name for one in found] == [leader[0].name]
    for late in (first, strange, start(others, store, 1, 2, SLURM_JOB_ID="14")):
        until_s = time.monotonic() + 60
        while late.is_alive() and time.monotonic() < until_s:
            assert leader[0].find_surplus(store) is None  # ranks are not mixed
            time.sleep(0.05)
        late.join()
    assert any("SLURM_JOB_ID=13, not 12" in one for one in others)
    assert any("SLURM_JOB_ID=14, not 12" in one for one in others)
    assert any("world of 4 processes, not 2" in one for one in others)


def test_the_next_session_of_the_same_processes_is_no_other_job(store):
    """A rank may be done with a training sooner than rank 0, and begin the next."""
    found, leader = [], []
    for thread in [start(found, store, 1, 2), start(leader, store, 0, 2)]:
        thread.join()
    sooner = start(found, store, 1, 2)
    time.sleep(0.2)
    assert leader[0].find_surplus(store) is None
    start(leader, store, 0, 2).join()
    sooner.join()
    assert found[1].name == leader[1].name != leader[0].name


def test_a_rank_that_its_agent_restarts_waits_for_the_next_rank_0(store, monkeypatch):
    """With a static rendezvous, it comes while the rank 0 of before has not ended yet."""
    monkeypatch.setattr(os, "getpid", threading.get_ident)  # as if each were a process
    found, leader = [], []
    for thread in [start(found, store, 1, 2), start(leader, store, 0, 2)]:
        thread.join()
    again = start(found, store, 1, 2, restarted=True)
    until_s = time.monotonic() + 0.5
    while time.monotonic() < until_s:
        leader[0].require_no_surplus(store)
        time.sleep(0.05)
    assert again.is_alive()
    start(leader, store, 0, 2, restarted=True).join()
    again.join()
    assert found[1].name == leader[1].name != leader[0].name


def test_a_rank_that_its_agent_restarts_joins_in_the_place_of_the_one_before(store):
    """While rank 0 still waits for others."""
    found, leader = [], []
    first = start(leader, store, 0, 3)
    start(found, store, 1, 3).join()
    start(found, store, 1, 3, restarted=True).join()
    start(found, store, 2, 3).join()
    first.join()
    assert [one.name for one in found] == 3 * [leader[0].name]
    leader[0].require_no_surplus(store)


def test_a_rank_that_was_there_before_does_not_count_as_there(store):
    join(store, 2)
    ranks = Ranks(world_size=2, local_world_size=2)
    with pytest.raises(RuntimeError, match="rank 1 did not join"):
        agree_on_session(store, ranks, 0.3)
    late = Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2)
    with pytest.raises(RuntimeError, match="rank 0 did not join"):
        agree_on_session(store, late, 0.3)
    first, second = join(store, 2, (1, 0))
    assert first == second
