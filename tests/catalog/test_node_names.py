import re

import pytest

from outpace.catalog.accelerators import ACCELERATORS
from outpace.catalog.node_names import find_node
from outpace.records.errors import BadInputError


def test_an_accelerator_is_a_machine_of_one():
    for name in ("RTX 4090", "rtx-4090"):
        node = find_node(name)
        assert (node.accelerator, node.devices, node.topology) == ("RTX 4090", 1, "none")
        assert node.host_link == "PCIe 4 x16" and "whitepaper" in node.source
    with pytest.raises(BadInputError, match=r"machine 'hgx-h10' is not.*'hgx-h100'"):
        find_node("hgx-h10")
    with pytest.raises(BadInputError, match=r"a Mac has one M4 16 GB.*--machine m4-16-gb"):
        find_node("2xm4:16GB")
    with pytest.raises(BadInputError, match="name one of them, as in m4:32GB"):
        find_node("2xm4")
    with pytest.raises(BadInputError, match="Did you mean '8xh100-sxm'"):
        find_node("8xh100x")
    for wrong, right in (("4xh1000", "4xh100"), ("h1000", "h100")):
        with pytest.raises(BadInputError, match=rf"Did you mean '{right}'\?"):
            find_node(wrong)


@pytest.mark.parametrize(
    ("name", "accelerator", "devices", "topology"),
    [
        ("rtx-4070:12GB", "RTX 4070", 1, "none"),
        ("m4-max:64GB", "M4 Max 64 GB", 1, "none"),
        ("apple-m1-8gb", "M1 8 GB", 1, "none"),
        ("4xrtx-3090", "RTX 3090", 4, "none"),  # no bridge is taken for granted
        ("2 x RTX 3060:8 GB", "RTX 3060 8 GB", 2, "none"),
        ("rtx-3060:12gb", "RTX 3060 12 GB", 1, "none"),
        ("rtx-3080-laptop", "RTX 3080 Laptop 8 GB", 1, "none"),
        ("8xh100-sxm", "H100 SXM", 8, "switch"),
        ("h100-sxm:80gb", "H100 SXM", 1, "none"),
        ("4xb300", "B300", 4, "switch"),
        ("8xmi355x", "MI355X", 8, "mesh"),
        ("2xh100-nvl", "H100 NVL", 2, "none"),
        ("gh200:144gb", "GH200 144 GB", 1, "none"),
        ("gh200:141gb", "GH200 144 GB", 1, "none"),
        # Boards and cards are sold of these: the board's is taken, and the name says so.
        ("8xh100", "H100 SXM", 8, "switch"),
        ("8 x H100", "H100 SXM", 8, "switch"),
        ("h100", "H100 SXM", 1, "none"),
        ("8×h200", "H200 SXM", 8, "switch"),
        ("8xa100:40gb", "A100 SXM 40 GB", 8, "switch"),
        ("h100:94gb", "H100 SXM 94 GB", 1, "none"),
        ("b300:288gb", "B300", 1, "none"),  # as NVIDIA prints it; 270 are left
        ("4xv100-sxm2-32-gb", "V100 SXM2 32 GB", 4, "mesh"),
        ("8xv100:16gb", "V100 SXM2 16 GB", 8, "cube-mesh"),
        ("72xgb200", "GB200", 72, "switch"),
    ],
)
def test_accelerators_are_a_machine_by_their_number_and_memory(
    name, accelerator, devices, topology
):
    node = find_node(name)
    assert (node.accelerator, node.devices, node.topology) == (accelerator, devices, topology)
    chip = ACCELERATORS[accelerator]
    assert chip.source in node.source and node.host_link == chip.host_link
    assert (node.device_link is None) == (topology == "none")


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("2xmi300x", 1),
        ("4xmi325x", 3),
        ("8xmi355x", 7),
        ("2xmi250x-gcd", 4),
        ("4xh100-sxm", 18),
        ("2xv100-sxm2-32-gb", 2),
        ("4xv100-sxm2-32-gb", 6),
        ("8xv100-sxm2-32-gb", 6),
    ],
)
def test_a_mesh_of_few_devices_has_the_links_between_them(name, links):
    assert find_node(name).device_link.count == links


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("rtx-3060", "sold with 8 GB or 12 GB. Say which, as in rtx-3060:12GB"),
        ("4xa100-sxm", "sold with 40 GB or 80 GB"),
        ("rtx-4070:16GB", "rtx-4070 is sold with 12 GB"),
        ("gh200", "sold with 96 GB or 144 GB"),
        ("8xa100", "a100 is sold with 40 GB or 80 GB on boards. Say which, as in 8xa100:80GB"),
        ("2xrtx-3060", "rtx-3060 is sold with 8 GB or 12 GB. Say which, as in 2xrtx-3060:12GB"),
        ("h100:70gb", "h100 is sold with 64 GB, 80 GB or 94 GB on boards"),
        ("gpu:a100:8", "a100 is sold with 40 GB or 80 GB.* as in 8xa100:80GB"),
        ("rtx-4090:48", r"at most 16 of RTX 4090, not 48.* If you mean 48 GB of memory: .* 24 GB"),
        ("h100:192", "at most 8 of H100 SXM.* If you mean 192 GB of memory: H100 SXM has 80 GB"),
        # Forms in which the number is a count, and a size that no accelerator has.
        *((name, r"--nodes \d+\.$") for name in ("48xrtx-4090", "gpu:rtx-4090:48", "h100:100")),
        # More digits than Python reads as an integer.
        *(
            (name.format("9" * 5000), "is not in the catalog")
            for name in ("h100:{}", "{}xh100", "h100x{}", "gpu:h100:{}", "h100:{}GB", "{}xdgx-h100")
        ),
        ("0xrtx-3090", "is not in the catalog"),
        ("", "is not in the catalog"),
    ],
)
def test_what_is_not_sold_is_refused(name, sentence):
    with pytest.raises(BadInputError, match=sentence):
        find_node(name)


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        # A number that is no size of the chip's memory is a count, however large.
        ("h100:1024", 1024, "dgx-h100 --nodes 128"), ("H100x128", 128, "dgx-h100 --nodes 16"),
        ("gpu:h100:1024", 1024, "dgx-h100 --nodes 128"), ("h200:64", 64, "dgx-h200 --nodes 8"),
        ("64xH100-80GB", 64, "dgx-h100 --nodes 8"), ("h100:16", 16, "dgx-h100 --nodes 2"),
        ("16xh100", 16, "dgx-h100 --nodes 2"), ("h100:20", 20, "5xh100-sxm --nodes 4"),
        ("rtx_4090:100", 100, "5xrtx-4090 --nodes 20"), ("17xh200", 17, "1xh200-sxm --nodes 17"),
        ("h100-pcie:32", 32, "8xh100-pcie --nodes 4"), ("64xa100:80gb", 64, "dgx-a100 --nodes 8"),
        ("a100-sxm4-40gb:64", 64, "dgx-a100-40gb --nodes 8"),
        ("64xa100", 64, "40 GB or 80 GB.*--machine dgx-a100 --nodes 8"),
        ("a100:64", 64, "40 GB or 80 GB.*--machine dgx-a100 --nodes 8"),
        ("100xrtx-3060:12GB", 100, "at most 16 of.*--machine 5xrtx-3060-12-gb --nodes 20"),
        ("b200:72", 72, "gb200-nvl72 has 72 of GB200.*--machine dgx-b200 --nodes 9"),
        ("gb200:144", 144, "gb200-nvl72 --nodes 2"), ("gb10:4", 4, "dgx-spark --nodes 4"),
        ("mi300x:64", 64, "mi300x-platform --nodes 8"),
        # A number of machines.
        ("128xdgx-h100", 1024, "dgx-h100 --nodes 128"), ("16x8xh100", 128, "8xh100-sxm --nodes 16"),
        ("dgx-h100:128", 1024, "dgx-h100 --nodes 128"),
        ("dgx-h100x128", 1024, "dgx-h100 --nodes 128"),
        ("4xgb200-nvl72", 288, "gb200-nvl72 --nodes 4"),
    ],
)  # fmt: skip
def test_more_than_a_host_has_is_refused_with_words_that_are_taken(name, count, words):
    with pytest.raises(BadInputError, match=words) as caught:
        find_node(name)
    found = re.search(r"--machine (\S+) --nodes (\d+)", str(caught.value))
    assert find_node(found[1]).devices * int(found[2]) == count


@pytest.mark.parametrize("chip", ACCELERATORS.values(), ids=ACCELERATORS)
def test_a_drivers_name_is_its_accelerator_or_asks_for_the_memory(chip):
    """As nvidia-smi, Kubernetes' labels and clouds write it."""
    for text in (f"NVIDIA {chip.driver_name}", f"nvidia-{chip.driver_name.lower()}"):
        try:
            found = ACCELERATORS[find_node(text).accelerator]
            assert found.driver_name == chip.driver_name
        except BadInputError as error:
            assert "is sold with" in str(error) and "Say which" in str(error)


@pytest.mark.parametrize(
    ("name", "devices", "chip"),
    [
        ("8xH100-80GB", 8, "H100 SXM"), ("8x NVIDIA H100 80GB HBM3", 8, "H100 SXM"),
        ("A100-SXM4-80GB", 1, "A100 SXM 80 GB"), ("NVIDIA A100 80GB PCIe", 1, "A100 PCIe 80 GB"),
        ("gpu:a100-sxm4-80gb:8", 8, "A100 SXM 80 GB"), ("gres/gpu:h200:8", 8, "H200 SXM"),
        ("a100_80gb", 1, "A100 SXM 80 GB"), ("nvidia-tesla-t4", 1, "T4"), ("H100x8", 8, "H100 SXM"),
        ("8xA100-40GB", 8, "A100 SXM 40 GB"), ("H100 PCIe 80GB", 1, "H100 PCIe"),
        ("4xRTX4090-24GB", 4, "RTX 4090"), ("RTX_4090", 1, "RTX 4090"),
        ("AMD Instinct MI300X", 1, "MI300X"), ("H200-141GB", 1, "H200 SXM"),
        # SLURM's, without "gpu:"; a number that is a size of such a chip's memory stays that.
        ("h100:8", 8, "H100 SXM"), ("H200:4", 4, "H200 SXM"), ("rtx_4090:2", 2, "RTX 4090"),
        ("rtx-3060:12", 1, "RTX 3060 12 GB"), ("2xrtx-4060-ti:16", 2, "RTX 4060 Ti 16 GB"),
        ("a100-sxm4-80gb:8", 8, "A100 SXM 80 GB"), ("T4:16", 1, "T4"),
        ("a6000:48", 1, "RTX A6000"), ("4090x4", 4, "RTX 4090"),
        ("1xdgx-h100", 8, "H100 SXM"), ("mi250x:64", 1, "MI250X GCD"),
        ("h100:80", 1, "H100 SXM"),
        ("A6000", 1, "RTX A6000"), ("8xA6000", 8, "RTX A6000"), ("gpu:a6000:4", 4, "RTX A6000"),
        ("NVIDIA A5000", 1, "RTX A5000"), ("4090", 1, "RTX 4090"), ("a6000:4", 4, "RTX A6000"),
    ],
)  # fmt: skip
def test_names_of_drivers_schedulers_and_clouds(name, devices, chip):
    found = find_node(name)
    assert (found.devices, found.accelerator) == (devices, chip)
