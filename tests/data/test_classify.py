"""GLUE's formats and others, to labelled samples."""

import gzip
import json

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from outpace.data import classify
from outpace.data.paraphrases import paraphrases
from outpace.data.row import Row
from outpace.data.row_files import read_rows
from outpace.data.rows import read_table, split_rows, splits_of
from outpace.data.tokenizer_training import train_tokenizer
from outpace.records.errors import BadInputError

MRPC = (
    "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    '1\t10\t20\tHe said, "No.\tHe refused.\n'
    '0\t11\t21\tIt rose.\t"It fell," he said.\n'
)
PAIRS = [("Paris?", "It is.", "entailment"), ("Rome?", "It rains.", "not_entailment")]


def examples(table, texts=None, label=None):
    columns = classify.columns_of(table, texts, label)
    classes = table.names.get(columns.label, ())
    (found,) = classify.examples_of([table.rows], columns, classes)
    return [one.texts for one in found], classify.label_names(found, classes), found


@pytest.mark.parametrize("name", ["t0.txt", "t0.md", "folder"])
def test_plain_text_is_no_table_with_its_first_line_as_header(tmp_path, name):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    text = path / "t0.txt" if name == "folder" else path
    text.write_text("\nbeside tea dog\nno tab here\n")
    with pytest.raises(BadInputError, match=r"t0\.\w+ is plain text, .*\.jsonl.*--task pretrain"):
        read_table(str(path))
    with pytest.raises(BadInputError, match="is plain text"):
        next(read_rows(text))
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
    with pytest.raises(
        BadInputError, match=r"x\.jsonl\.gz is compressed with gzip, not text\. Unp"
    ):
        read_table(str(tmp_path / "x.jsonl.gz"))


def test_mrpc_is_read_without_quoting(tmp_path):
    for name in ("msr_paraphrase_train", "msr_paraphrase_test"):
        (tmp_path / f"{name}.txt").write_text(MRPC, encoding="utf-8")
    train, validation = splits_of([str(tmp_path)])
    assert (train[0][-9:], validation[0][-8:]) == ("train.txt", "test.txt")
    texts, labels, found = examples(read_table(train[0]))
    assert texts == [('He said, "No.', "He refused."), ("It rose.", '"It fell," he said.')]
    assert (labels, [one.label for one in found]) == (("0", "1"), ["1", "0"])


@pytest.mark.parametrize("name", ["val", "dev", "validation", "eval"])
def test_a_folder_has_its_own_file_to_validate_with(tmp_path, name):
    for one in ("train", name):
        (tmp_path / f"{one}.jsonl").write_text('{"text": "a", "label": "b"}\n')
    train, validation = splits_of([str(tmp_path)])
    assert (train, validation) == (
        (str(tmp_path / "train.jsonl"),), (str(tmp_path / f"{name}.jsonl"),)
    )  # fmt: skip


def test_tables_of_glue(tmp_path):
    sst, cola, qnli = (tmp_path / f"{name}.tsv" for name in ("sst", "cola", "qnli"))
    sst.write_text("sentence\tlabel\nit's bad\t0\nit's good\t1\n")
    cola.write_text("gj04\t1\t\tShe left.\ngj04\t0\t*\tLeft she.\n")
    lines = [f"{n}\t{q}\t{s}\t{label}\n" for n, (q, s, label) in enumerate(PAIRS)]
    qnli.write_text("index\tquestion\tsentence\tlabel\n" + "".join(lines) + "3\tcut short\n")
    assert examples(read_table(str(sst)))[0] == [("it's bad",), ("it's good",)]
    assert examples(read_table(str(cola)))[0] == [("She left.",), ("Left she.",)]
    table = read_table(str(qnli))
    with qnli.open("a") as file:
        file.write("4\ta\tb\tentailment\ttoo many\n")
    with pytest.raises(BadInputError, match=r"line \d+ has 5 columns.*Replace tabs within a text"):
        read_table(str(qnli))
    assert examples(table)[:2] == ([p[:2] for p in PAIRS], ("entailment", "not_entailment"))
    assert table.left_out == (f"{qnli}, line {len(PAIRS) + 2}",)


def test_other_forms_of_rows(tmp_path):
    rows = [{"premise": a, "hypothesis": b, "label": c == "entailment"} for a, b, c in PAIRS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    (tmp_path / "d.csv").write_text('text,stars\n"a, b",one\nc,two\n')
    for name in ("a.jsonl", "b.json", "c.parquet"):
        texts, labels, _ = examples(read_table(str(tmp_path / name)))
        assert (texts, labels) == ([p[:2] for p in PAIRS], ("0", "1"))
    assert examples(read_table(str(tmp_path / "d.csv")), ("text",), "stars")[0][0] == ("a, b",)


def test_a_dataset_has_names_of_classes_and_a_validation_split(tmp_path):
    names = datasets.ClassLabel(names=["worse", "better"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    part = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    datasets.DatasetDict({"train": part, "validation": part}).save_to_disk(tmp_path / "saved")
    train, validation = splits_of([f"hf:{tmp_path / 'saved'}"])
    assert validation == (f"hf:{tmp_path / 'saved'}::validation",)
    _, labels, found = examples(read_table(train[0]))
    assert (labels, found[0].label) == (("worse", "better"), "better")


def test_a_label_in_the_names_of_folders_is_refused_with_the_folder(tmp_path):
    """As Spark writes partitions: the column is in no file."""
    for name in ("pos", "neg"):
        folder = tmp_path / f"label={name}"
        folder.mkdir()
        parquet.write_table(pyarrow.table({"text": ["a b", "b c"]}), folder / "part-0.parquet")
    said = r"in the names of folders \(label=neg\).* add 'label' to the files"
    with pytest.raises(BadInputError, match=said):
        examples(read_table(str(tmp_path)))


def test_a_blank_makes_no_other_class(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,neg\nb, pos\nc,pos \nd,pos\n")
    assert examples(read_table(str(tmp_path / "a.csv")))[1] == ("neg", "pos")
    (tmp_path / "a.csv").write_text("text,label\na,neg\nb, \n")
    with pytest.raises(BadInputError, match="line 3 has no label"):
        examples(read_table(str(tmp_path / "a.csv")))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_table_without_a_header_is_told_so(tmp_path, name):
    rows = [{"fine": "bad", "pos": "neg"}] * 2
    lines = ["fine,pos", "bad,neg"] if name.endswith("csv") else map(json.dumps, rows)
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    with pytest.raises(BadInputError, match="no known column of text") as caught:
        examples(read_table(str(tmp_path / name)))
    assert ("write a header" in str(caught.value)) is name.endswith("csv")


def test_minus_one_and_one_are_two_classes_in_this_order(tmp_path):
    rows = "".join(f"word {number},{label}\n" for number, label in enumerate([1, -1] * 4))
    (tmp_path / "a.csv").write_text(f"text,label\n{rows}")
    lines = [{"text": "a", "label": label} for label in (1, -1, -1.0, 1)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("a.csv", "a.jsonl"):
        _, labels, found = examples(read_table(str(tmp_path / name)))
        assert labels == ("-1", "1") and [one.label for one in found[:2]] == ["1", "-1"]
    (tmp_path / "b.csv").write_text(f"text,label\n{rows}more,0\n")
    with pytest.raises(BadInputError, match="if -1 is one of the classes"):
        examples(read_table(str(tmp_path / "b.csv")))


def test_minus_one_is_a_class_in_a_part_that_has_no_other(tmp_path):
    parts = [[Row({"text": "a", "label": label}, "row 1") for label in part]
             for part in ((1, -1, 1), (-1, -1), (1,))]  # fmt: skip
    columns = classify.TextColumns(("text",), "label")
    found = classify.examples_of(parts, columns)
    assert [[one.label for one in part] for part in found] == [["1", "-1", "1"], ["-1"] * 2, ["1"]]
    stored = classify.examples_of(parts[1:2], columns, known=("-1", "1"))
    assert [one.label for one in stored[0]] == ["-1", "-1"]
    with pytest.raises(BadInputError, match="has no label"):
        classify.examples_of(parts[1:2], columns, known=("0", "1"))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("input_ids\tlabel\n1 2\t1\n", "already tokenised"),
        ("text\tmark\na\t1\n", "no known column of label"),
        ("words\tlabel\na\t1\n", "no known column of text"),
        ("text\tlabel\na\t-1\n", "has no label"),
        ("text\tlabel\na\t1\nb\t1\n", "nothing to distinguish"),
        ("text\tlabel\na\t1.5\nb\t2.25\nc\t3.1\n", "numbers on a scale"),
        ("text\tlabel\n", "has no rows"),
    ],
)
def test_what_cannot_be_learnt_is_refused(tmp_path, lines, said):
    (tmp_path / "a.tsv").write_text(lines)
    with pytest.raises(BadInputError, match=said):
        examples(read_table(str(tmp_path / "a.tsv")))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"text": "a", "labels": [27]}\n', r"line 1: the label \[27\] is not a class"),
        ("a.jsonl", '{"text": "a", "label": NaN}\n', "the label nan is not a class"),
        (
            "a.json",
            '{"data": [{"text": "a", "label": 1}]}',
            "has no known column .*Its 'data' is a list",
        ),
        ("a.json", '{"text": ["a", "b"], "label": [1, 0]}', "'text' is list, not .* of 2 rows"),
        ("a.jsonl", '{"text": "a", "label": 1, "label": 0}\n', "line 1: .* key 'label' twice"),
        ("a.csv", "text,label,label\na,1,0\n", "line 1: the header has the column 'label' twice"),
        ("a.csv", 'text,label\na,1\n"text",label\nb,0\n', "line 3 repeats the header, .*: awk 'NR"),
        ("a.tsv", "text\tlabel\na\t1\ntext\tlabel\n", "line 3 repeats the header"),
        ("a.csv", 'text,label\na,1\n"' + "b" * 200_000, "line 3: unexpected end of data. Is a"),
    ],
)
def test_rows_that_are_no_examples_are_named(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInputError, match=said):
        examples(read_table(str(tmp_path / name)))


def test_a_csvs_rows_end_where_lines_do_and_nowhere_else(tmp_path):
    text = 'text,label\n"two\nlines",1\n\nfoo\u2028bar,0\n,\n'
    (tmp_path / "a.csv").write_text(text, newline="")
    table = read_table(str(tmp_path / "a.csv"))
    assert [row.values["text"] for row in table.rows[:2]] == ["two\nlines", "foo\u2028bar"]
    assert [row.where.rpartition(" ")[2] for row in table.rows] == ["3", "5", "6"]


@pytest.mark.parametrize("encoder", [True, False])
def test_pairs_have_segments_and_the_longer_text_is_cut(encoder):
    learnt = train_tokenizer(["one two three four five six"] * 3, 300, masked=encoder)
    tokenizer = classify.with_pairs(learnt, encoder)
    data = [classify.Example(("one two three four five six " * 4, "one"), "x")]
    whole = classify.encode(tokenizer, data, ("w", "x"), 40, encoder)
    short = classify.encode(tokenizer, data, ("w", "x"), 10, encoder)
    a, b = (learnt.encode(text) for text in data[0].texts)
    ids = whole.samples.values["tokens"].tolist()
    cls, sep, eos = learnt.cls_id, learnt.sep_id, learnt.eos_id
    assert ids == ([cls, *a, sep, *b, sep] if encoder else [*a, eos, *b])
    if encoder:
        segments = whole.samples.values["segments"].tolist()
        assert segments == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    assert (whole.cut, short.cut, short.samples.lengths[0]) == (0, 1, 10)
    assert short.samples.values["tokens"][-len(b) - encoder :].tolist() == ids[-len(b) - encoder :]
    assert whole.samples.labels.tolist() == [1]


def test_rows_held_out_depend_on_their_contents_only():
    rows = list(paraphrases("train"))[:400]
    train, validation = split_rows(rows, 0.1)
    again = split_rows(rows[::-1], 0.1)
    assert 20 <= len(validation) <= 80 and len(train) + len(validation) == 400
    assert {r.where for r in again[1]} == {r.where for r in validation}
    assert [len(part) for part in split_rows(rows[:3], 0.1)] == [2, 1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"text": {"0": "a", "1": "b"}, "label": {"0": "x", "1": "y"}}, "columns of 2 rows"),
        ({"text": ["a", "b"], "label": ["x", "y"]}, "columns of 2 rows"),
        ({"0": {"text": "a"}, "1": {"text": "b"}}, "2 whole rows"),
        ({"columns": ["text"], "data": [["a"], ["b"], ["c"]]}, "3 whole rows"),
        ({"data": [{"text": "a"}, {"text": "b"}]}, "'data' is a list of 2 objects"),
        ({"text": "a", "label": "x"}, r"--eval-data\.$"),
    ],
)
def test_one_row_that_holds_all_rows_is_told(values, said):
    with pytest.raises(BadInputError, match=f"1 row cannot be divided.*{said}"):
        split_rows([Row(values, "x.json")], 0.1)


def test_generated_pairs_are_always_the_same_and_of_mrpcs_shares():
    pairs = [row.values for row in paraphrases("train")]
    assert pairs == [row.values for row in paraphrases("train")]
    assert 0.64 < sum(pair["label"] for pair in pairs) / len(pairs) < 0.7


KNOWN = ("neg", "neu", "pos")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["pos", "neg"], ["pos", "neg"]),
        (["2", "0", "1"], ["pos", "neg", "neu"]),
        (["1", "2"], ["neu", "pos"]),
        (["LABEL_2", "LABEL_0"], ["pos", "neg"]),
        (["POS", "Neg"], ["pos", "neg"]),
        (["1", "2", "3"], None),
        (["aa", "mm", "zz"], None),
        (["neg", "0"], None),
    ],
)
def test_labels_of_a_stored_classifier(given, meant):
    parts = [[classify.Example(("a",), label) for label in given]] * 2
    found = classify.with_stored_names(parts, KNOWN)
    if meant is None:
        assert found is None
    else:
        assert [[one.label for one in part] for part in found] == [meant] * 2


@pytest.mark.parametrize("wanted", [None, "label"])
def test_a_first_row_without_what_later_ones_have_is_named(tmp_path, wanted):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b", "label": 1}\n')
    with pytest.raises(BadInputError, match=r"line 1 has no 'label', which .*line 2 has"):
        classify.columns_of(read_table(str(path)), None, wanted)


@pytest.mark.parametrize("column", ["text", "label"])
def test_half_a_surrogate_is_refused_with_its_place(tmp_path, column):
    row = {"text": "a", "label": "x", column: "bad \ud800"}
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(BadInputError, match=rf"line 1: '{column}' has half of a surrogate pair"):
        table = read_table(str(tmp_path / "x.jsonl"))
        classify.examples_of([table.rows], classify.columns_of(table, None, None))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["0", "1", "0.0", "1.0"], "labels '0' and '0.0'; '1' and '1.0' differ only in"),
        ([True, False, "true", "false"], "labels '0' and 'false'; '1' and 'true' differ only in"),
        (["a", "b", 0, 1], "some labels are numbers (such as '0') and others names (such as 'a')"),
        (["a", "b", "c1", "2nd"], None),
        (["pos", "po\u200bs", "neg"], r"labels 'pos' and 'po\u200bs' differ only in"),
        (
            ["0.5", "1.0", "2"],
            "labels such as '0.5' are numbers with a fraction, and are",
        ),
        ([0, 1, 2.0, "3"], None),
        ([9007199254740990, 9007199254740991, 90071992547409990, 90071992547409991], None),
        (["90071992547409990", "90071992547409991", "-0", "9" * 5000], None),
        (["90071992547409991", "90071992547409991.0", "1"], "labels '90071992547409991' and"),
    ],
)
def test_labels_that_are_written_in_two_ways_are_said(tmp_path, labels, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"text": "a", "label": label}) + "\n" for label in labels * 3)
    )
    table = read_table(str(path))
    columns = classify.columns_of(table, None, None)
    told = "".join(classify.examples_hints(classify.examples_of([table.rows], columns)))
    assert told.startswith(said or "") and bool(told) == (said is not None)


@pytest.mark.parametrize("side", ["right", "left"])
def test_long_texts_are_cut_on_the_tokenizers_side(side):
    """As transformers cuts them when the exported model is used."""
    plain = train_tokenizer(["a b c d e f"] * 3, 300)
    tokenizer = plain.replace(plain.inner, {"truncation_side": side})
    text = "a b c d e f"
    whole = tokenizer.encode(text)
    found = classify.encode(tokenizer, [classify.Example((text,), "x")], ["x"], 4, False)
    kept = found.samples.values["tokens"].tolist()
    assert found.cut == 1 and kept == (whole[:4] if side == "right" else whole[-4:])


@pytest.mark.parametrize("format", ["torch", "numpy", "pandas", "arrow"])
def test_a_dataset_is_read_whatever_its_saved_format(tmp_path, format):
    """`save_to_disk` keeps the format and the columns that `set_format` chose."""
    rows = {"text": [f"a {n}" for n in range(9)], "label": [n % 2 for n in range(9)]}
    whole = datasets.Dataset.from_dict(rows)
    whole.with_format(format, columns=["label"]).save_to_disk(tmp_path / "saved")
    table = read_table(str(tmp_path / "saved"))
    assert [row.values for row in table.rows] == [*whole]
    assert examples(table)[1] == ("0", "1")


@pytest.mark.parametrize("kind", [datasets.Image, datasets.Audio])
def test_media_beside_texts_are_not_decoded(tmp_path, kind):
    """Decoding takes libraries and time, and fails where a file is broken."""
    stored = {"path": None, "bytes": b"broken"}
    rows = {"text": ["a", "b"], "label": [0, 1], "one": [stored] * 2, "some": [[stored]] * 2}
    whole = datasets.Dataset.from_dict(rows)
    typed = {**whole.features, "one": kind(), "some": datasets.List(kind())}
    whole.cast(datasets.Features(typed)).save_to_disk(tmp_path / "saved")
    table = read_table(str(tmp_path / "saved"))
    assert examples(table)[0] == [("a",), ("b",)]
    assert table.rows[0].values["one"]["bytes"] == b"broken"


def test_a_saved_dataset_without_splits_is_not_validated_with_itself(tmp_path):
    """It was opened as its own split `validation`, too."""
    rows = {"text": [f"a {n}" for n in range(9)], "label": [n % 2 for n in range(9)]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "flat")
    for reference in (f"hf:{tmp_path / 'flat'}", str(tmp_path / "flat")):
        assert splits_of([reference])[1] is None
    with pytest.raises(BadInputError, match="has no splits, so no 'validation'"):
        read_table(f"hf:{tmp_path / 'flat'}::validation")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "a.csv",
            "text;label\nhello;1\n",
            r"by semicolons.*write it with commas",
        ),
        ("a.csv", "text|label\nhello|1\n", r"separated by vertical bars, but commas are expected"),
        ("a.csv", "text\tlabel\nhello\t1\n", r"separated by tabs.*name it \.tsv"),
        ("a.tsv", "text,label\nhello,1\n", r"separated by commas.*name it \.csv"),
        ("a.tsv", "text;label\nhello;1\n", r"separated by semicolons.*write it with tabs"),
        ("a.csv", "text,label\rhello,1\rho,0\r", r"carriage returns only.*tr '.r' '.n'"),
        ("a.tsv", "text\tlabel\rhello\t1\rho\t0", r"carriage returns only"),
        ("a.jsonl", '{"text":"a","label":1}\r{"text":"b","label":0}\r', r"carriage returns only"),
        ("a.csv", "text,label\na,b,c\nd,e,f\n", r"line 2 has 3 columns, but the header has 2"),
        ("a.csv", "text,label\na,b\nc,d,e\n", r"line 3 has 3 columns.*commas in quotation marks"),
        ("a.csv", "text,label\na,b\nc\nd,e\n", r"line 3 has 1 columns.*or remove it"),
    ],
)
def test_a_table_that_is_divided_in_another_way_says_how(tmp_path, name, content, told):
    (tmp_path / name).write_text(content, newline="")
    with pytest.raises(BadInputError, match=told):
        read_table(str(tmp_path / name))


def test_a_quoted_cell_may_hold_carriage_returns_and_one_column_blanks(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\r\n"a\rb",1\r\n', newline="")
    assert read_table(str(tmp_path / "a.csv")).rows[0].values["text"] == "a\rb"
    (tmp_path / "b.csv").write_text("text\nfirst; second\n")
    assert len(read_table(str(tmp_path / "b.csv")).rows) == 1
    (tmp_path / "c.jsonl").write_text('{"text": "a",\r"label": 1}\r', newline="")
    assert len(read_table(str(tmp_path / "c.jsonl")).rows) == 1
