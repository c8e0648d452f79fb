import json

import pytest

from outpace.data.sources import open_source
from outpace.data.text import pieces
from outpace.records.errors import BadInputError
from tests.data.text_files import A, B, tokens, write_lines


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.txt", None, "no such file or folder, and as a pattern it matches no file"),
        ("empty.txt", b"", "is empty"),
        ("lines.jsonl", b"\n", "holds no text"),
        ("bad.txt", b"abc\xff", "byte 0xff at offset 3"),
        ("cut.txt", "über €".encode()[:-1], "byte 0xe2 at offset 6"),
        ("far.txt", b"x" * (1 << 20) + b"\n\xc3(", f"byte 0xc3 at offset {(1 << 20) + 1}"),
        ("over.txt", b"y" * ((1 << 20) - 1) + b"\xc3(", f"byte 0xc3 at offset {(1 << 20) - 1}"),
        ("late.txt", b"ab\ncd\n" * 600_000 + b"\x80", "byte 0x80 at offset 3600000"),
    ],
)
def test_bad_text_is_told_with_its_place(tmp_path, prepare, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInputError, match=said):
        prepare(tmp_path / name)


def test_an_unreadable_file_is_told_as_itself(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("text")
    found = open_source(str(path))
    path.unlink()
    with pytest.raises(BadInputError, match=r"x\.txt cannot be read: No such file"):
        list(pieces(found, "text"))


def test_a_byte_order_mark_is_no_text(tmp_path, prepare, ids_of):
    (tmp_path / "x.txt").write_text(A + "\ufeff" + B, encoding="utf-8-sig")
    assert tokens(prepare(tmp_path / "x.txt")) == [ids_of(A + "\ufeff" + B)]


def test_a_file_that_grows_while_it_is_read_is_told(tmp_path, prepare):
    path = tmp_path / "x.txt"
    path.write_text(A)

    def grow(*_):
        with path.open("a") as stream:
            stream.write(B)

    with pytest.raises(BadInputError, match=r"x\.txt changed while it was being read"):
        prepare(path, progress=grow)
    assert [p for p in (tmp_path / "cache" / "tokens").iterdir() if p.suffix != ".lock"] == []


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("text", ["Plain english text. " * 9, "Обычный русский текст. " * 9])
@pytest.mark.parametrize("name", ["x.txt", "x.csv", "x.jsonl", "x.json"])
def test_text_of_two_bytes_a_character_is_refused(tmp_path, prepare, encoding, text, name):
    content = {"csv": f"text\n{text}\n", "json": json.dumps([{"text": text}])}
    content["jsonl"] = json.dumps({"text": text}) + "\n"
    found = content.get(name[2:], text)
    (tmp_path / name).write_bytes(found.encode(encoding))
    with pytest.raises(BadInputError, match=r"is not UTF-8 text|is not JSON"):
        prepare(tmp_path / name)


def test_a_null_in_a_text_is_one_of_it_and_said(tmp_path, prepare, ids_of):
    (tmp_path / "x.txt").write_text(A + "\0" + B)
    found = prepare(tmp_path / "x.txt")
    assert tokens(found) == [ids_of(A + "\0" + B)]
    assert [hint for hint in found.hints if "x.txt has 1 NUL characters" in hint]
    write_lines(tmp_path / "x.jsonl", {"text": A + "\0" + B})
    for _ in range(2):  # the second time from the cache
        assert "has 1 NUL characters" in prepare(tmp_path / "x.jsonl").hints[0]


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.csv", "x.json"])
def test_a_file_with_holes_is_refused_with_their_place(tmp_path, prepare, name):
    """As a disk leaves a file whose end it had not written when its power was cut."""
    rows = "".join(json.dumps({"text": f"{A} {n}"}) + "\n" for n in range(9))
    whole = {"x.jsonl": rows, "x.csv": "text\n", "x.json": json.dumps([{"text": A}])}
    head = whole.get(name, A * 60_000).encode()
    (tmp_path / name).write_bytes(head + bytes(1 << 19))
    with pytest.raises(BadInputError, match=r"NUL characters, the first at offset|, not '.x00'"):
        prepare(tmp_path / name)
    (tmp_path / name).write_bytes(bytes(1 << 19))
    with pytest.raises(
        BadInputError, match="NUL characters, the first at offset 0: it was probably truncated"
    ):
        prepare(tmp_path / name)


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        ("lines", "txt"),
        ("lines", "jsonl"),
        ("one line", "txt"),
        ("one line", "jsonl"),
        ("one word", "txt"),
        ("blank lines", "txt"),
    ],
)
def test_a_long_document_has_the_ids_of_the_whole(
    tmp_path, prepare, ids_of, library_texts, kind, suffix, monkeypatch
):
    monkeypatch.setattr("outpace.data.text.PIECE_BYTES", 1 << 17)  # 1 MiB as it is
    text = "\n".join(library_texts) + "é中\n" * 10
    text = {
        "lines": text,
        "one line": text.replace("\n", " "),
        "one word": "-".join(text.split()),
        "blank lines": text + "\n  \n" * 9,
    }[kind]
    text = text * (400_000 // len(text) + 1)
    path = tmp_path / f"long.{suffix}"
    if suffix == "txt":
        path.write_text(text, encoding="utf-8")
    else:
        write_lines(path, {"text": text})
    parts = list(pieces(open_source(str(path)), "text"))
    assert (len(parts) > 2) == (kind != "one word")
    assert "".join(part.text for part in parts) == text
    assert sum(part.consumed for part in parts) == path.stat().st_size
    assert tokens(prepare(path)) == [ids_of(text)]
