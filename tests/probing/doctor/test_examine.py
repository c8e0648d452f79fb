"""Each check on a host where all is well, with one thing planted that is not."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from outpace.probing.doctor.examine import CHECKS, examine
from outpace.probing.hardware import inventory as inventory_module
from outpace.probing.hardware import nvml
from outpace.probing.hardware.cpus import cpu_quota
from outpace.probing.hardware.inventory import gather
from outpace.probing.hardware.machine import usable_cores
from outpace.probing.hardware.nvidia_smi import parse
from outpace.records.finding import Examination, Finding, Slowdown
from outpace.records.inventory import BusyProgram, GpuState, Inventory, NetworkPort
from outpace.records.topology import CpuTopology, NumaNode

TOPOLOGIES = Path(__file__).parent.parent / "topologies"
GIB = 2**30
GPU = {
    "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * GIB, "memory_used_bytes": 0,
    "utilisation": 0, "performance_state": 0, "sm_clock_hz": 1.98e9,
    "sm_clock_max_hz": 1.98e9, "power_limit_w": 700, "power_limit_default_w": 700,
    "throttled_by": (), "ecc": True, "ecc_pending": True, "ecc_uncorrected": 0,
    "remap_pending": False, "pcie_generation": 5, "pcie_generation_max": 5,
    "pcie_generation_card": 5, "pcie_width": 16, "pcie_width_max": 16, "nvlinks": 18,
    "nvlinks_active": 18, "cpu_affinity": "0-3", "mig": False, "persistence": True,
    "other_processes": 0,
}  # fmt: skip
PORT = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand"}  # fmt: skip


def topology(name):
    return parse((TOPOLOGIES / f"{name}.txt").read_text(), name)


def host(**planted):
    """A host with two GPUs, four cores and InfiniBand, and nothing wrong with it."""
    facts = {
        "cpu": CpuTopology(cpus="0-3", packages=1, cores=4, siblings=("0", "1", "2", "3"),
                           numa=(NumaNode(number=0, cpus="0-3", distances=(10,)),)),
        "usable_cpus": "0-3", "governors": ("performance",), "scaling_driver": "acpi-cpufreq",
        "transparent_hugepages": "madvise", "memory_bytes": 64 * GIB, "swap_used_bytes": 0,
        "swapped_bytes_per_s": 0.0, "shared_memory_bytes": 32 * GIB,
        "shared_memory_free_bytes": 32 * GIB, "open_files_limit": 65536,
        "open_files_hard_limit": 65536, "locked_memory_limit_bytes": -1, "local_rank": 0,
        "local_world_size": 1, "other_busy_cores": 0.0,
        "gpus": tuple(GpuState(index=at, **GPU) for at in range(2)),
        "topology": topology("2x-titan-rtx-nvlink"), "ports": (NetworkPort(**PORT),),
        "gpu_direct": True,
    }  # fmt: skip
    return Inventory(**{**facts, **planted})


def gpus(**planted):
    return {"gpus": (GpuState(index=0, **GPU), GpuState(index=1, **{**GPU, **planted}))}


def settings(**planted):
    return {"settings": planted}


SMT = CpuTopology(cpus="0-7", cores=4, siblings=("0,4", "1,5", "2,6", "3,7"))
TWO_NODES = CpuTopology(
    cpus="0-7", cores=8, siblings=tuple("01234567"),
    numa=(NumaNode(number=0, cpus="0-3", distances=(10, 32)),
          NumaNode(number=1, cpus="4-7", distances=(32, 10))))  # fmt: skip

PLANTED = [
    (settings(NCCL_P2P_DISABLE="1"), "NCCL_P2P_DISABLE", "severe", "unset NCCL_P2P_DISABLE"),
    ({**settings(NCCL_P2P_DISABLE="1"), "topology": topology("2x-consumer-phb")},
     "NCCL_P2P_DISABLE", "high", "unset NCCL_P2P_DISABLE"),
    (settings(NCCL_P2P_LEVEL="LOC"), "NCCL_P2P_DISABLE", "severe", "unset NCCL_P2P_LEVEL"),
    (settings(CUDA_LAUNCH_BLOCKING="1"), "variables left from debugging", "severe", "unset CUDA"),
    (settings(NVIDIA_TF32_OVERRIDE="0"), "variables left from debugging", "high", "TF32"),
    (settings(NCCL_SHM_DISABLE="1"), "variables left from debugging", "high", "NCCL_SHM"),
    (settings(TORCH_DISTRIBUTED_DEBUG="DETAIL"), "variables left from debugging", "high", "unset"),
    (settings(NCCL_ALGO="Ring"), "variables left from debugging", "low", "unset NCCL_ALGO"),
    (settings(NCCL_IB_DISABLE="1"), "InfiniBand", "severe", "unset NCCL_IB_DISABLE"),
    (settings(NCCL_NET="Socket"), "InfiniBand", "severe", "unset NCCL_NET"),
    (settings(NCCL_IB_HCA="mlx4"), "InfiniBand", "severe", "unset NCCL_IB_HCA"),
    (settings(NCCL_IB_HCA="^mlx5"), "InfiniBand", "severe", "unset NCCL_IB_HCA"),
    (settings(NCCL_IB_HCA="=mlx5"), "InfiniBand", "severe", "unset NCCL_IB_HCA"),
    (settings(NCCL_IB_HCA="mlx5_0:2"), "InfiniBand", "severe", "unset NCCL_IB_HCA"),
    ({"verbs_devices": False}, "InfiniBand", "severe", "--device /dev/infiniband"),
    ({"verbs_library": False}, "InfiniBand", "severe", "libibverbs1"),
    ({"ports": (NetworkPort(**PORT), NetworkPort(**{**PORT, "device": "mlx5_1", "state": "DOWN"}))},
     "InfiniBand", "moderate", "ibstat"),
    ({"ports": (NetworkPort(**{**PORT, "state": "INIT"}),)}, "InfiniBand", "high", "subnet"),
    ({"ports": tuple(NetworkPort(**{**PORT, "device": f"mlx5_{at}", "rate": rate})
                     for at, rate in enumerate(["400 Gb/sec", "400 Gb/sec", "200 Gb/sec"]))},
     "InfiniBand", "moderate", "cable"),
    ({"gpu_direct": False}, "InfiniBand", "moderate", "modprobe nvidia_peermem"),
    ({"locked_memory_limit_bytes": 65536}, "InfiniBand", "high", "memlock"),
    (gpus(pcie_width=4), "PCIe width", "high", "reseat"),
    (gpus(pcie_generation_max=4, pcie_generation=4), "PCIe width", "low", "slot"),
    (gpus(pcie_generation=1, utilisation=0.99), "PCIe width", "high", "AER"),
    (gpus(nvlinks_active=12), "NVLink", "severe", "nvidia-smi nvlink -s"),
    ({"gpus": tuple(GpuState(index=at, **{**GPU, "nvlinks_active": 0}) for at in range(2))},
     "NVLink", "high", "bridge"),
    (gpus(throttled_by=("temperature (hardware)",), sm_clock_hz=1.2e9), "throttling", "severe",
     "air flow"),
    (gpus(throttled_by=("clocks set by a user",)), "throttling", "moderate", "nvidia-smi -rgc"),
    (gpus(power_limit_w=500), "power cap", "moderate", "nvidia-smi -pl 700"),
    (gpus(ecc_uncorrected=3), "ECC", "severe", "dcgmi diag"),
    (gpus(remap_pending=True), "ECC", "moderate", "reset"),
    (gpus(ecc=False, ecc_pending=False), "ECC", "low", "nvidia-smi -e 1"),
    (gpus(ecc_pending=False), "ECC", "low", "nvidia-smi -r"),
    (gpus(other_processes=2, memory_used_bytes=GIB), "GPU sharing", "high", "CUDA_VISIBLE_DEVICES"),
    (gpus(mig=True), "GPU sharing", "high", "nvidia-smi -mig 0"),
    (gpus(persistence=False), "GPU sharing", "low", "persistenced"),
    ({"cpu": CpuTopology(cpus="0-7", siblings=tuple("01234567"), numa=host().cpu.numa),
      "local_world_size": 2, "local_rank": 0, "usable_cpus": "4-7", "settings":
      {"OMP_NUM_THREADS": "2"}}, "GPU and CPU", "high", "taskset -c 0-3"),
    ({"topology": topology("dgx-1-v100"), **settings(CUDA_VISIBLE_DEVICES="0,5")},
     "choice of GPUs", "high", "CUDA_VISIBLE_DEVICES=0,3: NV2"),
    (settings(CUDA_VISIBLE_DEVICES=""), "visible GPUs", "high", "unset CUDA_VISIBLE_DEVICES"),
    (settings(CUDA_VISIBLE_DEVICES="-1"), "visible GPUs", "high", "unset CUDA_VISIBLE_DEVICES"),
    (settings(CUDA_VISIBLE_DEVICES="NoDevFiles"), "visible GPUs", "high", "unset CUDA_VISIBLE"),
    (settings(CUDA_VISIBLE_DEVICES="0,,1"), "visible GPUs", "high", "numbers from 0 to 1"),
    (settings(CUDA_VISIBLE_DEVICES="0,2"), "visible GPUs", "high", "numbers from 0 to 1"),
    (settings(CUDA_VISIBLE_DEVICES="0,0"), "visible GPUs", "severe", "numbers from 0 to 1"),
    (settings(CUDA_VISIBLE_DEVICES="1,01"), "visible GPUs", "severe", "numbers from 0 to 1"),
    (settings(CUDA_VISIBLE_DEVICES="GPU-1111,0"), "visible GPUs", "high", "numbers from 0 to 1"),
    (settings(CUDA_VISIBLE_DEVICES="0,GPU-1111"), "visible GPUs", "high", "numbers from 0 to 1"),
    (settings(CUDA_VISIBLE_DEVICES="MIG-1,GPU-2"), "visible GPUs", "high", "numbers from 0 to 1"),
    (settings(CUDA_VISIBLE_DEVICES="MIG-1,MIG-2"), "visible GPUs", "high", "one run for each"),
    ({"topology": topology("dgx-1-v100"), **settings(CUDA_VISIBLE_DEVICES="0,0")},
     "visible GPUs", "severe", "numbers from 0 to 7"),
    ({"cpu_quota": 1.5}, "CPU quota", "severe", "OMP_NUM_THREADS=1"),
    ({"cpu_quota": 3.0}, "CPU quota", "high", "docker --cpus=4"),
    ({"local_world_size": 2}, "OMP_NUM_THREADS", "high", "OMP_NUM_THREADS=2"),
    (settings(OMP_NUM_THREADS="6"), "OMP_NUM_THREADS", "moderate", "OMP_NUM_THREADS=4"),
    (settings(OMP_NUM_THREADS="64"), "OMP_NUM_THREADS", "high", "OMP_NUM_THREADS=4"),
    ({"local_world_size": 4, **settings(OMP_NUM_THREADS="4")}, "OMP_NUM_THREADS", "high",
     "OMP_NUM_THREADS=1"),
    (settings(OMP_NUM_THREADS="64,2"), "OMP_NUM_THREADS", "high", "OMP_NUM_THREADS=4"),
    (settings(OMP_NUM_THREADS="1"), "OMP_NUM_THREADS", "low", "OMP_NUM_THREADS=4"),
    (settings(OMP_NUM_THREADS="many"), "OMP_NUM_THREADS", "moderate", "OMP_NUM_THREADS=4"),
    ({"other_busy_cores": 2.0, "busy": (BusyProgram(program="stress", cores=2.0),)},
     "other programs", "high", "taskset"),
    ({"shared_memory_bytes": 64 * 2**20}, "/dev/shm", "severe", "--ipc=host"),
    ({"shared_memory_free_bytes": 2**20}, "/dev/shm", "high", "remove"),
    ({"swap_used_bytes": 8 * GIB}, "swap", "low", "swapoff"),
    ({"swap_used_bytes": 8 * GIB, "swapped_bytes_per_s": 1e8}, "swap", "severe", "swapoff"),
    ({"cpu": TWO_NODES, "usable_cpus": "0-7"}, "NUMA binding", "low", "numactl"),
    ({"usable_cpus": "0"}, "CPU affinity", "moderate", "--cpuset-cpus"),
    ({"governors": ("powersave",)}, "CPU governor", "moderate", "cpupower"),
    ({"governors": ("powersave",), "scaling_driver": "intel_pstate",
      "energy_preferences": ("power",)}, "CPU governor", "moderate", "cpupower"),
    ({"transparent_hugepages": "never"}, "huge pages", "low", "madvise"),
    ({"open_files_limit": 1024, "open_files_hard_limit": 8192}, "open files", "low",
     "ulimit -n 8192"),
]  # fmt: skip


def test_a_healthy_host_has_no_findings_and_all_is_checked():
    examination = examine(host())
    assert examination.findings == ()
    assert set(examination.checked) == set(CHECKS)
    assert examination.not_checked == {}


@pytest.mark.parametrize(("planted", "check", "severity", "remedy"), PLANTED)
def test_what_is_planted_is_found_alone(planted, check, severity, remedy):
    (finding,) = examine(host(**planted)).findings
    assert (finding.check, finding.severity) == (check, severity)
    assert remedy in finding.remedy
    assert finding.seen


def test_programs_to_end_have_their_numbers():
    busy = tuple(BusyProgram(program="python", cores=0.5, pid=pid) for pid in (41, 42))
    (finding,) = examine(host(other_busy_cores=1.0, busy=busy)).findings
    assert "python (0.5 cores, pid 41), python (0.5 cores, pid 42)" in finding.seen


@pytest.mark.parametrize(
    "among", ["mlx5", "=mlx5_0", "mlx5_0:1", "^mlx5_1,mlx4", "^=mlx5", "ib,mlx5"]
)
def test_cards_that_may_be_used_are_no_finding(among):
    assert examine(host(**settings(NCCL_IB_HCA=among))).findings == ()


def test_without_a_port_nothing_is_missing():
    assert examine(host(ports=(), verbs_devices=False, verbs_library=False)).findings == ()


def test_every_check_is_planted_for():
    # Two threads on a core are also more threads than cores: see below.
    assert {check for _, check, _, _ in PLANTED} == set(CHECKS) - {"hyper-threads"}


@pytest.mark.parametrize(
    "text",
    ["0", "0,1", "1,0", " 0 , 1", "GPU-1111", "MIG-GPU-11111111-2222/7/0", "GPU-1111,GPU-22"],
)
def test_lists_of_gpus_that_cuda_reads_whole(text):
    found = examine(host(**settings(CUDA_VISIBLE_DEVICES=text))).findings
    assert "visible GPUs" not in {finding.check for finding in found}


def test_hyper_threads():
    planted = host(cpu=SMT, usable_cpus="0-7", settings={"OMP_NUM_THREADS": "8"}, gpus=(),
                   gpus_unknown="none")  # fmt: skip
    found = {finding.check: finding.remedy for finding in examine(planted).findings}
    assert "OMP_NUM_THREADS=4" in found["hyper-threads"]


def test_a_saving_governor_that_its_driver_does_not_heed():
    planted = host(governors=("powersave",), scaling_driver="intel_pstate",
                   energy_preferences=("performance",))  # fmt: skip
    assert examine(planted).findings == ()


def test_an_idle_card_may_lower_its_pcie_generation():
    assert examine(host(**gpus(pcie_generation=1, performance_state=8))).findings == ()


def test_the_most_costly_is_first():
    planted = host(
        cpu_quota=1.0, transparent_hugepages="never", **gpus(pcie_width=8),
        settings={"NCCL_P2P_DISABLE": "1"},
    )  # fmt: skip
    found = [(one.check, one.costs and one.costs.high) for one in examine(planted).findings]
    assert found == [("CPU quota", 4.0), ("NCCL_P2P_DISABLE", 1.29), ("PCIe width", 2.0),
                     ("huge pages", None)]  # fmt: skip


def test_findings_out_of_order_are_refused():
    def one(severity):
        return Finding(check="c", what="w", seen="s", remedy="r", severity=severity)

    with pytest.raises(ValueError, match="not ordered by cost"):
        Examination(findings=(one("low"), one("severe")), checked=(), not_checked={})
    with pytest.raises(ValueError, match="at least 1 character"):
        Slowdown(low=1, high=2, of="x", source="")


def test_what_cannot_be_told_is_said_with_the_reason():
    bare = host(gpus=(), gpus_unknown="NVML: Insufficient Permissions", topology=None,
                topology_unknown="nvidia-smi is not here", governors=None)  # fmt: skip
    examination = examine(bare)
    assert examination.findings == ()
    assert examination.not_checked["ECC"] == "NVML: Insufficient Permissions"
    assert examination.not_checked["choice of GPUs"] == "nvidia-smi is not here"
    assert "CPU governor" in examination.not_checked


def test_which_gpu_of_unlike_ones_a_rank_uses_is_told_by_the_order_that_is_set():
    far = {"usable_cpus": "4-7", "cpu": CpuTopology(cpus="0-7", siblings=tuple("01234567"))}
    unlike = host(**gpus(name="NVIDIA L4"), **far)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in examine(unlike).not_checked["GPU and CPU"]
    ordered = host(**gpus(name="NVIDIA L4"), **far, **settings(CUDA_DEVICE_ORDER="PCI_BUS_ID"))
    assert "GPU and CPU" in {finding.check for finding in examine(ordered).findings}


def test_a_refused_question_leaves_the_others():
    refused = GpuState(index=0, **{**GPU, "ecc": None, "not_told": {"EccMode": "Not Supported"}})
    examination = examine(host(gpus=(refused,)))
    assert examination.not_checked == {"ECC": "the driver does not report it: Not Supported"}


class Library:
    """Answers as pynvml does; `refused` names questions that fail, one by one."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_NVLINK_MAX_LINKS = 1, 0, 18
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, *refused, **answers):
        self.refused, self.answers = refused, answers

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 1

    def __getattr__(self, name):
        what = name.removeprefix("nvmlDeviceGet")

        def answer(*_arguments):
            if what in self.refused or what not in self.answers:
                raise self.NVMLError("Not Supported" if what in self.refused else "No permission")
            return self.answers[what]

        return answer


ANSWERS = {
    "HandleByIndex": 0, "Name": b"NVIDIA L4", "PowerManagementDefaultLimit": 72000,
    "EnforcedPowerLimit": 60000, "CurrentClocksEventReasons": 0x4 | 0x40 | 0x1,
    "EccMode": [1, 0], "CurrPcieLinkWidth": 8, "MaxPcieLinkWidth": 16, "MigMode": [0, 0],
    "UtilizationRates": SimpleNamespace(gpu=94),
}  # fmt: skip


def test_nvml_answers_become_a_record():
    (gpu,) = nvml.read_gpus(Library(**ANSWERS))
    assert (gpu.name, gpu.power_limit_w, gpu.power_limit_default_w) == ("NVIDIA L4", 60.0, 72.0)
    assert gpu.throttled_by == ("power cap", "temperature (hardware)")
    assert (gpu.ecc, gpu.ecc_pending, gpu.mig) == (True, False, False)
    assert (gpu.pcie_width, gpu.pcie_width_max) == (8, 16)
    assert gpu.utilisation == 0.94


@pytest.mark.parametrize("question", sorted(set(ANSWERS) - {"HandleByIndex"}))
def test_each_question_may_fail_alone(question):
    (whole,) = nvml.read_gpus(Library(**ANSWERS))
    (gpu,) = nvml.read_gpus(Library(question, **ANSWERS))
    assert gpu.not_told[question] == "Not Supported"
    left = gpu.model_dump(exclude={"not_told"})
    lost = {key for key, value in whole.model_dump(exclude={"not_told"}).items()
            if value != left[key]}  # fmt: skip
    assert 1 <= len(lost) <= 2
    assert all(left[key] is None for key in lost)


def test_a_device_that_may_not_be_opened_is_one_without_answers():
    (gpu,) = nvml.read_gpus(Library())
    assert gpu.not_told == {"HandleByIndex": "No permission"}


def test_a_hanging_library_is_given_up_in_time():
    began = time.monotonic()
    gpus, why = nvml.query(0.5, [sys.executable, "-c", "import time; time.sleep(300)"])
    assert gpus == ()
    assert "has not answered in 0.5 s" in why
    assert time.monotonic() - began < 150  # not the library's 300


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a/cpu.max": "150000 100000", "cpu.max": "max 100000"}, (1.5, True)),
        ({"a/cpu.max": "max 100000", "cpu.max": "50000 100000"}, (0.5, True)),
        ({"a/cpu.max": "300000 100000", "cpu.max": "200000 100000"}, (2.0, True)),
        ({"a/cpu.max": "max 100000"}, (None, True)),
        ({"a/other": "1"}, (None, False)),
    ],
)
def test_the_least_quota_up_the_tree_counts(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / "top" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / name).write_text(f"{text}\n")
    (tmp_path / "mountinfo").write_text(f"35 31 0:32 / {tmp_path}/top rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "cgroup").write_text("0::/a\n")
    files = (tmp_path / "cgroup", tmp_path / "mountinfo")
    assert cpu_quota(*files) == expected
    # Threads of a training, and processes that prepare its data, are as many.
    cpus = len(os.sched_getaffinity(0))
    assert usable_cores(*files) == (
        cpus if expected[0] is None else min(cpus, max(1, int(expected[0])))
    )


def test_a_quota_of_version_1(tmp_path):
    folder = tmp_path / "top/job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("200000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    mount = f"35 31 0:32 / {tmp_path}/top rw - cgroup cgroup rw,cpu,cpuacct\n"
    (tmp_path / "mountinfo").write_text(mount)
    (tmp_path / "cgroup").write_text("4:cpu,cpuacct:/job\n3:memory:/x\n")
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "mountinfo") == (2.0, True)


def test_this_host_is_read_with_what_runs_on_it(monkeypatch):
    """By the clock of a program that has a core to itself, beside which nothing else is shown."""
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    found = psutil.Process(spin.pid)

    def spent_s():
        return sum(found.cpu_times()[:2])

    def wait(seconds):
        until_s = spent_s() + seconds
        while spent_s() < until_s:
            time.sleep(0.02)

    monkeypatch.setattr(inventory_module, "time", SimpleNamespace(sleep=wait, monotonic=spent_s))
    both = {**vars(psutil), "process_iter": lambda: [psutil.Process(), found]}
    processes = SimpleNamespace(**both)
    monkeypatch.setattr(inventory_module, "psutil", processes)
    try:
        inventory = gather({"OMP_NUM_THREADS": "3", "SECRET": "x", "LOCAL_RANK": "1",
                            "LOCAL_WORLD_SIZE": "2"}, watch_s=0.5)  # fmt: skip
    finally:
        spin.kill()
        spin.wait()
    assert inventory.settings == {"OMP_NUM_THREADS": "3"}
    assert (inventory.local_rank, inventory.local_world_size) == (1, 2)
    assert inventory.cpu.cpu_count >= len(os.sched_getaffinity(0)) > 0
    assert inventory.other_busy_cores > 0.1
    assert any("python" in one.program and one.pid == spin.pid for one in inventory.busy)
    assert Inventory.model_validate_json(inventory.model_dump_json()) == inventory
