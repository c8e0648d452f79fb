import json
import os
import re

import pytest

from outpace.data.sources import open_source
from outpace.records.errors import BadInputError
from tests.data.text_files import A, B, C, tokens, write_lines


def test_a_folder_is_its_files_in_order_without_hidden_ones(folder, prepare, ids_of):
    assert tokens(prepare(folder)) == [ids_of(A, B, C)]


def test_a_glob_and_a_file(folder, prepare, ids_of):
    assert tokens(prepare(folder / "*.txt")) == [ids_of(B)]
    assert tokens(prepare(f"{folder}/**/*.py")) == [ids_of(C)]
    assert tokens(prepare(folder / "a.md")) == [ids_of(A)]


def test_a_glob_has_a_file_once_where_links_lead_in_a_circle(folder, prepare, ids_of):
    (folder / "deep" / "up").symlink_to("..")
    assert tokens(prepare(f"{folder}/**/*.py")) == [ids_of(C)]
    (folder / "deep" / "again.py").symlink_to("er/c.py")  # not a circle: it was put there
    assert tokens(prepare(f"{folder}/**/*.py")) == [ids_of(C, C)]


def test_the_standard_library_is_text_by_file():
    files = open_source("stdlib").files
    names = {file.name for file in files}
    assert {"argparse.py", "typing.py"} <= names and len(files) > 300
    assert not any({"test", "site-packages"} & set(file.parts) for file in files)


def test_the_standard_library_is_no_table_of_characters():
    """What a small model learns of it is to look like Python: codecs' tables were a seventh."""
    table = re.compile(r"""^\s*(0x|\d|['"]\\|u'|\\[ux])""")
    files = open_source("stdlib").files
    assert not any("encodings" in file.parts for file in files)
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert sum(table.match(line) is not None for line in lines) < 0.01 * len(lines)


@pytest.mark.parametrize("reference", ["", "*"])
def test_files_beside_shards_are_not_read_and_named(tmp_path, prepare, ids_of, reference):
    write_lines(tmp_path / "train-0.jsonl", {"text": A})
    write_lines(tmp_path / "train-1.JSONL", {"text": B})
    write_lines(tmp_path / "val.jsonl", {"text": C})
    (tmp_path / "README.md").write_text("# The data\n" * 99)
    (tmp_path / "stats.json").write_text(json.dumps({"rows": 2}, indent=1))
    corpus = prepare(tmp_path / reference)
    assert tokens(corpus) == [ids_of(A, B)]
    (hint,) = corpus.hints
    assert all(name in hint for name in ("README.md", "stats.json", "val.jsonl")), hint


def test_folders_and_names_of_texts_say_splits(tmp_path, prepare, ids_of):
    for split, text in (("train", A), ("test", B), ("validation", C)):
        (tmp_path / "rows" / split).mkdir(parents=True)
        write_lines(tmp_path / "rows" / split / "0.jsonl", {"text": text})
        (tmp_path / "texts" / split / "pos").mkdir(parents=True)
        (tmp_path / "texts" / split / "pos" / "1.txt").write_text(text)
        (tmp_path / "names").mkdir(exist_ok=True)
        (tmp_path / "names" / f"wiki.{split}.tokens").write_text(text)
    for name in ("rows", "texts", "names"):
        corpus = prepare(tmp_path / name)
        assert tokens(corpus) == [ids_of(A)]
        assert "are left out" in corpus.hints[0]
    assert tokens(prepare(tmp_path / "rows" / "test")) == [ids_of(B)]
    (tmp_path / "rows" / "train").rename(tmp_path / "rows" / "part-0")  # as rows of no split
    corpus = prepare(tmp_path / "rows")
    assert tokens(corpus) == [ids_of(A)] and "are left out" in corpus.hints[0]
    assert tokens(prepare(tmp_path / "rows" / "*" / "*.jsonl")) == [ids_of(A)]
    (tmp_path / "texts" / "main.py").write_text(A)  # source code, of which tests are part
    assert len(tokens(prepare(tmp_path / "texts"))[0]) == len(ids_of(A, A, B, C))


def test_rows_beside_texts_are_not_read_and_named(folder, prepare, ids_of):
    write_lines(folder / "index.jsonl", {"n": 1})
    corpus = prepare(folder)
    assert tokens(corpus) == [ids_of(A, B, C)] and "index.jsonl" in corpus.hints[0]
    (folder / "z.json").write_text(C)  # as source code has some
    assert tokens(prepare(folder)) == [ids_of(A, B, C, C)]
    (folder / "z.json").write_text('{\n "name": "a program"\n}')
    assert not any("markup" in hint for hint in prepare(folder).hints)


def test_outputs_within_the_data_are_no_data_and_their_neighbours_are(folder, prepare, ids_of):
    key = "0f" * 16
    for name in ("tokenizers/bert/tokenizer.json", "tokens/mine/index.json"):
        (folder / "deep" / name).parent.mkdir(parents=True)
        (folder / "deep" / name).write_text("{}")
    (folder / "hashes").mkdir()
    (folder / "hashes" / "essay.md").write_text(A)
    read = [A, B, C, "{}", "{}", A]
    corpus = prepare(folder)
    assert tokens(corpus) == [ids_of(*read)] and not corpus.hints
    (folder / "cache" / "tokens" / key).mkdir(parents=True)
    (folder / "cache" / "tokens" / key / "index.json").write_text("{}")
    (folder / "cache" / "tokens" / f"{key}.lock").touch()
    (folder / "cache" / "specs").mkdir()
    (folder / "cache" / "specs" / f"{key}.json").write_text("{}")
    (folder / "cache" / "essay.txt").write_text(B)
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text('{"settings": {}, "origins": {}, "plan": {}}')
    corpus = prepare(folder)
    (hint,) = corpus.hints
    assert "cache/specs, cache/tokens, run are left out, because they are runs or caches" in hint
    assert tokens(corpus) == [ids_of(A, B, B, C, "{}", "{}", A)]
    (folder / "cache" / "essay.txt").unlink()
    with pytest.raises(BadInputError, match="contains only runs or a cache"):
        prepare(folder / "cache")


def test_a_named_pipe_for_a_run_is_not_waited_for(folder, prepare, ids_of):
    os.mkfifo(folder / "deep" / "run.json")
    assert tokens(prepare(folder)) == [ids_of(A, B, C)]


def test_an_empty_folder(tmp_path, prepare):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(BadInputError, match="no files below"):
        prepare(tmp_path / "nothing")


@pytest.mark.parametrize("pattern", ["", "*.jsonl"])
def test_links_that_lead_nowhere_are_told(tmp_path, pattern):
    """A folder of a cache that was fetched in part was learned without the rest."""
    reference = str(tmp_path / pattern)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert open_source(reference).hints == ()
    (tmp_path / "b.jsonl").symlink_to("../blobs/gone")
    (hint,) = open_source(reference).hints
    assert "b.jsonl is not read: a link leads to a missing file" in hint


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "b.jsonl"])
def test_data_of_nothing_but_links_that_lead_nowhere_are_refused_with_the_link(tmp_path, pattern):
    (tmp_path / "b.jsonl").symlink_to("../blobs/gone")
    with pytest.raises(BadInputError, match=r"b\.jsonl is a link to \.\./blobs/gone, which"):
        open_source(str(tmp_path / pattern))
