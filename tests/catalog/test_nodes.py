import pytest

from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.links import LINKS, bytes_per_s
from outpace.catalog.node_names import find_node
from outpace.catalog.nodes import NODES
from outpace.planner.hardware.networks import of_node
from outpace.records.errors import BadInputError
from outpace.records.hardware import Bundle, Node


@pytest.mark.parametrize("node", NODES.values(), ids=NODES)
def test_every_name_in_a_machine_resolves(node):
    assert NODES[node.name] is node and find_node(node.name) is node
    assert node.accelerator is None or node.accelerator in ACCELERATORS
    assert node.host_link is None or node.host_link in LINKS
    for bundle in (*node.nics, *([node.device_link] if node.device_link else [])):
        assert bundle.link in LINKS
    assert node.source
    assert node.processes == node.hosts * node.processes_per_host
    fast = bytes_per_s(node.device_link)
    if fast is not None:
        assert node.host_link is not None
        assert fast > LINKS[node.host_link].bytes_per_s


@pytest.mark.parametrize(
    ("name", "devices", "device_gb_per_s", "network_gb_per_s"),
    [
        # Both directions together: 300 GB/s and four EDR ports (NVIDIA DGX-1 datasheet).
        ("dgx1-v100", 8, 150, 50),
        ("dgx-a100", 8, 300, 200),  # 600 GB/s; eight ports of 200 Gbit/s
        ("hgx-h200", 8, 450, None),  # 900 GB/s; the network is the buyer's
        ("gb200-nvl72", 72, 900, 3600),  # 1.8 TB/s, 130 TB/s in a rack
        ("aws-p4d", 8, 300, 50),  # 400 Gbit/s
        ("aws-p5", 8, 450, 400),  # 3,200 Gbit/s
        ("2x-titan-rtx-nv2", 2, 50, None),  # 100 GB/s (TITAN RTX)
        ("2x-titan-rtx", 2, None, None),
        ("laptop", 0, None, None),
    ],
)
def test_published_totals(name, devices, device_gb_per_s, network_gb_per_s):
    node = NODES[name]
    assert node.devices == devices
    assert bytes_per_s(node.device_link) == (device_gb_per_s and device_gb_per_s * 1e9)
    network = of_node(node)
    assert (network and network.bytes_per_s) == (network_gb_per_s and network_gb_per_s * 1e9)


def test_a_rack_has_several_hosts():
    assert NODES["gb200-nvl72"].processes_per_host == 4


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"devices": 0}, "0 devices of accelerator T4"),
        ({"accelerator": None}, "4 devices of accelerator None"),
        ({"topology": "mesh"}, "topology mesh with device link None"),
        ({"device_link": Bundle(link="NVLink 2", count=1)}, "topology none with device link"),
        ({"hosts": 3}, "hosts 3 does not divide the number of ranks, 4 "),
        (
            {"devices": 0, "accelerator": None, "hosts": 3},
            "hosts 3 does not divide the number of ranks, 1 ",
        ),
    ],
)
def test_a_machine_that_cannot_be_is_refused(wrong, sentence):
    values = {"name": "mine", "accelerator": "T4", "devices": 4, "source": "here"}
    with pytest.raises(BadInputError, match=sentence):
        Node.parse({**values, **wrong}, "machine")
