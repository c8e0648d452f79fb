"""Where hosts meet."""

from datetime import timedelta

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from outpace.launch import meeting
from outpace.launch.environment import free_port
from outpace.launch.meeting import KnownPlaces


def test_a_port_that_is_not_reached_is_named(monkeypatch):
    monkeypatch.setattr(meeting, "_CONNECT", timedelta(seconds=1))
    port = free_port()
    second = KnownPlaces(1, 2, f"127.0.0.1:{port}", "x")
    with pytest.raises(RendezvousConnectionError, match=f"127.0.0.1, port {port}.*firewall"):
        second.next_rendezvous()
