import numpy as np
import pytest

from outpace.data.repeated_files import files_in_both, repeated_files
from outpace.data.sources import open_source


@pytest.mark.parametrize("copy", ["symlink_to", "hardlink_to", "copied"])
def test_a_file_that_is_twice_in_a_folder_is_found(tmp_path, copy):
    """Its rows were learned twice; as two --data it was told."""
    rows = '{"text": "a"}\n'
    (tmp_path / "a.jsonl").write_text(rows)
    (tmp_path / "b.jsonl").write_text(rows.replace("a", "b"))
    assert repeated_files(open_source(str(tmp_path))) == []
    again = tmp_path / "b (1).jsonl"
    if copy == "copied":
        again.write_text((tmp_path / "b.jsonl").read_text())
    else:
        getattr(again, copy)(tmp_path / "b.jsonl")
    (found,) = repeated_files(open_source(str(tmp_path)))
    assert found in (again, tmp_path / "b.jsonl")
    for name in ("x.py", "y.py"):  # source trees repeat files
        (tmp_path / name).write_text("x = 1\n" * 99)
    assert repeated_files(open_source(str(tmp_path))) == []


def test_files_in_both_hold_the_same_from_begin_to_end(tmp_path):
    long = bytearray(b"a" * (3 << 16))
    contents = {"__init__.py": b"", "same.py": b"x = 1\n", "ends.py": bytes(long)}
    for name, content in contents.items():
        for folder in ("train", "held"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_bytes(content)
    held = tmp_path / "held"
    long[len(long) // 2] = ord("b")
    (held / "ends.py").write_bytes(bytes(long))
    train = open_source(str(tmp_path / "train"))
    assert files_in_both(train, open_source(str(held))) == [held / "same.py"]
    (held / "ends.py").write_bytes(contents["ends.py"])
    assert files_in_both(train, open_source(str(held))) == [held / "ends.py", held / "same.py"]


def test_an_index_beside_other_tokens_is_not_in_both(tmp_path):
    for folder, first in (("train", 1), ("held", 2)):
        (tmp_path / folder).mkdir()
        np.arange(first, first + 8, dtype="uint16").tofile(tmp_path / folder / "part.bin")
        (tmp_path / folder / "part.idx").write_bytes(b"MMIDIDX\0\0" + bytes(30))
    train, held = (open_source(str(tmp_path / folder)) for folder in ("train", "held"))
    assert files_in_both(train, held) == []
