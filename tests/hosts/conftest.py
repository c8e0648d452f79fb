"""Hosts that are real to each other: a network, a name and an ssh server of their own each.

All share this machine's files, but for folders that a host is told to lack. The first is where
commands are typed.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_SERVER = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/{name}.pid
StrictModes no
UsePAM no
PasswordAuthentication no
"""
_CLIENT = """
IdentityFile {folder}/key
UserKnownHostsFile {folder}/known
StrictHostKeyChecking accept-new
LogLevel ERROR
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.root)
            item.add_marker(pytest.mark.gloo)


def do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no networks of one's own here: {' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class OneHost:
    """A namespace of networks, a host's name, its address, and the device that has it."""

    name: str
    space: str
    address: str
    device: str


@dataclass(frozen=True)
class Cluster:
    """Hosts, and a folder with what ssh needs."""

    hosts: tuple[OneHost, ...]
    folder: Path
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def start(self, *words: object, cwd: Path) -> "subprocess.Popen[str]":
        """A command of outpace, typed on the first host."""
        first = self.hosts[0]
        inside = ["ip", "netns", "exec", first.space, "unshare", "-u", "sh", "-c",
                  'hostname "$0" && exec "$@"', first.name]  # fmt: skip
        command = [*inside, sys.executable, "-m", "outpace", *map(str, words)]
        path = f"{self.folder}:{os.environ['PATH']}"
        process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1",
                                    "SSH_CONNECTION": "192.0.2.1 1 192.0.2.2 22"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def close(self) -> None:
        """What a failed test has left."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def cut(self, name: str) -> None:
        """Nothing reaches a host, and nothing leaves it."""
        self._link(name, "down")

    def mend(self, name: str) -> None:
        """As before."""
        self._link(name, "up")

    def _link(self, name: str, state: str) -> None:
        host = next(one for one in self.hosts if one.name == name)
        do("ip", "-n", host.space, "link", "set", host.device, state)

    @contextmanager
    def behind_a_firewall(self, name: str) -> Iterator[None]:
        """A host reaches no port of the first host; ssh, which has come to it, goes on."""
        host = next(one for one in self.hosts if one.name == name)
        rule = ("to", self.hosts[0].address, "ipproto", "tcp", "sport", "1024-65534",
                "dport", "1024-65534", "blackhole")  # fmt: skip
        do("ip", "-n", host.space, "rule", "add", *rule)
        try:
            yield
        finally:
            do("ip", "-n", host.space, "rule", "delete", *rule)

    def limit(self, rate: str | None) -> None:
        """So many bits a second from each to the other; None: as many as go."""
        for host in self.hosts:
            change = ["tc", "-n", host.space, "qdisc"]
            if rate is None:
                do(*change, "delete", "dev", host.device, "root")
            else:
                do(*change, "add", "dev", host.device, "root", "tbf", "rate", rate, "burst",
                   "256kb", "latency", "200ms")  # fmt: skip

    def shift(self, name: str, by: str | None) -> bool:
        """Have a host's clock show another time, by libfaketime; False where that is not there."""
        library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
        if library is None:
            return False
        config = self.folder / f"{name}.conf"
        plain = [line for line in config.read_text().splitlines() if "FAKETIME" not in line]
        if by is not None:
            plain.append(f"SetEnv LD_PRELOAD={library} FAKETIME={by}")
        config.write_text("\n".join(plain) + "\n")
        # It reads its configuration anew.
        os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGHUP)
        time.sleep(0.5)
        return True

    def left(self, cwd: Path) -> list[psutil.Process]:
        """What still runs of outpace in a folder."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cwd() == str(cwd) and "outpace" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def run(self, *words: object, cwd: Path) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        process = self.start(*words, cwd=cwd)
        try:
            output, errors = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=600)
            pytest.fail(f"it did not end:\n{output}\n{errors}")
        return process.returncode, output, errors


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts, host-a and host-b; host-b does not see the folder `unseen`."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if shutil.which("ip") is None or SSHD is None:
        pytest.skip("needs ip of iproute2 and sshd of openssh-server")
    folder = tmp_path_factory.mktemp("cluster")
    keys(folder)
    hosts = tuple(
        OneHost(
            name, f"op-{os.getpid()}-{name}", f"10.214.0.{number}", f"op{os.getpid()}{name[-1]}"
        )
        for number, name in enumerate(("host-a", "host-b"), 1)
    )
    servers = []
    try:
        connect(hosts)
        for host in hosts:
            servers.append(serve(host, folder))
        cluster = Cluster(hosts, folder)
        yield cluster
        cluster.close()
    finally:
        for server in servers:
            server.terminate()
            server.wait()
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.space], capture_output=True, check=False)


def keys(folder: Path) -> None:
    """Keys, and an `ssh` that uses them and knows hosts by their names."""
    for name in ("key", "host_key"):
        do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    (folder / "unseen").mkdir()
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    ssh.chmod(0o755)


def connect(hosts: tuple[OneHost, ...]) -> None:
    for host in hosts:
        do("ip", "netns", "add", host.space)
    one, other = hosts
    do("ip", "link", "add", one.device, "netns", one.space, "type", "veth",
       "peer", "name", other.device, "netns", other.space)  # fmt: skip
    for host in hosts:
        do("ip", "-n", host.space, "addr", "add", f"{host.address}/24", "dev", host.device)
        do("ip", "-n", host.space, "link", "set", "lo", "up")
        do("ip", "-n", host.space, "link", "set", host.device, "up")


def serve(host: OneHost, folder: Path) -> "subprocess.Popen[bytes]":
    """An ssh server on a host of this name; all but the first lack what is in `unseen`."""
    Path("/run/sshd").mkdir(exist_ok=True)
    config = folder / f"{host.name}.conf"
    config.write_text(_SERVER.format(address=host.address, folder=folder, name=host.name))
    with (folder / "config").open("a") as file:
        file.write(f"Host {host.name}\nHostName {host.address}\n" + _CLIENT.format(folder=folder))
    hide = "" if host.name == "host-a" else f"mount -t tmpfs none {folder}/unseen; "
    script = f"hostname {host.name}; {hide}exec {SSHD} -D -e -f {config}"
    with (folder / f"{host.name}.log").open("w") as log:
        server = subprocess.Popen(
            ["ip", "netns", "exec", host.space, "unshare", "-um", "sh", "-c", script], stderr=log
        )
    deadline_s = time.monotonic() + 20
    while not (folder / f"{host.name}.pid").exists():
        if server.poll() is not None or time.monotonic() > deadline_s:
            said = (folder / f"{host.name}.log").read_text()[-500:]
            pytest.skip(f"sshd does not run here: {said}")
        time.sleep(0.05)
    return server
