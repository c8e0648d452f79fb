"""Texts, the files that hold them, and the tokens of a corpus."""

import json

A, B, C = "def a():\n    return 1\n", "Ein Stück Text.\n", "x = 'y'\n"


def tokens(corpus):
    return [stream.read(0, len(stream)).tolist() for stream in corpus.streams]


def write_lines(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path
