import pytest


@pytest.mark.parametrize(
    ("name", "begin"), [("x.wet", "WARC/1.0\r\n"), ("x.rtf", "{\\rtf1 "), ("x.ps", "%!PS-Adobe\n")]
)
def test_further_markup_is_said(tmp_path, prepare, name, begin):
    (tmp_path / name).write_text(f"{begin}Some text.")
    (hint,) = prepare(tmp_path / name).hints
    assert "whose markup is trained on with the text" in hint


@pytest.mark.parametrize(
    ("name", "begin", "kind"),
    [
        ("page.txt", "\ufeff<!-- saved -->\n<!DOCTYPE html>\n<html><p>", "HTML"),
        ("page.html", "<html lang=en><body>", "HTML"),
        ("feed.txt", '<?xml version="1.0"?><feed>', "XML"),
        ("rows.yaml", "rows:\n", "YAML"),
        ("rows.txt", "---\n# two\n- text: one\n  label: a\n", "YAML"),
        ("notes.ipynb", '{\n "cells": [\n  {"source": ["x"', "JSON"),
        ("code.txt", "{\n  int a;\n}", None),
        ("notes.md", "- Author: someone\n- Title: words\n", None),
        ("page.md", "---\ntitle: words\n---\n<html> is a tag", None),
        ("text.txt", "<i>not</i> a page", None),
        # Each of these took time exponential in its number of lines, comments or spaces.
        ("blank.txt", "\n" * 200, None),
        ("spaces.txt", " \r\n \t\n" * 100, None),
        ("dashes.txt", "---\n# a\n\n" * 60, None),
        ("comments.txt", "<!-- a --> \n" * 100, None),
        ("comments.html", "<!-- a --> \n" * 100 + "<html>", "HTML"),
        ("blank.yml.txt", "\n" * 200 + "- a: one\n  b: two\n", "YAML"),
    ],
)
def test_marks_of_a_markup_language_are_said_to_be_learnt(tmp_path, prepare, name, begin, kind):
    (tmp_path / name).write_text(begin + " words and more words. " * 200)
    hints = prepare(str(tmp_path / name)).hints
    said = f"{tmp_path / name} is {kind}, whose markup is trained on with the text."
    assert any(hint.startswith(said) for hint in hints) is (kind is not None), hints
    (tmp_path / "plain.txt").write_text("plain words. " * 400)
    hints = prepare(str(tmp_path)).hints
    assert any("1 of 2 files of" in hint for hint in hints) is (kind is not None), hints
