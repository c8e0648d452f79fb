"""Detection of text files in markup languages."""

import re
from pathlib import Path

from outpace.data.file_kinds import form_of
from outpace.data.file_reader import readable
from outpace.data.sources import COMPARED_FILES, Source

# How texts in markup languages begin; for YAML, only lists of records. No pattern may match a text
# in two ways: overlapping repetitions backtrack exponentially.
_MARKUP = {
    "HTML": re.compile(
        rb"\s*(?:<!--(?:(?!-->).)*-->\s*)*<(?:!doctype\s+html|html[\s>])", re.I | re.S
    ),
    "XML": re.compile(rb"\s*<\?xml\s"),
    "RTF": re.compile(rb"\{\\rtf\d"),
    "PostScript": re.compile(rb"%!PS"),
    "WARC (with headers, as in Common Crawl's .wet)": re.compile(rb"WARC/\d\.\d\r?\n"),
    "YAML": re.compile(
        rb"(?:[ \t\r]*(?:#[^\n]*|---[^\n]*)?\n)*- +[\"'\w]+ *:[^\n]*\n +[\"'\w]+ *:"
    ),
    "JSON": re.compile(rb"\s*[\[{]\s*(?:\{\s*)?\"[^\"\n]*\"\s*:"),
}
_SNIFFED_MARKUP_BYTES = 4096


def markup_hints(source: Source) -> list[str]:
    """Return a hint if files contain markup, which would be trained on as text."""
    if source.kind != "text" or source.reference == "stdlib":
        return []
    looked_at = source.files[:COMPARED_FILES]
    found = [(file, kind) for file in looked_at if (kind := _detect_markup(file)) is not None]
    if not found:
        return []
    kinds = " or ".join(dict.fromkeys(kind for _, kind in found))
    which = f"{found[0][0]} is {kinds}"
    if len(looked_at) > 1:
        which = f"{len(found):,} of {len(looked_at):,} files of {source.reference} ({found[0][0]}"
        which += f"{', …' if len(found) > 1 else ''}) {'are' if len(found) > 1 else 'is'} {kinds}"
    return [
        f"{which}, whose markup is trained on with the text. If that is not intended, extract the "
        "texts, or write them as rows of a .jsonl"
    ]


def _detect_markup(file: Path) -> str | None:
    if file.suffix.lower() in (".yaml", ".yml"):
        return "YAML"
    with readable(file) as stream:
        head = stream.read(_SNIFFED_MARKUP_BYTES).removeprefix(b"\xef\xbb\xbf")
    found = next((kind for kind, begin in _MARKUP.items() if begin.match(head)), None)
    # A .json file among text files usually configures a program, so there is no hint.
    return None if found == "JSON" and form_of(file) == "json" else found
