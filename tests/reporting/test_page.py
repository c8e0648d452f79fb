"""Documents as a page, as Markdown and as CSV: whole, and deaf to what strings would have it do."""

import csv
import io
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outpace.reporting.page import page
from outpace.reporting.render.document import (
    Chart,
    Code,
    DataTable,
    Document,
    DocumentSection,
    Items,
    Number,
    Paragraph,
    StyledText,
)
from outpace.reporting.render.markdown import markdown, table_csv

EVIL = '"><img src=x onerror=alert(1)></script><script>alert(2)</script><!-- & | `c` *b* {{ 7 }}'
TEXT = st.text(min_size=1, max_size=40) | st.sampled_from(
    [EVIL, "</script>", "<!--", "]]>", "\u2028", "{{x}}"]
)


def document(words):
    table = DataTable(
        words, ("", words), ((words, Number(1.5, words)), (words, Number(None, "n/a")))
    )
    figure = Chart(words, words, ({"type": "bar", "x": [1.0], "name": words, "text": [words]},),
                    {"title": {"text": words}}, table)  # fmt: skip
    sentences = (Paragraph(words), Items(((words, words),)))
    section = DocumentSection(words, (*sentences, Code(words, words), table, figure))
    return Document("run", words, (words, words), ((words, words),), (section,))


class Seen(HTMLParser):
    """Elements and their attributes, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self._inside = [], [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside is None:
            self.text.append(data)


def without_scripts(text):
    """The page without the library, which is no part of what is tested and long."""
    return re.sub(r"<script>.*?</script>", "<script></script>", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def plain_elements():
    return [tag for tag, _ in Seen(without_scripts(page([document("plain")]))).elements]


@settings(max_examples=25)  # a page is large, for the library in it
@given(TEXT)
def test_no_string_makes_or_ends_an_element(plain_elements, words):
    seen = Seen(without_scripts(page([document(words)])))
    assert [tag for tag, _ in seen.elements] == plain_elements
    assert not any(name.startswith("on") for _, attrs in seen.elements for name in attrs)


def test_strings_are_shown_as_they_are():
    seen = Seen(without_scripts(page([document(EVIL)])))
    assert "".join(seen.text).count(EVIL) >= 8
    labels = [attrs["aria-label"] for tag, attrs in seen.elements if "aria-label" in attrs]
    assert EVIL in labels


def figures(text):
    return json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])


def test_plotly_is_given_text_and_no_markup():
    text = page([document("<b>x</b> & y\nz")])
    (figure,) = figures(text)
    assert "<" not in re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1]
    assert figure["traces"][0]["name"] == "&lt;b&gt;x&lt;/b&gt; &amp; y<br>z"
    assert figure["layout"]["title"]["text"] == figure["traces"][0]["name"]


def test_a_page_is_whole_by_itself_and_lets_no_other_script_run():
    text = page([document("one"), document("two")])
    assert len(text) < 10 * 2**20
    seen = Seen(without_scripts(text))
    addresses = [value for _, attrs in seen.elements for name, value in attrs.items()
                 if name in ("src", "href") and not value.startswith("#")]  # fmt: skip
    assert addresses == ["data:,"]
    policy = next(attrs["content"] for tag, attrs in seen.elements
                  if attrs.get("http-equiv") == "Content-Security-Policy")  # fmt: skip
    assert "default-src 'none'" in policy and policy.count("'sha256-") == 2
    assert "unsafe" not in policy.partition("script-src")[2]
    assert text.count("plotly.js v") == 1


def test_a_page_without_figures_has_no_library():
    section = DocumentSection("a", (Paragraph("b"),))
    text = page([Document("run", "a", ("b",), (), (section,))])
    assert len(text) < 30_000 and "plotly.js v" not in text


def test_numbers_are_sorted_by_value():
    text = page([document("a")])
    assert 'data-value="1.5"' in text and 'data-value=""' in text


def test_every_column_sorts_and_one_without_a_name_says_so():
    seen = Seen(without_scripts(page([document("a")])))
    heads = [attrs for tag, attrs in seen.elements if tag == "th"]
    buttons = [attrs for tag, attrs in seen.elements if tag == "button"]
    assert len(heads) == len(buttons) == 4
    assert [one.get("aria-label") for one in buttons] == ["first column", None] * 2


@pytest.mark.parametrize(("rows", "folded"), [(30, 0), (31, 1)])
def test_long_tables_are_folded_and_say_how_long_they_are(rows, folded):
    table = DataTable("a table", ("a",), (("b",),) * rows)
    text = page([Document("run", "a", ("b",), (), (DocumentSection("c", (table,)),))])
    seen = Seen(without_scripts(text))
    assert sum(tag == "details" for tag, _ in seen.elements) == folded
    assert ("a table (31 rows)" in text) == bool(folded)


def outside_of_code(text):
    return re.sub(r"^(`{3,})\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)


@given(TEXT)
@example("\x0c|")
def test_markdown_has_as_many_cells_whatever_is_in_them(words):
    text = outside_of_code(markdown([document(words)]))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 8
    assert all(len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3 for line in lines)


def test_markdown_reads_no_markup():
    text = markdown([document(EVIL)])
    outside = outside_of_code(text)
    assert not re.search(r"(?<!\\)[<>]", outside)
    assert "\\<script\\>" in outside


def test_code_stays_in_its_fence():
    text = markdown(
        [Document("run", "a", ("b",), (), (DocumentSection("c", (Code("d", "```\nx"),)),))]
    )
    assert "\n````\n```\nx\n````\n" in text


@given(TEXT)
def test_csv_holds_every_cell_and_sentence_once(words):
    rows = list(csv.DictReader(io.StringIO(table_csv([document(words)]))))
    cells = [row for row in rows if row["section"] not in ("verdict", "facts")]
    assert len(rows) == 3 + 2 + 8
    if words not in ("verdict", "facts"):
        assert [row["value"] for row in cells] == ["", "", *["", "1.5", "", ""] * 2]
        assert cells[0]["text"] == cells[1]["text"] == cells[1]["column"]


def test_csv_has_nothing_that_a_spreadsheet_computes():
    rows = list(csv.DictReader(io.StringIO(table_csv([document("=1+1")]))))
    assert all(not cell.startswith("=") for row in rows for cell in row.values())
    values = list(csv.DictReader(io.StringIO(table_csv([document("-1.5")]))))
    assert values[0]["text"] == "-1.5"  # a number is one


def test_a_column_without_content_is_left_out():
    rows = (("e", StyledText("", "dim"), Number(None, "–")), ("f", "", ""))
    table = DataTable("a", ("b", "c", "d"), rows)
    assert table.columns == ("b", "d") and [row[0] for row in table.rows] == ["e", "f"]
    assert DataTable("a", ("b", "c"), ()).columns == ("b", "c")


def test_a_table_of_unequal_rows_is_a_mistake():
    with pytest.raises(ValueError, match="2 columns"):
        DataTable("a", ("b", "c"), (("d",),))
