"""A link of a known rate between two networks of one machine is measured at that rate.

The kernel's token bucket counts whole Ethernet frames: of 1514 bytes 1448 are the program's, so
that 95.6 % of the rate is what a program can have at most. What is measured is compared with the
rate itself. The bucket holds what the rate gives in 1.6 ms or more: one that is full sooner than a
busy machine comes back to it loses what it should have let through. Much more would flatter the
link.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.records.probe_results import ProbeRecord

RANKS = Path(__file__).with_name("shaped_link_ranks.py")

pytestmark = [pytest.mark.root, pytest.mark.gloo]


def do(*words):
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot shape a link here: {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def networks():
    """Two network namespaces, joined by a pair of virtual Ethernet devices: (name, device)."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs ip and tc of iproute2")
    names = [f"outpace-{os.getpid()}-{side}" for side in "ab"]
    devices = [f"op{os.getpid()}{side}" for side in "ab"]  # 15 characters at most
    try:
        for name in names:
            do("ip", "netns", "add", name)
        do("ip", "link", "add", devices[0], "netns", names[0], "type", "veth",
           "peer", "name", devices[1], "netns", names[1])  # fmt: skip
        for number, (name, device) in enumerate(zip(names, devices, strict=True), 1):
            do("ip", "-n", name, "addr", "add", f"10.213.0.{number}/24", "dev", device)
            do("ip", "-n", name, "link", "set", "lo", "up")
            do("ip", "-n", name, "link", "set", device, "up")
        yield list(zip(names, devices, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def rank_in(networks, rank, mbit_per_s):
    """Start a rank in its network, whose sending is held to the rate."""
    name, device = networks[rank]
    bucket = f"{max(64, mbit_per_s // 5)}kb"
    do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root",
       "tbf", "rate", f"{mbit_per_s}mbit", "burst", bucket, "latency", "100ms")  # fmt: skip
    place = {
        "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "10.213.0.1", "MASTER_PORT": 29511, "GLOO_SOCKET_IFNAME": device,
    }  # fmt: skip
    environment = os.environ | {key: str(value) for key, value in place.items()}
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, str(RANKS)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("mbit_per_s", [200, 100, 1000])
@pytest.mark.slow
def test_a_link_of_a_known_rate_is_measured_within_a_tenth(networks, mbit_per_s):
    processes = [rank_in(networks, rank, mbit_per_s) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    probed = ProbeRecord.model_validate_json(outputs[0][0])
    bandwidth = probed.fit("all-reduce", "all").bandwidth
    assert bandwidth.value is not None, bandwidth.unstable
    assert 8 * bandwidth.value == pytest.approx(mbit_per_s * 1e6, rel=0.1)
    # Two hosts of one rank each are two nodes: what there is of network is compared.
    assert any("400 Gbit/s" in one.text for one in probed.advice)
