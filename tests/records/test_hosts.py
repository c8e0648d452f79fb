"""Hosts as people write them down."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.records.errors import BadInputError
from outpace.records.hosts import Host, parse_hosts, read_hosts

NAMES = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}", fullmatch=True)


@given(st.dictionaries(NAMES, st.integers(1, 99), min_size=1, max_size=5))
def test_what_is_written_is_read(hosts: dict[str, int]) -> None:
    text = ",".join(f"{name}:{slots}" for name, slots in hosts.items())
    assert [(one.name, one.slots) for one in parse_hosts(text)] == list(hosts.items())


def test_files_are_as_open_mpi_and_horovod_have_them(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode-a slots=4\n\nme@node-b   slots = 2 max_slots=8 # new\nnode-c\n")
    assert read_hosts(path) == (
        Host(name="node-a", slots=4), Host(name="me@node-b", slots=2), Host(name="node-c", slots=1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=4\n-x slots=1", "line 2: '-x' is not the name of a host"),
        ("a b c", "line 1: 'a b c' is not 'HOST slots=4'"),
        ("a slots=many", "'many' is not a number of ranks"),
        ("a\na", "names a twice"),
        ("# nothing", "names no host"),
    ],
)
def test_what_a_file_cannot_say_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(BadInputError, match=said):
        read_hosts(path)


def test_a_mark_of_the_byte_order_is_no_part_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\r\n\r\nb slots=2\r\n", encoding="utf-8-sig")
    assert read_hosts(path) == (Host(name="a", slots=2), Host(name="b", slots=2))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match="it is not text"):
        read_hosts(path)
