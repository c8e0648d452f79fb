"""Advice on hosts whose GPUs are not joined alike, and on outputs that are of something else."""

import io
from itertools import combinations

import pytest
from rich.console import Console

from outpace.probing.hardware.gpu_placement import advise_placement, missing_nvlinks
from outpace.probing.hardware.nvidia_smi import parse, render
from outpace.records.errors import BadInputError
from outpace.records.topology import Endpoint, Topology
from outpace.reporting.sections.topology_svg import topology_svg
from outpace.reporting.terminal.topology import advice, topology_text

LEGEND = "\nLegend:\n\n  X    = Self\n  PIX  = at most one bridge\n"


def joined(gpus: int, usual: str, odd: dict[tuple[int, int], str], **more: object) -> Topology:
    """A host whose pairs have the `usual` link, but for some."""
    links = [["X" if a == b else usual for b in range(gpus)] for a in range(gpus)]
    for (a, b), link in odd.items():
        links[a][b] = links[b][a] = link
    devices = [Endpoint(name=f"GPU{at}", kind="gpu") for at in range(gpus)]
    return Topology.parse({"devices": devices, "links": links, "source": "made", **more}, "made")


def said(topology: Topology) -> list[str]:
    placement = advise_placement(topology)
    assert topology_svg(topology, placement).startswith("<svg")
    written = io.StringIO()
    console = Console(width=200, file=written)
    console.print(topology_text(topology, placement))
    lines = advice(placement, topology)
    if placement.missing is not None or topology.pcie_only:
        assert written.getvalue().startswith(lines[0][:150])  # before the matrix
    return lines


@pytest.mark.parametrize("lost", [0, 2, 7])
def test_one_gpu_without_nvlink_is_said_first(lost: int) -> None:
    """As on an 8 × B200 whose third GPU had lost its links."""
    others = [at for at in range(8) if at != lost]
    odd = {(min(lost, at), max(lost, at)): "NODE" if at < 4 else "SYS" for at in others}
    topology = joined(8, "NV18", odd)
    first, second, *rest = said(topology)
    assert first == (
        f"GPU{lost} has no NVLink (NODE or SYS instead of NV18, which the other 7 GPUs have among "
        "them)."
    )
    assert "An all-reduce over all 8 drops to PCIe" in second
    best = advise_placement(topology).tensor_parallel
    assert best is not None and (best.size, best.worst_link) == (4, "NV18")
    assert f"GPU{lost}" in best.left_out
    assert not any("No group is connected by NVLink" in line for line in rest)


def test_two_gpus_without_nvlink() -> None:
    odd = {pair: "SYS" for pair in combinations(range(8), 2) if set(pair) & {1, 6}}
    assert said(joined(8, "NV12", odd))[0].startswith("GPU1, GPU6 have no NVLink (SYS instead")


def test_a_pair_that_lost_its_link() -> None:
    missing = missing_nvlinks(joined(8, "NV18", {(2, 5): "SYS"}))
    assert missing is not None and missing.gpus == () and missing.pairs == (("GPU2", "GPU5"),)
    assert said(joined(8, "NV18", {(2, 5): "SYS"}))[0].startswith("GPU2–GPU5: SYS instead of NV18")


def test_a_gpu_with_fewer_links() -> None:
    odd = {(min(3, at), max(3, at)): "NV16" for at in range(8) if at != 3}
    first, second, *_ = said(joined(8, "NV18", odd))
    assert first.startswith("GPU3 has fewer NVLinks (NV16 instead of NV18")
    assert "drops to the rate of NV16" in second


@pytest.mark.parametrize(
    "topology",
    [
        joined(8, "NV18", {}),
        joined(2, "NV4", {}),
        joined(3, "NODE", {(0, 1): "NV4"}),
        joined(8, "NODE", {(0, 1): "NV12", (2, 3): "NV12", (4, 5): "NV12", (6, 7): "NV12"}),
        joined(4, "NV1", {(0, 1): "NV2", (2, 3): "NV2"}),  # as in a p3.8xlarge
        joined(4, "SYS", {}),
    ],
)
def test_bridges_and_meshes_are_no_fault(topology: Topology) -> None:
    assert missing_nvlinks(topology) is None


@pytest.mark.parametrize(
    ("topology", "size", "worst", "groups", "left"),
    [
        (joined(3, "NODE", {(0, 1): "NV4"}), 2, "NV4", {("GPU0", "GPU1")}, ("GPU2",)),
        (joined(4, "SYS", {(0, 1): "NV4"}), 2, "NV4", {("GPU0", "GPU1")}, ("GPU2", "GPU3")),
        (joined(4, "SYS", {(0, 1): "PIX", (0, 2): "PIX", (1, 2): "PIX"}), 2, "PIX",
         {("GPU0", "GPU1")}, ("GPU2", "GPU3")),
        (joined(4, "SYS", {(0, 1): "NV4", (2, 3): "PIX"}), 2, "PIX",
         {("GPU0", "GPU1"), ("GPU2", "GPU3")}, ()),
        (joined(5, "SYS", {(0, 3): "NV2", (1, 4): "NV2"}), 2, "NV2",
         {("GPU0", "GPU3"), ("GPU1", "GPU4")}, ("GPU2",)),
        (joined(6, "PHB", dict.fromkeys(combinations((0, 1, 2, 3), 2), "NV3")), 4, "NV3",
         {("GPU0", "GPU1", "GPU2", "GPU3")}, ("GPU4", "GPU5")),
    ],
)  # fmt: skip
def test_groups_that_leave_gpus_out(
    topology: Topology, size: int, worst: str, groups: set[tuple[str, ...]], left: tuple[str, ...]
) -> None:
    best = advise_placement(topology).tensor_parallel
    assert best is not None
    assert (best.size, best.worst_link, set(best.groups)) == (size, worst, groups)
    assert best.left_out == left
    line = next(line for line in said(topology) if line.startswith("Tensor parallelism"))
    assert f"{', '.join(left)} in none" in line if left else "in none" not in line


@pytest.mark.parametrize(
    "text",
    [
        "$ nvidia-smi topo -mp\n" + render(joined(4, "SYS", {(0, 1): "NODE"})),
        "nvidia-smi topo --matrix_pci\n" + render(joined(2, "PIX", {})),
        render(joined(4, "PHB", {})) + LEGEND,
    ],
)
def test_a_matrix_without_nvlinks_says_so(text: str) -> None:
    topology = parse(text, "saved")
    assert topology.pcie_only
    lines = said(topology)
    assert "topo -mp`, which leaves NVLinks out" in lines[0] and "topo -m`." in lines[0]
    assert not any("No group is connected by NVLink" in line or "crosses" in line for line in lines)
    placement = advise_placement(topology)
    assert placement.bottleneck is None and placement.slow == ()


def test_a_matrix_that_may_be_without_nvlinks() -> None:
    assert not parse(render(joined(4, "PHB", {})), "saved").pcie_only
    assert not parse(render(joined(4, "NV4", {})) + LEGEND, "saved").pcie_only
    assert not parse(render(joined(4, "PHB", {})) + LEGEND + "  NV#  = a bond", "x").pcie_only
    assert "If the matrix is from topo -mp" in said(joined(4, "PHB", {}))[0]


def test_gpus_that_are_numa_nodes_of_their_own() -> None:
    """GB200: SYS to every card says nothing."""
    names = ("GPU0", "GPU1", "NIC0")
    links = [["X", "NV18", "SYS"], ["NV18", "X", "SYS"], ["SYS", "SYS", "X"]]
    ids = {"GPU0": "2", "GPU1": "10"}
    own = [
        Endpoint(name=one, kind="gpu" if one in ids else "nic", gpu_numa_id=ids.get(one))
        for one in names
    ]
    lines = said(Topology.parse({"devices": own, "links": links, "source": "x"}, "x"))
    assert any("GPU0, GPU1: each is a separate NUMA node" in line for line in lines)
    assert not any("every network card is on another" in line for line in lines)
    plain = [one.model_copy(update={"gpu_numa_id": None}) for one in own]
    lines = said(Topology.parse({"devices": plain, "links": links, "source": "x"}, "x"))
    assert any("every network card is on another NUMA node" in line for line in lines)


ROCM = """
============================ ROCm System Management Interface ============================
=============================== Link Type between two GPUs ===============================
       GPU0         GPU1
GPU0   0            XGMI
GPU1   XGMI         0
"""
P2P = (
    "\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n\nLegend:\n  X = Self\n  CNS = Chipset not supported\n"
)
TABLE = "| NVIDIA-SMI 550.90   Driver Version: 550.90   CUDA Version: 12.4 |\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ROCM, ": it is the output of rocm-smi or amd-smi for AMD GPUs"),
        ("     PPU0 PPU1\nPPU0  X   ICN7\nPPU1 ICN7   X\n", "matrix of PPUs"),
        ("     GPU0 GPU1\nGPU0  X   ICN7\nGPU1 ICN7   X\n", "matrix of PPUs"),
        ("     NPU0 NPU1\nNPU0  X   HCCS\nNPU1 HCCS  X\n", "Ascend NPUs"),
        (P2P, "topo -p2p"),
        (TABLE, "`nvidia-smi` without topo -m"),
        ("==============NVSMI LOG==============\n\nTimestamp : Mon\n", "without topo -m"),
        ("Device 0 is connected to device 1 by way of multiple PCIe switches.\n", "a single pair"),
        ("LINK TYPE TABLE:\n          0000:0c:00.0 0000:22:00.0\n0000:0c:00.0 SELF PCIE\n",
         "rocm-smi or amd-smi"),
        ("      MLU0 MLU1\nMLU0  X   PIX\nMLU1 PIX  X\n", "another maker's accelerators"),
        ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n", "nvidia-smi failed"),
        ("GPU 0: NVIDIA H100 (UUID: GPU-1)\n", "nvidia-smi -L"),
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550\n",
         "library have different versions, as after an update. Reboot"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
         "nvidia-smi failed. Fix what it reports"),
        ("Unable to determine the device handle for GPU0: Unknown Error\n", "handle for GPU0"),
        ("Failed to run topology matrix\n", "It says: 'Failed to run topology matrix'"),
        ("No devices were found\n", "It says: 'No devices were found'"),
        ("bash: nvidia-smi: command not found\n", "nvidia-smi was not found on that host"),
        ("hello\n", "Save the output of `nvidia-smi topo -m`"),
    ],
)  # fmt: skip
def test_what_is_of_something_else_is_named(text: str, words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        parse(text, "saved.txt")
    assert words in str(caught.value) and "saved.txt" in str(caught.value)


def test_words_that_are_no_links_are_named() -> None:
    with pytest.raises(BadInputError, match=r"GPU0–GPU1 cannot be read \(row GPU0: 'C2C' is no"):
        parse("\tGPU0\tGPU1\nGPU0\t X \tC2C\nGPU1\tC2C\t X \n", "saved")
