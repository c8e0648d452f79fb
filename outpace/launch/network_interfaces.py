"""Selection of the network interface on which ranks listen.

gloo and NCCL read its name from environment variables. By default, gloo listens on the address that
this host's name resolves to, which other hosts can usually reach.
"""

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil

from outpace.records.errors import BadInputError

LOOPBACK = "127.0.0.1"
# NCCL treats names as prefixes, except after an equals sign.
_TAKE_A_NAME = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}


def variables_for(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make gloo and NCCL use the interface of `address`, unless set."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return {k: f"{sign}{name}" for k, sign in _TAKE_A_NAME.items() if k not in environ}
    return {}


def require_interfaces(environ: Mapping[str, str]) -> None:
    """Raise BadInputError if GLOO_SOCKET_IFNAME names an interface that this host lacks."""
    named = environ.get("GLOO_SOCKET_IFNAME", "")
    there = psutil.net_if_addrs()
    lacking = [name for name in named.split(",") if name not in there]
    if len(named) > 1 and lacking:  # gloo accepts any single letter
        raise BadInputError(
            f"environment: GLOO_SOCKET_IFNAME = {named!r}, but this host has no network interface "
            f"{lacking[0]!r}; it has {', '.join(sorted(there))}. gloo needs full names, not "
            "NCCL's patterns (^lo, =eth0). Name the interface that leads to the other ranks, or "
            "unset it."
        )


def require_address(address: str) -> None:
    """Raise BadInputError if no interface of this host has the given address."""
    there = psutil.net_if_addrs()
    if not any(one.address == address for found in there.values() for one in found):
        raise BadInputError(
            f"this host has no network interface with the address {address}, which its ranks need "
            f"for their rendezvous (it has {', '.join(sorted(there)) or 'none'}). In a separate "
            "network namespace, as in `unshare --net` and many sandboxes, the loopback interface "
            "starts out down: run `ip link set lo up` there as root, or start outside it."
        )


@contextmanager
def use_interface(address: str) -> Iterator[frozenset[str]]:
    """Make process groups use the interface of `address` in the context.

    Yield the names of the variables that were set. Raises BadInputError if there is no such
    interface.
    """
    require_address(address)
    own = variables_for(address, os.environ)
    os.environ.update(own)
    try:
        yield frozenset(own)
    finally:
        for variable in own:
            os.environ.pop(variable, None)


def listen(host: str, port: int, spans_hosts: bool) -> socket.socket | None:
    """Return a socket bound to the address of this host to which other ranks resolve `host`.

    Returns None if that address is unknown: `host` does not resolve to an address of this host, or
    some ranks are on other hosts (`spans_hosts`) and it has several addresses, or loopback's.
    Raises OSError if the port is in use.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    places = sorted({(entry[0], entry[4]) for entry in found}, key=lambda place: -place[0])
    if spans_hosts and (len(places) > 1 or ipaddress.ip_address(str(places[0][1][0])).is_loopback):
        return None
    # torch's clients try IPv6 first, and use IPv4 only if there is no IPv6 address.
    for family, place in places:
        try:
            return _bind_socket(family, place)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return None


def _bind_socket(family: int, place: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
    except OSError:
        made.close()
        raise
    return made
