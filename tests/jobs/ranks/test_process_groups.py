"""How ranks join and leave: what torch is told, and what happens after a failure."""

from types import SimpleNamespace

import pytest
import torch

from outpace.jobs.ranks import process_groups as group
from outpace.jobs.ranks.process_groups import process_groups
from outpace.launch import local
from outpace.records.errors import BadInputError
from outpace.records.ranks import Ranks

GPU = torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch):
    """In place of torch.distributed, which has no NCCL here; ranks meet without a store."""
    seen = []

    def note(name):
        return lambda *args, **given: seen.append((name, args, given))

    monkeypatch.setattr(group, "_open_store", lambda *_: torch.distributed.HashStore())
    monkeypatch.setattr(group, "agree_on_session", lambda *_: SimpleNamespace(name="a"))
    monkeypatch.setattr(group, "register_gloo_shutdown", lambda: None)
    for name in ("init_process_group", "destroy_process_group", "new_group"):
        monkeypatch.setattr(group.dist, name, note(name))
    monkeypatch.setattr(group, "_abort_process_group", note("abort"))
    return seen


@pytest.mark.parametrize(("backend", "device"), [("cpu:gloo,cuda:nccl", GPU), ("gloo", None)])
def test_nccl_is_told_its_device(calls, backend, device):
    ranks = Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2)
    with process_groups(ranks, GPU, 60.0, backend):
        pass
    names = [name for name, _, _ in calls]
    assert (names[0], names[-1]) == ("init_process_group", "destroy_process_group")
    assert calls[0][2]["device_id"] == device


@pytest.mark.parametrize(("backend", "ends"), [("cpu:gloo,cuda:nccl", "abort"),
                                               ("gloo", "destroy_process_group")])  # fmt: skip
def test_after_a_failure_nccl_is_not_waited_for(calls, backend, ends):
    ranks = Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2)
    with pytest.raises(RuntimeError), process_groups(ranks, GPU, 60.0, backend):
        raise RuntimeError("a collective failed")
    assert calls[-1][0] == ends


@pytest.mark.parametrize("named", ["^lo,docker", "=lo", "lo,no-such-interface"])
def test_an_interface_that_is_not_there_is_named_before_ranks_meet(named, monkeypatch):
    """NCCL takes the first two; gloo takes whole names, and its own words are of C++."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    said = r"GLOO_SOCKET_IFNAME = .*it has .*lo.* or unset it"
    with (
        pytest.raises(BadInputError, match=said),
        process_groups(Ranks(), torch.device("cpu"), 5.0),
    ):
        pass


def test_a_loopback_that_is_down_is_named_before_ranks_meet(monkeypatch):
    """As in a network namespace of its own; torch's store would look for it during a minute."""
    monkeypatch.setattr("outpace.launch.network_interfaces.psutil.net_if_addrs", lambda: {"lo": []})
    said = r"no network interface with the address 127\.0\.0\.1.*\(it has lo\).*ip link set lo up"
    with (
        pytest.raises(BadInputError, match=said),
        process_groups(Ranks(), torch.device("cpu"), 5.0),
    ):
        pass
    with pytest.raises(BadInputError, match=said):
        local.run_ranks(2, ["true"])
