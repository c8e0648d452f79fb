"""Ranks on separate networks: namespaces of this machine on one bridge, limited to a rate.

The kernel's token bucket counts whole Ethernet frames: 1448 of 1514 bytes are the program's, so a
program gets at most 95.6 % of the rate. This needs root and iproute2.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

PROGRAMS_SHARE = 1448 / 1514
_PORT = 29511  # nothing else uses these networks
# A bucket that fills before a busy machine returns to it would slow the link.
_BUCKET_S = 0.0016
_LOOK_S = 0.1


@dataclass(frozen=True)
class Host:
    """A namespace, its end of the cable, and its address."""

    name: str
    device: str
    address: str


def why_not() -> str | None:
    """Return why no separate network is possible here; None if it is."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"needs {' and '.join(missing)} of iproute2" if missing else None


@contextmanager
def network(count: int, mbit_per_s: int | None) -> Iterator[list[Host]]:
    """Yield `count` hosts, each with a cable of that rate in each direction (None: unlimited).

    Raises CalledProcessError if the kernel refuses.
    """
    own = os.getpid()
    hub = f"outpace-{own}-hub"
    hosts = [Host(f"outpace-{own}-{n}", f"op{own}h{n}", f"10.214.0.{n + 1}") for n in range(count)]
    names = [hub, *(host.name for host in hosts)]
    try:
        for name in names:
            _do("ip", "netns", "add", name)
            _do("ip", "-n", name, "link", "set", "lo", "up")
        _do("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", hub, "link", "set", "bridge", "up")
        for number, host in enumerate(hosts):
            _plug_in(host, hub, f"op{own}p{number}", mbit_per_s)
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _plug_in(host: Host, hub: str, port: str, mbit_per_s: int | None) -> None:
    """Connect a host and the bridge by a cable; each end limits the rate at which it sends."""
    _do("ip", "link", "add", host.device, "netns", host.name, "type", "veth",
        "peer", "name", port, "netns", hub)  # fmt: skip
    _do("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
    _do("ip", "-n", host.name, "link", "set", host.device, "up")
    _do("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
    if mbit_per_s is None:
        return
    bucket = max(64_000, round(mbit_per_s * 1e6 / 8 * _BUCKET_S))
    for name, device in ((host.name, host.device), (hub, port)):
        _do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root", "tbf",
            "rate", f"{mbit_per_s}mbit", "burst", str(bucket), "latency", "100ms")  # fmt: skip


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)


def start(hosts: Sequence[Host], words: Sequence[str]) -> None:
    """Start a rank of a Python program on each host, as torchrun would on one machine.

    Raises CalledProcessError if one fails; the others are then ended.
    """
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", host.name, sys.executable, *words],
            env={**os.environ, **_place(rank, hosts)},
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        while any(process.poll() is None for process in processes):
            _check(processes)
            time.sleep(_LOOK_S)
        _check(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _check(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the job when a process fails, since the others would wait for it in a collective."""
    for process in processes:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)


def _place(rank: int, hosts: Sequence[Host]) -> dict[str, str]:
    """Return a rank's environment. Ranks share a machine, so strategies for one machine may run."""
    size = str(len(hosts))
    return {
        "RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": hosts[rank].device, "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch would warn that these addresses have no names
    }  # fmt: skip
