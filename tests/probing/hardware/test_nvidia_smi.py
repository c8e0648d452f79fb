import stat
import time
import tomllib
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.probing.hardware.cpus import read_cpus
from outpace.probing.hardware.gpu_placement import advise_placement, group_gpus
from outpace.probing.hardware.nvidia_smi import ToolError, parse, read_live, render
from outpace.records.errors import BadInputError
from outpace.records.topology import Endpoint, Topology, cpu_list, cpu_set, goodness

PUBLISHED = Path(__file__).parent.parent / "topologies"
SOURCES = tomllib.loads((PUBLISHED / "sources.toml").read_text())


def published(name):
    return parse((PUBLISHED / f"{name}.txt").read_text(), name)


def pairs(topology, names=None):
    """How many pairs of GPUs have each link."""
    found = {}
    for one, other in combinations(names or topology.gpus, 2):
        link = topology.link_between(one, other)
        found[link] = found.get(link, 0) + 1
    return found


def place_of(topology, name):
    device = topology.device(name)
    return device.cpu_affinity, device.numa_affinity


# GPUs, cards, links of pairs of GPUs, affinity of the first and the last GPU: read by eye in the
# published outputs.
EXPECTED = {
    "2x-titan-rtx-nvlink": (2, 0, {"NV2": 1}, ("0-23", None), ("0-23", None)),
    "2x-consumer-phb": (2, 0, {"PHB": 1}, ("0-11", None), ("0-11", None)),
    "2x-rtx-5090": (2, 0, {"PHB": 1}, ("0-63", "0"), ("0-63", "0")),
    "2x-rtx-3090-numa": (2, 0, {"SYS": 1}, ("0-7,16-23", None), ("8-15,24-31", "1")),
    "4x-gpu-soc": (4, 0, {"PHB": 2, "SOC": 4}, ("0-23", None), ("0-23", None)),
    "4x-gpu-4-nics": (4, 4, {"NODE": 2, "SYS": 4}, ("0-19,40-59", "0"), ("20-39,60-79", "1")),
    "5x-mixed-consumer": (
        5, 0, {"SYS": 4, "PHB": 2, "NODE": 4}, ("8-15,24-31", "1"), ("0-7,16-23", "0")),
    "8x-rtx-4090-numa-split": (
        8, 2, {"SYS": 28}, ("0-55,112-167", "0"), ("56-111,168-223", "1")),
    "8x-pcie-switches": (
        8, 0, {"PIX": 12, "NODE": 16}, ("0-23,48-71", "0"), ("0-23,48-71", "0")),
    "8x-a100-pcie-bridges-slurm": (
        8, 1, {"NV12": 4, "NODE": 24}, ("0-15,56-71", "0"), (None, "1")),
    "2x-a100-no-affinity": (2, 8, {"NV12": 1}, (None, None), (None, None)),
    "aws-p3.8xlarge-v100": (4, 0, {"NV1": 3, "NV2": 3}, ("0-31", None), ("0-31", None)),
    "dgx-1-v100": (
        8, 4, {"NV1": 8, "NV2": 8, "SYS": 12}, ("0-19,40-59", None), ("20-39,60-79", None)),
    "dgx-a100": (8, 10, {"NV12": 28}, ("48-63,176-191", "3"), ("80-95,208-223", "5")),
    "dgx-h100-wrapped": (8, 12, {"NV18": 28}, ("0-55,112-167", "0"), ("56-111,168-223", "1")),
    "hgx-h100-9-nics": (8, 9, {"NV18": 28}, ("0-79", "0"), ("80-159", "1")),
}  # fmt: skip


def test_every_published_output_has_its_source_and_is_tested():
    files = {path.stem for path in PUBLISHED.glob("*.txt")}
    assert files == set(SOURCES) == set(EXPECTED)
    assert len(files) >= 12
    assert all(one["source"] and one["kind"] for one in SOURCES.values())


@pytest.mark.parametrize("name", EXPECTED)
def test_published_outputs(name):
    gpus, nics, links, first, last = EXPECTED[name]
    topology = published(name)
    assert (len(topology.gpus), len(topology.nics)) == (gpus, nics)
    assert pairs(topology) == links
    assert place_of(topology, topology.gpus[0]) == first
    assert place_of(topology, topology.gpus[-1]) == last


@pytest.mark.parametrize(
    ("name", "one", "other", "link"),
    [
        ("dgx-1-v100", "GPU0", "GPU4", "NV2"),
        ("dgx-1-v100", "GPU0", "GPU5", "SYS"),
        ("dgx-1-v100", "GPU2", "GPU6", "NV1"),
        ("dgx-1-v100", "mlx5_1", "GPU3", "PIX"),
        ("dgx-1-v100", "mlx5_3", "mlx5_2", "PHB"),
        ("dgx-a100", "GPU5", "NIC4", "PXB"),
        ("dgx-a100", "NIC8", "NIC9", "PIX"),
        ("8x-rtx-4090-numa-split", "GPU6", "NIC1", "PHB"),
        ("8x-a100-pcie-bridges-slurm", "GPU6", "NIC0", "PHB"),
        ("dgx-h100-wrapped", "GPU5", "NIC9", "PXB"),  # in "NODEPXB"
        ("dgx-h100-wrapped", "GPU4", "NIC9", "NODE"),  # in "NODENODE", under "NIC8NIC9"
        ("dgx-h100-wrapped", "GPU7", "NIC11", "PXB"),
        ("dgx-h100-wrapped", "NIC0", "NIC1", None),  # their rows are cut off
        ("hgx-h100-9-nics", "GPU0", "NIC8", "PIX"),
    ],
)
def test_single_links(name, one, other, link):
    assert published(name).link_between(one, other) == link
    assert published(name).link_between(other, one) == link


def test_cards_have_the_names_of_the_nic_legend():
    assert published("dgx-a100").device("NIC9").label == "mlx5_9"


def test_a_terminals_codes_and_other_lines_around_it():
    text = (PUBLISHED / "dgx-a100.txt").read_text()
    head, _, rest = text.partition("\n")
    escaped = f"76 NICs found in the topology\n\t\x1b[4m{head[1:]}\x1b[0m\n{rest}"
    stripped = f"$ nvidia-smi topo -m\n\t[4m{head[1:]}[0m\n{rest}"
    unindented = f"GPU Topology:\n{head[1:]}\n{rest}"
    for variant in (escaped, stripped, unindented, text.replace("\n", "\r\n")):
        assert parse(variant, "dgx-a100") == published("dgx-a100")


def test_a_card_that_one_row_lacks_is_read_in_the_other():
    text = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    text += "GPU0\t X \tNV4\tPH0-11\t0-1\t\tN/A\nGPU1\tNV4\t X \tPHB\t0-11\t0-1\t\tN/A\n"
    topology = parse(text + "NIC0\tPHB\tPHB\t X \n", "x")
    assert topology.link_between("GPU0", "NIC0") == "PHB"
    assert place_of(topology, "GPU0") == (None, "0-1")
    assert "PH0-11" in topology.notes[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "it contains no matrix of GPUs"),
        ("NVIDIA-SMI has failed\n", "it contains no matrix"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV1\n", "no row for GPU1"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV1\nGPU1\tPHB\t X \n", "GPU0 to GPU1 is NV1, but GPU1"),
        ("\tGPU0\tGPU1\nGPU0\t X \t?\nGPU1\t?\t X \n", "GPU0–GPU1 cannot be read"),
        ("\tGPU0\tGPU1\nGPU0\tNV1\tNV1\nGPU1\tNV1\t X \n", "GPU0 to itself is NV1"),
    ],
)
def test_what_is_no_topology_is_refused(text, sentence):
    with pytest.raises(BadInputError, match=sentence):
        parse(text, "file")


@st.composite
def topologies(draw):
    gpus, nics = draw(st.integers(1, 9)), draw(st.integers(0, 6))
    names = [f"GPU{at}" for at in range(gpus)] + [f"NIC{at}" for at in range(nics)]
    terms = st.one_of(
        st.sampled_from(["PIX", "PXB", "PHB", "NODE", "SYS"]),
        st.integers(1, 36).map(lambda count: f"NV{count}"),
    )
    links = [["X"] * len(names) for _ in names]
    for a, b in combinations(range(len(names)), 2):
        links[a][b] = links[b][a] = draw(terms)
    with_numa = draw(st.booleans())
    with_id = with_numa and draw(st.booleans())
    cpus = st.sets(st.integers(0, 300), min_size=1, max_size=12).map(cpu_list)
    devices = []
    for name in names:
        gpu = name.startswith("GPU")
        devices.append(
            Endpoint(
                name=name,
                kind="gpu" if gpu else "nic",
                label=None if gpu else f"mlx5_{name[3:]}",
                cpu_affinity=draw(st.none() | cpus) if gpu else None,
                numa_affinity=draw(st.none() | st.sampled_from("0123"))
                if gpu and with_numa
                else None,
                gpu_numa_id=draw(st.none() | st.sampled_from("89")) if gpu and with_id else None,
            )
        )
    return Topology(devices=devices, links=links, source="drawn")


@given(topologies())
def test_what_is_rendered_is_read_back(topology):
    assert parse(render(topology), "drawn") == topology


@given(st.sets(st.integers(0, 500)))
def test_lists_of_cpus_are_read_back(cpus):
    assert cpu_set(cpu_list(cpus)) == cpus


@pytest.mark.parametrize(
    ("name", "size", "worst", "groups"),
    [
        ("2x-titan-rtx-nvlink", 2, "NV2", 1),
        ("aws-p3.8xlarge-v100", 4, "NV1", 1),
        ("dgx-1-v100", 4, "NV1", 2),
        ("dgx-a100", 8, "NV12", 1),
        ("8x-pcie-switches", 4, "PIX", 2),
        ("8x-a100-pcie-bridges-slurm", 2, "NV12", 4),
        ("2x-consumer-phb", None, None, None),
        ("8x-rtx-4090-numa-split", None, None, None),
    ],
)
def test_where_tensor_parallelism_belongs(name, size, worst, groups):
    best = advise_placement(published(name)).tensor_parallel
    found = best and (best.size, best.worst_link, len(best.groups))
    assert found == (None if size is None else (size, worst, groups))


def test_advice_on_dgx_1():
    advice = advise_placement(published("dgx-1-v100"), nvlink_bytes_per_s=25e9)
    twos = advice.groupings[0]
    assert (twos.worst_link, twos.link_bytes_per_s) == ("NV2", 50e9)
    assert set(advice.tensor_parallel.groups) == {
        ("GPU0", "GPU1", "GPU2", "GPU3"), ("GPU4", "GPU5", "GPU6", "GPU7")}  # fmt: skip
    assert [(one.link, len(one.pairs)) for one in advice.slow] == [("SYS", 12)]
    assert advice.bottleneck == "NV2"
    assert advice.nics[2].nics == ("mlx5_1",)
    assert advice.nics[2].link == "PIX"


def test_of_equal_links_those_within_a_numa_node_are_grouped():
    devices = [Endpoint(name=f"GPU{at}", kind="gpu", numa_affinity=str(at % 2)) for at in range(4)]
    links = [["X" if a == b else "SYS" for b in range(4)] for a in range(4)]
    twos = group_gpus(Topology(devices=devices, links=links, source="made"), 2)
    assert set(twos.groups) == {("GPU0", "GPU2"), ("GPU1", "GPU3")}
    fours = group_gpus(published("8x-rtx-4090-numa-split"), 4)
    assert set(fours.groups) == {
        ("GPU0", "GPU1", "GPU2", "GPU3"), ("GPU4", "GPU5", "GPU6", "GPU7")}  # fmt: skip


def test_sixteen_gpus_are_grouped_in_no_time():
    links = [["X"] * 16 for _ in range(16)]
    for a, b in combinations(range(16), 2):
        links[a][b] = links[b][a] = ("NV2", "PIX", "SYS")[(a * 7 + b * 5) % 3]
    devices = [Endpoint(name=f"GPU{at}", kind="gpu") for at in range(16)]
    topology = Topology(devices=devices, links=links, source="made")
    began_s = time.process_time()
    advice = advise_placement(topology)
    assert time.process_time() - began_s < 20
    assert [one.size for one in advice.groupings] == [2, 4, 8, 16]


@given(topologies().filter(lambda one: 2 <= len(one.gpus) <= 6))
def test_no_grouping_into_pairs_is_better(topology):
    def best(gpus, left_over):
        if len(gpus) < 2:
            return float("inf")
        first, *others = gpus
        found = [
            min(goodness(topology.link_between(first, other)),
                best([gpu for gpu in others if gpu != other], left_over))
            for other in others
        ]  # fmt: skip
        return max(found + ([best(others, False)] if left_over else []))

    chosen = group_gpus(topology, 2)
    assert goodness(chosen.worst_link) == best(list(topology.gpus), len(topology.gpus) % 2 == 1)
    grouped = [gpu for group in chosen.groups for gpu in group]
    assert len(grouped) == len(set(grouped)) == len(topology.gpus) // 2 * 2


def tool(folder, script):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def path_to_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_live_tool_is_read(path_to_tool):
    tool(path_to_tool, f"cat {PUBLISHED / '2x-rtx-5090.txt'}")
    assert pairs(read_live()) == {"PHB": 1}


def test_a_hanging_tool_is_stopped_with_all_it_started(path_to_tool):
    tool(path_to_tool, f"sleep 300 &\necho $! > {path_to_tool / 'child'}\nwait")
    with pytest.raises(ToolError, match=r"has not answered in 0\.5 s and was stopped"):
        read_live(0.5)
    child = int((path_to_tool / "child").read_text())
    state = Path(f"/proc/{child}/stat")
    deadline = time.monotonic() + 120
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_failing_tools_words_are_passed_on(path_to_tool):
    tool(path_to_tool, "echo 'Failed to initialize NVML: Insufficient Permissions' >&2; exit 4")
    with pytest.raises(ToolError, match=r"exit code 4\): Failed to initialize NVML: Insufficient"):
        read_live()


def test_a_tool_that_prints_something_else(path_to_tool):
    tool(path_to_tool, "echo 'No devices were found'")
    with pytest.raises(ToolError, match="No devices were found"):
        read_live()


def test_without_a_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match="nvidia-smi is not on PATH"):
        read_live()


def test_processors_out_of_the_kernels_files(tmp_path):
    """Two packages of two cores with two CPUs each, a NUMA node and a cache for each package."""
    cpu, node = tmp_path / "devices/system/cpu", tmp_path / "devices/system/node"

    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    write(cpu / "online", "0-7")
    write(node / "online", "0-1")
    for one in range(8):
        package = one // 2 % 2
        write(cpu / f"cpu{one}/topology/core_cpus_list", f"{one % 4},{one % 4 + 4}")
        write(cpu / f"cpu{one}/topology/physical_package_id", package)
        for name, text in {"level": 3, "type": "Unified", "size": "8192K",
                           "shared_cpu_list": ("0-1,4-5", "2-3,6-7")[package]}.items():  # fmt: skip
            write(cpu / f"cpu{one}/cache/index3/{name}", text)
    for number, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        write(node / f"node{number}/cpulist", cpus)
        write(node / f"node{number}/distance", ("10 21", "21 10")[number])
        write(node / f"node{number}/meminfo", f"Node {number} MemTotal:       1024 kB")
    found = read_cpus(tmp_path)
    assert (found.cpu_count, found.cores, found.packages) == (8, 4, 2)
    assert found.siblings == ("0,4", "1,5", "2,6", "3,7")
    assert [(one.cpus, one.memory_bytes, one.distances) for one in found.numa] == [
        ("0-1,4-5", 2**20, (10, 21)), ("2-3,6-7", 2**20, (21, 10))]  # fmt: skip
    (cache,) = found.caches
    assert (cache.level, cache.cache_bytes, cache.count, cache.shared_by) == (3, 2**23, 2, 4)
    assert found.cores_of(frozenset({0, 4, 1})) == 2
    assert found.numa_of(frozenset({4, 6})) == (0, 1)
