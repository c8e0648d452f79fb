import csv
import json
import subprocess

import pyarrow
import pytest
from pyarrow import parquet

from outpace.data.rows import read_table
from outpace.records.errors import BadInputError
from tests.data.text_files import A, B, C, tokens, write_lines


def test_json_lines(tmp_path, prepare, ids_of):
    path = write_lines(tmp_path / "x.jsonl", {"text": A}, {"text": ""}, {"text": B, "n": 1})
    path.write_text(path.read_text() + "\n\n")
    assert tokens(prepare(path)) == [ids_of(A, B)]
    path = write_lines(tmp_path / "y.jsonl", {"body": C})
    assert tokens(prepare(path, text_field="body")) == [ids_of(C)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{oh no", r"x\.jsonl, line 2 is not JSON"),
        ('{"input_ids": [1]}', r"line 2 has no field 'text', but 'input_ids': .*already tokenised"),
        ('{"chosen": "x", "rejected": "y"}', r"line 2 has no field 'text', .*: .*DPO"),
        ('{"body": "x"}', r"line 2 has no field 'text', but 'body'\. Records before it have it"),
        ('["text"]', r"line 2 holds a list; each line must be an object"),
        ("[" * 5000 + "]" * 5000, r"line 2 is not JSON: it is nested too deeply\. Each line"),
        ('{"n": ' + "9" * 5000 + "}", r"line 2 is not JSON: it has a number with more than 4,300 "),
        ('{"text": 3}', r"line 2: 'text' is int, not text"),
        ('{"text": null}', r"line 2: 'text' is null, not text"),
        ('{"text": "ab\\ud800"}', r"line 2: 'text' has half of a surrogate pair.* at character 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path, prepare, line, said):
    path = write_lines(tmp_path / "x.jsonl", {"text": A})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(BadInputError, match=said):
        prepare(path)
    left = [p for p in (tmp_path / "cache" / "tokens").iterdir() if p.suffix != ".lock"]
    assert left == []


def test_parquet(tmp_path, prepare, ids_of):
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": [A, B] * 700, "n": [1, 2] * 700}), path)
    assert tokens(prepare(path)) == [ids_of(*[A, B] * 700)]
    with pytest.raises(BadInputError, match=r"no column 'body', but 'text', 'n'"):
        prepare(path, text_field="body")
    with pytest.raises(BadInputError, match=r"row 1: 'n' is int, not text"):
        prepare(path, text_field="n")
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(BadInputError, match="not a readable Parquet file"):
        prepare(path)


def test_json_lines_in_another_encoding(tmp_path, prepare):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(BadInputError, match="line 2 is not UTF-8 text: byte 0xe9 at its offset 10"):
        prepare(path)


ROWS = [{"text": A, "n": 1}, {"text": B, "n": 2}, {"text": 'quoted "x", y\nz', "n": 3}]


def write_table(path, delimiter, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("name", ["UP.JSONL", "a.ndjson", "lines.json", "a.Json"])
def test_json_is_rows_under_each_of_its_suffixes(tmp_path, prepare, ids_of, name):
    path = write_lines(tmp_path / name, *ROWS)
    assert tokens(prepare(path)) == [ids_of(*(row["text"] for row in ROWS))]


@pytest.mark.parametrize("name", ["list.json", "list.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_list_is_rows_whatever_it_is_called(tmp_path, prepare, ids_of, name, indent, mark):
    (tmp_path / name).write_text(mark + json.dumps(ROWS, indent=indent), encoding="utf-8")
    assert tokens(prepare(tmp_path / name)) == [ids_of(*(row["text"] for row in ROWS))]


@pytest.mark.parametrize("name", ["rows.txt", "rows", "rows.jsonl.bak"])
@pytest.mark.parametrize("listed", [False, True])
def test_rows_under_the_name_of_a_text_are_refused(tmp_path, prepare, ids_of, name, listed):
    path = write_lines(tmp_path / name, *ROWS)
    if listed:
        path.write_text(json.dumps(ROWS))
    with pytest.raises(
        BadInputError, match=r"contains JSON \(an object per line.* Rename it to \.jsonl"
    ):
        prepare(path)
    path.write_text("{\n  int a;\n}\n{ b }\n")
    assert tokens(prepare(path)) == [ids_of(path.read_text())]


def test_a_long_list_is_read_a_record_at_a_time(tmp_path, prepare, ids_of):
    texts = [f"orchard {n} \u00e9 " * 3000 for n in range(80)]  # over 4 MB: several blocks
    (tmp_path / "x.json").write_text(json.dumps([{"text": text} for text in texts]))
    assert tokens(prepare(tmp_path / "x.json")) == [ids_of(*texts)]


def test_an_object_in_a_file_of_its_own_is_a_row(tmp_path, prepare, ids_of):
    (tmp_path / "of").mkdir()
    for name, text in (("1.json", A), ("2.json", B)):
        (tmp_path / "of" / name).write_text(json.dumps({"text": text}, indent=1))
    assert tokens(prepare(tmp_path / "of" / "1.json")) == [ids_of(A)]
    assert tokens(prepare(tmp_path / "of")) == [ids_of(A, B)]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.json", '[{"text": "a"}, {"text": "b" "c"}]', r"item 2, line 1, is not JSON: .*column"),
        ("x.jsonl", '[\n{"text": "a"}\n{"text": "b"}]', r"item 2 .*a comma .* line 3, not '{'"),
        ("x.json", '[{"text": "a"},', r"item 2, line 1, is not JSON"),
        ("x.json", '[{"text": "a"}]\n\n[{"text": "b"}]', r"x\.json, line 3: .* the list \('\['\)"),
        (
            "x.jsonl",
            '[{"text": "a"}] {"text": "b"}',
            r"line 1: there is more text after .* \('{'\), as in",
        ),
        ("x.json", '[{"text": "a"}]]', r"more text after the end of the list \('\]'\)"),
        ("x.json", '[{"text": "a"},\n{"text": "b"\n', r"line 2, is not JSON: .* at column 13"),
        (
            "x.json",
            f'[{{"text": "{"a" * (1 << 20)}"}}, {{"text": "b" 1}}]',
            r"item 2, line 1, is not JSON: .* at column 1048605$",
        ),
        ("x.jsonl", '{"text": "a"}\n{"text": "b"\n', r"line 2 is not JSON: .* at column 13"),
        ("x.jsonl", '{"text": "a"}\n{"text": "b\r\n', r"line 2 .*: Unterminated .* column 10"),
        ("x.json", '[{"text": "a"}, "b"]', r"item 2, line 1, is a str; each must be an object"),
        ("x.jsonl", '{"text": "a\tb"}\n', r"line 1 is not JSON: Invalid control character at col"),
        (
            "x.jsonl",
            '{"text": "a"}\n{"text": "b',
            r"line 2 is not JSON: Unterminated string at c",
        ),
        ("x.csv", 'text,n\n"a,1\nb,2\n', r"x\.csv, line 3: unexpected end of data"),
        ("x.csv", "text,n\na,1\nb\n", r"x\.csv, line 3 has 1 columns, but the header has 2: 'te"),
        ("x.tsv", "body\tn\na\t1\n", r"x\.tsv, line 2 has no field 'text', but 'body', 'n'"),
        ("x.csv", b"text\n\xff\n", r"x\.csv is not UTF-8 text: byte 0xff at offset 5"),
    ],
)
def test_rows_that_cannot_be_read_are_told_with_their_place(tmp_path, prepare, name, content, said):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInputError, match=said):
        prepare(path)


@pytest.mark.parametrize(("name", "delimiter"), [("t.csv", ","), ("T.CSV", ","), ("t.tsv", "\t")])
def test_tables_are_rows(tmp_path, prepare, ids_of, name, delimiter):
    rows = ROWS if delimiter == "," else [{"text": "one word", "n": 1}, {"text": 'a "b"', "n": 2}]
    if delimiter == ",":
        write_table(tmp_path / name, delimiter, rows)
    else:
        (tmp_path / name).write_text(
            "text\tn\n" + "".join(f"{r['text']}\t{r['n']}\n" for r in rows)
        )
    assert tokens(prepare(tmp_path / name)) == [ids_of(*(row["text"] for row in rows))]


def test_cells_between_tabs_are_quoted_where_all_of_them_say_so(tmp_path, prepare, ids_of):
    rows = [{"text": 'he said "no"', "n": 1}, {"text": "plain", "n": 2}]
    write_table(tmp_path / "x.tsv", "\t", rows)
    assert '""no""' in (tmp_path / "x.tsv").read_text()
    assert tokens(prepare(tmp_path / "x.tsv")) == [ids_of('he said "no"', "plain")]
    for glue in (
        ['"" is doubled, he said', '"No," he said.', '"yes"'],
        ['"I came.', 'He left."', '"a" b'],
    ):
        (tmp_path / "y.tsv").write_text("text\n" + "\n".join(glue) + "\n")
        assert tokens(prepare(tmp_path / "y.tsv")) == [ids_of(*glue)]


@pytest.mark.parametrize("text", ["two\nlines", 'a\n\n"b"\tc', "a\tb", "a\r\nb", "plain", ""])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("columns", [["text"], ["n", "text"]])
def test_cells_between_tabs_hold_what_was_written(tmp_path, text, quoting, columns):
    """One column with line breaks alone could be texts of one line each, too."""
    with (tmp_path / "x.tsv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", quoting=quoting)
        writer.writerows([columns, *([text] * len(columns) for _ in range(2))])
    if columns == ["text"] and quoting == csv.QUOTE_MINIMAL and text in ("two\nlines", "a\r\nb"):
        with pytest.raises(BadInputError, match=r"x.tsv, line 2: .* one text or several\. Write"):
            read_table(str(tmp_path / "x.tsv"))
    else:
        rows = read_table(str(tmp_path / "x.tsv")).rows
        assert [row.values for row in rows] == [dict.fromkeys(columns, text)] * 2


def test_a_cell_may_be_long(tmp_path, prepare, ids_of):
    text = "many words " * 40_000
    write_table(tmp_path / "x.csv", ",", [{"text": text}])
    assert tokens(prepare(tmp_path / "x.csv")) == [ids_of(text)]


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("key", ["data", "rows", "train", "examples", "it's"])
def test_rows_within_an_object_are_named_with_a_command_that_takes_them_out(
    tmp_path, prepare, ids_of, name, indent, key
):
    path = tmp_path / name
    path.write_text(json.dumps({"version": 1, key: [{"text": A}, {"text": B}]}, indent=indent))
    with pytest.raises(BadInputError, match="is a list of 2 objects: if these are the rows") as no:
        prepare(path)
    command = str(no.value).partition("write them with ")[2]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert tokens(prepare(tmp_path / "rows.jsonl")) == [ids_of(A, B)]
    if key == "data":
        with pytest.raises(BadInputError, match=r"'data' is list, not text\. Its 'data' is a list"):
            prepare(path, text_field="data")


@pytest.mark.parametrize(
    "values",
    [
        {"0": {"text": A, "n": 1}, "1": {"text": B, "n": 2}},
        {"columns": ["text", "n"], "index": [0, 1], "data": [[A, 1], [B, 2]]},
    ],
)
def test_a_file_of_whole_rows_in_another_orientation_is_named(tmp_path, prepare, values):
    """As pandas writes with orient='index' and orient='split'."""
    (tmp_path / "x.json").write_text(json.dumps(values))
    with pytest.raises(BadInputError, match=r"has no field 'text'.* values are 2 whole rows"):
        prepare(tmp_path / "x.json")


@pytest.mark.parametrize("values", [{"text": [A, B], "n": [1, 2]}, {"text": {"0": A, "1": B}}])
def test_a_file_of_columns_is_named(tmp_path, prepare, values):
    (tmp_path / "x.json").write_text(json.dumps(values))
    with pytest.raises(BadInputError, match="values are columns of 2 rows: write one object per"):
        prepare(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "x.jsonl",
            '{"text": "a"}\n{"text": "b", "text": "c"}\n',
            "line 2: an object has the key",
        ),
        ("x.json", '{"text": "b", "text": "c"}', "line 1: an object has the key 'text' twice"),
        ("x.json", '{\n"text": "b",\n"text": "c"\n}', "x.json: an object has the key 'text' twice"),
        (
            "x.json",
            '[{"text": "a"},\n{"text": "b", "text": "c"}]',
            "item 2, line 2: .* twice",
        ),
        ("x.jsonl", '{"text": "a", "m": {"k": 1, "k": 2, "k": 3}}', "the key 'k' 3 times"),
        ("x.csv", "text,n,text\na,1,b\n", "line 1: the header has the column 'text' twice"),
        ("x.tsv", "text\tn\ttext\na\t1\tb\n", "line 1: the header has the column 'text' twice"),
    ],
)
def test_a_name_that_stands_twice_is_refused(tmp_path, prepare, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInputError, match=said):
        prepare(tmp_path / name)


def test_two_columns_of_one_name_in_a_parquet_file_are_refused(tmp_path, prepare):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(BadInputError, match="the header has the column 'text' twice"):
        prepare(tmp_path / "x.parquet")
