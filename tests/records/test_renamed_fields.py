"""Fields that were renamed keep their keys in files, and files that have these are read."""

import json
from typing import Any

import pytest

from outpace.records.base import Record
from outpace.records.certificate import ParityVerdict
from outpace.records.hang_report import RankSnapshot
from outpace.records.measurement import Measurement
from outpace.records.network import Need, NetworkReport

EVENT = {"group": "0", "number": 3, "name": "all_reduce", "state": "started"}
SNAPSHOT = {"rank": 1, "host": "a", "pid": 7, "state": "waits", "place": "?", "exchanges": [EVENT]}
VERDICT = {
    "strategy": "ddp", "mesh": "dp_replicate 2", "precision": "fp64", "passed": True,
    "worst_relative_difference": 1e-12, "worst_tensor": "head.weight", "tolerance": 1e-9,
    "bytes_on_wire": 8, "bytes_formula": None, "exchanges": {"all_reduce": 2},
    "exchanges_formula": {"all_reduce": 2}, "bytes_by_kind": {}, "bytes_by_kind_formula": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "renamed"),
    [
        (RankSnapshot, SNAPSHOT, {"collectives": "exchanges"}),
        (
            ParityVerdict,
            VERDICT,
            {"collectives": "exchanges", "collectives_formula": "exchanges_formula"},
        ),
    ],
)
def test_a_file_of_old_names_is_read_and_written_again(
    kind: type[Record], values: dict[str, Any], renamed: dict[str, str]
) -> None:
    record = kind.parse(values, "a file")
    written = json.loads(record.as_file())
    for name, key in renamed.items():
        assert record.model_dump(mode="json", by_alias=False)[name] == values[key]
        assert written[key] == values[key] and name not in written
    assert kind.parse(written, "a file") == record
    by_name = {renamed_key(renamed, key): value for key, value in values.items()}
    assert kind.parse(by_name, "a file") == record


def renamed_key(renamed: dict[str, str], key: str) -> str:
    return next((name for name, old in renamed.items() if old == key), key)


@pytest.mark.parametrize(
    ("kind", "name", "key"),
    [
        (Measurement, "step_time_check", "promise"),
        (Need, "traffic", "exchanged"),
        (Need, "present_cost", "own"),
        (Need, "present_device_cost", "own_inside"),
        (NetworkReport, "present", "own"),
    ],
)
def test_keys_of_files_stay(kind: type[Record], name: str, key: str) -> None:
    assert kind.model_fields[name].alias == key and key not in kind.model_fields
