"""Where hosts meet."""

from datetime import timedelta

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from outpace.launch import rendezvous
from outpace.launch.rendezvous import StaticRendezvousHandler


def test_a_port_that_is_not_reached_is_named(monkeypatch, hold_port):
    monkeypatch.setattr(rendezvous, "_CONNECT", timedelta(seconds=1))
    port = hold_port()
    second = StaticRendezvousHandler(1, 2, f"127.0.0.1:{port}", "x")
    with pytest.raises(RendezvousConnectionError, match=f"127.0.0.1, port {port}.*firewall"):
        second.next_rendezvous()
