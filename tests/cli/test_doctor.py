import json
import shutil
import time
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from outpace.cli.main import main
from outpace.probing.hardware.nvidia_smi import parse
from outpace.records.inventory import GpuState

TOPOLOGIES = Path(__file__).parents[1] / "probing" / "topologies"


@pytest.fixture
def no_tools(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def tool(folder, script):
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_findings_with_their_remedy_and_what_could_not_be_checked(no_tools, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "severe · variables left from debugging: the CPU waits for every kernel" in said
    assert "fix: unset CUDA_LAUNCH_BLOCKING" in said
    assert "Not checked:" in said
    assert max(map(len, said.splitlines())) <= 100
    assert main(["doctor", "--strict"]) == 1


def test_as_a_document_the_most_costly_first(no_tools, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["findings"][0]["severity"] == "severe"
    order = ["severe", "high", "moderate", "low"]
    severities = [order.index(one["severity"]) for one in said["findings"]]
    assert severities == sorted(severities)
    assert said["inventory"]["settings"]["NCCL_ALGO"] == "Ring"


def test_a_hanging_driver_does_not_hang_the_doctor(no_tools, capsys):
    tool(no_tools, "sleep 300")
    began = time.monotonic()
    assert main(["doctor", "--json", "--timeout=2"]) == 0
    assert time.monotonic() - began < 150  # not the tool's 300
    said = json.loads(capsys.readouterr().out)
    assert "has not answered in 2 s and was stopped" in said["not_checked"]["choice of GPUs"]


def test_topology_of_a_file(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")
    file, drawn = TOPOLOGIES / "dgx-1-v100.txt", tmp_path / "t.svg"
    words = [f"--from={file}", f"--svg={drawn}", "--nvlink=2"]
    assert main(["topology", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "up to 4 GPUs, within {GPU0 GPU1 GPU2 GPU3} {GPU4 GPU5 GPU6 GPU7}" in said
    assert "at worst NV1, 25.00 GB/s each way" in said
    assert "SYS: 12 of 28 pairs" in said
    picture = drawn.read_text()
    assert picture.startswith("<svg") and picture.count("<title>NV2</title>") == 8 + 1  # the legend
    assert "mlx5_3" in picture
    assert main(["topology", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["placement"]["tensor_parallel"]["size"] == 4
    assert document["topology"]["links"][0][4] == "NV2"


def test_cards_are_in_the_matrix_and_slow_links_have_an_amount(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")
    file = TOPOLOGIES / "dgx-1-v100.txt"
    assert main(["topology", f"--from={file}", "--nvlink=2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mlx5_1", "PHB", "PHB", "PIX", "PIX", "SYS", "SYS", "SYS", "SYS"] in lines
    # Two NVLinks of 25 GB/s against a slot of 15.75.
    said = " ".join(word for line in lines for word in line)
    assert "takes at least 3.2 times as long as over NV2" in said
    assert main(["topology", f"--from={file}"]) == 0
    assert "times as long" not in capsys.readouterr().out  # the rates are not known
    drawn = tmp_path / "t.svg"
    for name, far in (("8x-rtx-4090-numa-split", 7), ("dgx-a100", 0)):
        assert main(["topology", f"--from={TOPOLOGIES / f'{name}.txt'}", f"--svg={drawn}"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        picture = drawn.read_text()
        ElementTree.fromstring(picture)
        topology = parse((TOPOLOGIES / f"{name}.txt").read_text(), name)
        assert all(nic in picture for nic in topology.nics[:2])
        among = [topology.link_between(*pair) for pair in combinations(topology.gpus, 2)]
        legend = 1 if far else 0
        assert picture.count("<title>SYS</title>") == among.count("SYS") + far + legend


def test_topology_says_how_the_gpus_are(no_tools, monkeypatch, capsys):
    tool(no_tools, f"cat {TOPOLOGIES / '2x-titan-rtx-nvlink.txt'}")
    states = (
        GpuState(index=0, name="NVIDIA TITAN RTX", memory_bytes=24 * 2**30, nvlinks=2,
                 nvlinks_active=2, sm_clock_hz=1.35e9, sm_clock_max_hz=2.1e9, power_w=80,
                 power_limit_w=250, power_limit_default_w=280, throttled_by=("power cap",),
                 pcie_generation=1, pcie_generation_max=3, pcie_width=8, pcie_width_max=16),
        GpuState(index=1),
    )  # fmt: skip
    monkeypatch.setattr("outpace.probing.hardware.nvml.query", lambda timeout_s: (states, None))
    assert main(["topology"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "GPU0 NVIDIA TITAN RTX: PCIe 1 of 3 ×8 of 16, 2 of 2 NVLinks up, 1350 of 2100 MHz, 80 of a "
        "limit of 250 W, power limit below the card's default of 280 W, slowed by power cap."
        in said
    )
    assert "GPU1 (name unknown): no state from the driver." in said
    assert main(["topology", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"][0]["nvlinks_active"] == 2
    monkeypatch.setattr(
        "outpace.probing.hardware.nvml.query", lambda timeout_s: ((), "NVML: no permission")
    )
    assert main(["topology"]) == 0
    assert "is unknown: NVML: no permission" in capsys.readouterr().out


def test_topology_without_a_driver_tells_of_the_processors(no_tools, capsys, tmp_path):
    assert main(["topology", f"--svg={tmp_path / 'cpu.svg'}"]) == 0
    said = capsys.readouterr().out
    assert "nvidia-smi is not on PATH" in said
    assert "CPUs" in said
    assert "cores" in (tmp_path / "cpu.svg").read_text()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'Insufficient Permissions'; exit 4", "Insufficient Permissions"),
        ("sleep 300", "has not answered in 1 s"),
    ],
)
def test_topology_with_a_broken_driver(no_tools, capsys, script, words):
    tool(no_tools, script)
    began = time.monotonic()
    assert main(["topology", "--timeout=1"]) == 0
    assert time.monotonic() - began < 150  # not the tool's 300
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            [f"--from={TOPOLOGIES / 'dgx-a100.txt'}", "--nvlink=9"],
            "'NVLink 9' is not in the catalog",
        ),
        (["--from=nowhere.txt"], "--from nowhere.txt: No such file"),
        ([f"--from={TOPOLOGIES / 'sources.toml'}"], "it contains no matrix of GPUs"),
        ([f"--from={TOPOLOGIES / 'dgx-a100.txt'}", "--svg=t.png"], "must end with .svg"),
        (
            [f"--from={TOPOLOGIES / 'dgx-a100.txt'}", "--svg=/no/dir/t.svg"],
            "there is no folder /no/dir",
        ),
    ],
)
def test_bad_input_is_a_sentence(words, sentence, capsys):
    assert main(["topology", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_is_looked_at_in_the_place_of_the_host(run, tmp_path, capsys):
    """What its steps waited for, which were slow, that they were slower than expected, its end."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("xxh3_64")
        line["step_time_s"] = 5.0 if line["step"] == 4 else 0.1
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = json.loads((copy / "result.json").read_text())
    del result["xxh3_128"]
    result["parts"] = dict.fromkeys(result["parts"], 0.01) | {"data_s": 0.15}
    result["promise"] = {"steps": 6, "step_time_s": 0.3, "expected_s": 0.1, "kept": False}
    (copy / "result.json").write_text(json.dumps(result))
    capsys.readouterr()
    assert main(["doctor", f"--run={copy}", "--json"]) == 0
    said = {one["what"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    waits = said["waits for data 75 %"]
    assert waits["severity"] == "high" and waits["costs"]["low"] == pytest.approx(4)
    assert "--workers" in waits["remedy"] and "75.0 % of a step of 200" in waits["seen"]
    assert "steps 4, 4.90 s longer" in said["1 of 6 steps took more than twice the median"]["seen"]
    assert said["slower than expected"]["costs"]["low"] == pytest.approx(3)
    assert main(["doctor", f"--run={copy}", "--strict"]) == 1
    assert "1. high · speed: waits for data 75 %" in capsys.readouterr().out
    assert main(["doctor", f"--run={tmp_path}"]) == 2
    assert "run.json" in capsys.readouterr().err
