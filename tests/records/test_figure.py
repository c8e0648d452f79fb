"""Figures of machines are finite and possible."""

import json
import math
from pathlib import Path

import pytest

from outpace.cli.main import main
from outpace.records.errors import BadInputError
from outpace.records.figure import Figure, Key, Unit
from outpace.records.machine import Machine
from outpace.records.probe_results import ProbeRecord


def figure(value: float, unit: Unit = "FLOP/s") -> dict[str, object]:
    key = Key(kind="matmul", what="curve", of={"dtype": "fp32", "m": 64, "n": 64, "k": 64})
    return {"key": key.model_dump(), "unit": unit, "value": value, "origin": "measured"}


@pytest.mark.parametrize(
    ("value", "unit"),
    [
        (math.nan, "FLOP/s"), (math.inf, "FLOP/s"), (-1.0, "FLOP/s"), (0.0, "FLOP/s"),
        (5e-324, "FLOP/s"), (1e308, "FLOP/s"), (0.0, "B/s"), (1e308, "B/s"), (-1e-6, "s"),
        (math.nan, "s"), (0.0, "tokens/s"), (math.inf, "ratio"),
    ],
)  # fmt: skip
def test_what_no_machine_has_is_refused(value: float, unit: Unit) -> None:
    with pytest.raises(BadInputError, match=r"finite number|is not possible"):
        Figure.parse(figure(value, unit), "machine.json")


@pytest.mark.parametrize(
    ("value", "unit"),
    [(2e15, "FLOP/s"), (3.35e12, "B/s"), (0.0, "s"), (1e-6, "s"), (-0.2, "ratio")],
)
def test_what_machines_have_is_taken(value: float, unit: Unit) -> None:
    assert Figure.parse(figure(value, unit), "machine.json").value == value


@pytest.mark.parametrize("command", ["plan", "estimate", "report"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 5e-324])
def test_a_machine_file_of_such_figures_is_refused_by_name(
    command: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = ProbeRecord(
        date="", versions={}, command="", sections=("matmul",), quick=True, took_s=1.0
    )
    machine = Machine(host_cores=2, host_memory_bytes=2**30, cpu="a CPU", probed=probed)
    path, plan = tmp_path / "machine.json", tmp_path / "plan.json"
    document = machine.model_dump(mode="json")
    document["probed"]["figures"] = [figure(value)]
    path.write_text(json.dumps(document))
    assert main(["plan", "--model=gpt2", "--machine=hgx-h100", f"--out={plan}"]) == 0
    words = ["report", str(path)] if command == "report" else [
        command, "--model=gpt2", f"--machine={path}",
        *([f"--plan={plan}"] if command == "estimate" else []),
    ]  # fmt: skip
    capsys.readouterr()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{path}: probed.figures.0" in said and "Traceback" not in said
