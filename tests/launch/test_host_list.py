"""SLURM's lists of hosts, as its own scontrol reads them."""

import shutil
import subprocess

import pytest

from outpace.launch.host_list import expand
from outpace.records.errors import BadInputError

LISTS = {
    "gpu07": "gpu07",
    "gpu[03-06,9],login": "gpu03 gpu04 gpu05 gpu06 gpu9 login",
    "rack[0-1]node[1-2]": "rack0node1 rack0node2 rack1node1 rack1node2",
    "a[1-2][3-4]": "a13 a14 a23 a24",
    "n[00098-00101]": "n00098 n00099 n00100 n00101",
    "n[008-010]": "n008 n009 n010",
    "x[9-11]": "x9 x10 x11",
    "nodeA,nodeB[001,003],nodeC": "nodeA nodeB001 nodeB003 nodeC",
    "p4d-queue-dy-p4d24xlarge-[3-4]": "p4d-queue-dy-p4d24xlarge-3 p4d-queue-dy-p4d24xlarge-4",
    "[1-3]": "1 2 3",
    "n[1-3,2]": "n1 n2 n3 n2",
    "n1 n2": "n1 n2",
}
# What scontrol of SLURM 22 refuses, though hosts may be called so.
MORE = {
    "rack[1-2]-gpu": "rack1-gpu rack2-gpu",
    "c[1,3]-ib0,d7": "c1-ib0 c3-ib0 d7",
    "gpu[1-2].cluster.example.org": "gpu1.cluster.example.org gpu2.cluster.example.org",
    "a[1-2]b[3-4]c": "a1b3c a1b4c a2b3c a2b4c",
    "bgq[0000x0011]": "bgq0000 bgq0001 bgq0010 bgq0011",
    "bg[0AxBB]": " ".join(f"bg{a}{b}" for a in "0123456789AB" for b in "AB"),
}


@pytest.mark.parametrize(("text", "hosts"), {**LISTS, **MORE}.items())
def test_hosts_of_a_list(text, hosts):
    assert list(expand(text)) == hosts.split()


@pytest.mark.parametrize("text", LISTS)
def test_scontrol_says_the_same(text, tmp_path):
    if shutil.which("scontrol") is None:
        pytest.skip("SLURM is not installed")
    settings = tmp_path / "slurm.conf"
    settings.write_text(
        "ClusterName=c\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=ALL\n"
    )
    done = subprocess.run(
        ["scontrol", "show", "hostnames", text], env={"SLURM_CONF": str(settings)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert list(expand(text)) == done.stdout.split()


@pytest.mark.parametrize(
    "text", ["", ",", "n[1-2", "n[1-2]]", "n[a-b]", "n[3-1]", "n[],x", "gpu[1-3:2]", "n[0x00]"]
)
def test_what_is_no_list_is_refused(text):
    with pytest.raises(BadInputError, match=r"list of hosts .* is not of the form gpu"):
        list(expand(text))


def test_the_first_of_very_many_is_found_at_once():
    assert next(expand("r[0-999]c[0-999]n[0-999]")) == "r0c0n0"
