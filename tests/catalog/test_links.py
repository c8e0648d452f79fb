from itertools import pairwise

import pytest

from outpace.catalog.links import LINKS, bytes_per_s, find_link
from outpace.records.errors import BadInputError
from outpace.records.hardware import Bundle


@pytest.mark.parametrize(
    ("name", "gigabytes_per_s"),
    [
        # PCI-SIG's own tables round these to 15.8, 31.5 and 63; ×16, one direction.
        ("PCIe 3 x16", 15.754),
        ("PCIe 4 x16", 31.508),
        ("PCIe 5 x16", 63.015),
        ("PCIe 6 x16", 121.0),
        ("InfiniBand NDR", 50.0),
        ("Ethernet 800", 100.0),
        ("Omni-Path 100", 12.5),
    ],
)
def test_rates_are_of_one_direction_after_line_coding(name, gigabytes_per_s):
    assert LINKS[name].bytes_per_s == pytest.approx(gigabytes_per_s * 1e9, rel=1e-4)


def test_every_asked_for_link_is_there_with_its_source():
    kinds = {
        kind: [link.name for link in LINKS.values() if link.kind == kind]
        for kind in {link.kind for link in LINKS.values()}
    }
    whole = [name.split()[1] for name in kinds["pcie"] if name.endswith("x16")]
    assert whole == ["3", "4", "5", "6"]
    assert {name.split()[1] for name in kinds["infiniband"]} == {"EDR", "HDR", "NDR", "XDR"}
    ethernets = [int(name.split()[1]) for name in kinds["ethernet"]]
    assert ethernets == [10, 25, 40, 50, 100, 200, 400, 800]
    assert {f"NVLink {generation}" for generation in range(2, 6)} <= set(kinds["nvlink"])
    assert kinds["omni-path"] and kinds["efa"] and kinds["slingshot"]
    assert all(name == link.name and link.source for name, link in LINKS.items())


def test_each_generation_doubles():
    for kind, names in {
        "PCIe {} x16": (3, 4, 5),
        "InfiniBand {}": ("EDR", "HDR", "NDR", "XDR"),
    }.items():
        rates = [LINKS[kind.format(name)].bytes_per_s for name in names]
        assert all(later == 2 * earlier for earlier, later in pairwise(rates))


def test_a_bundle_is_its_links_together():
    assert bytes_per_s(Bundle(link="NVLink 4", count=18)) == 450e9
    assert bytes_per_s(Bundle(link="NVLink 3 GA102", count=4)) == 56.25e9
    assert bytes_per_s(None) is None


def test_links_are_found_as_machines_are():
    assert find_link("infiniband-ndr") is LINKS["InfiniBand NDR"]
    assert find_link("PCIe 4 x16") is LINKS["PCIe 4 x16"]
    with pytest.raises(BadInputError, match=r"'infiniband-ndx'.*'infiniband-ndr'"):
        find_link("infiniband-ndx")
