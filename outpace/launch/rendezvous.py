"""Rendezvous of a job's ranks: torch's store, bound to one address of the first host.

By itself, torch's store listens on all interfaces, whatever address it is given.
"""

import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from outpace.launch.network_interfaces import listen

NAME = "outpace"  # name among the rendezvous handlers of torch's launcher
_CONNECT = timedelta(seconds=60)
_JOIN_S = 600.0
_LOOK_AGAIN_S = 0.05


def store_on(bound: socket.socket, host: str, timeout: timedelta) -> TCPStore:
    """Return a store that listens on the socket `bound`, which others reach at `host`."""
    port = bound.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout,
        multi_tenant=True, master_listen_fd=bound.detach(),
    )  # fmt: skip


class StaticRendezvousHandler(RendezvousHandler):
    """Rendezvous of a fixed number of hosts with known positions, all of which join at the start.

    The store is on the first host. Ranks use the same store.
    """

    def __init__(self, place: int, hosts: int, endpoint: str, run_id: str) -> None:
        self._place, self._hosts, self._run_id = place, hosts, run_id
        host, _, port = endpoint.rpartition(":")
        self._host, self._port = host.removeprefix("[").removesuffix("]"), int(port)
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name of this rendezvous backend in torch's launcher."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """True: ranks use the launcher's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all hosts have joined, and return the store and this host's position.

        Raises RendezvousError if the store cannot be reached, or after the time limit.
        """
        self._store = self._open_store()
        store = PrefixStore(self._run_id, self._store)
        self._wait_for_hosts(store)
        known = RendezvousStoreInfo(self._host, self._store.port)
        return RendezvousInfo(store, self._place, self._hosts, known)

    def _open_store(self) -> TCPStore:
        if self._place > 0:
            try:
                return TCPStore(self._host, self._port, is_master=False, timeout=_CONNECT)
            except DistError:
                raise RendezvousConnectionError(
                    f"could not reach the rendezvous at {self._host}, port {self._port}, within "
                    f"{_CONNECT.total_seconds():.0f} s. Check that this host resolves the name, "
                    "and that no firewall blocks the port between the two hosts"
                ) from None
        try:
            bound = listen(self._host, self._port, spans_hosts=False)
        except OSError as error:
            raise RendezvousConnectionError(f"{self._format_failure()}: {error.strerror}") from None
        if bound is None:
            raise RendezvousConnectionError(
                f"{self._format_failure()}: this host has no such address, although the others "
                "reach it there. Start from a host that all others reach directly"
            )
        return store_on(bound, self._host, _CONNECT)

    def _format_failure(self) -> str:
        return f"cannot listen on {self._host}, port {self._port}"

    def _wait_for_hosts(self, store: Store) -> None:
        """Poll until all hosts have joined; torch's own wait would not handle signals."""
        store.add("hosts", 1)
        late_s = time.monotonic() + _JOIN_S
        while (joined := store.add("hosts", 0)) < self._hosts:
            if time.monotonic() > late_s:
                raise RendezvousTimeoutError(
                    f"only {joined} of {self._hosts} hosts joined within {_JOIN_S:.0f} s"
                )
            time.sleep(_LOOK_AGAIN_S)

    def is_closed(self) -> bool:
        """Return False, because the rendezvous is never closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0, because no node joins later."""
        return 0

    def get_run_id(self) -> str:
        """Return the run ID."""
        return self._run_id

    def shutdown(self) -> bool:
        """Release the store, which ends with its last user."""
        self._store = None
        return True


def _make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return StaticRendezvousHandler(
        parameters.get("place"), parameters.max_nodes, parameters.endpoint, parameters.run_id
    )


def register() -> None:
    """Register the handler with torch's elastic launcher under NAME."""
    rendezvous_handler_registry.register(NAME, _make_handler)
