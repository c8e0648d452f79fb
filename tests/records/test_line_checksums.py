"""Each line of a log carries a checksum, which is compared where it is read."""

import json
from pathlib import Path

import pytest

from outpace.records.base import Record
from outpace.records.line_checksums import (
    CHECKSUM,
    ChangedLineError,
    describe_changes,
    encode_line,
    strip_checksum,
)


class Row(Record):
    """A line."""

    step: int
    loss: float
    name: str = "é"


LINE = encode_line(Row(step=3, loss=0.125))


def test_a_line_is_read_as_it_was_written() -> None:
    assert LINE.endswith(b'"}\n') and json.loads(LINE)["step"] == 3
    assert Row.model_validate_json(strip_checksum(LINE)) == Row(step=3, loss=0.125)
    assert strip_checksum(b'{"step":3}\n') == b'{"step":3}'  # of before there were checksums


def test_every_bit_that_changes_a_value_is_noticed() -> None:
    for place in range(len(LINE) - 1):
        for bit in range(8):
            changed = bytearray(LINE)
            changed[place] ^= 1 << bit
            try:
                values = json.loads(strip_checksum(bytes(changed)))
            except ValueError:
                continue
            # A bit of the name of the checksum: a key that no record has.
            assert {name: values[name] for name in Row.model_fields} == dict(
                Row(step=3, loss=0.125)
            )
            assert set(values) - set(Row.model_fields), changed


def test_a_line_that_was_laid_out_anew_says_how_to_keep_it() -> None:
    with pytest.raises(ChangedLineError, match=CHECKSUM):
        strip_checksum(json.dumps(json.loads(LINE)).encode())


def test_changed_lines_are_counted_and_a_cut_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(LINE * 3 + LINE[:20])
    assert describe_changes(path) is None
    bad = LINE.replace(b"0.125", b"0.135")
    path.write_bytes(LINE + bad + LINE + bad)
    assert f"{path}, line 2 (and 1 more)," in (describe_changes(path) or "")
