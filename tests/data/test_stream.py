"""Files of tokens that change while they are read."""

import os
import pickle
import time
from types import SimpleNamespace

import numpy as np
import pytest

from outpace.data.corpus import Corpus
from outpace.data.stream import token_stream
from outpace.jobs.inputs.hints import foreign_id_hints
from outpace.records.errors import BadInputError

COUNT = 50_000


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(COUNT, dtype="<u2").tofile(path)
    return path


def read_later(stream, begin=COUNT - 10):
    time.sleep(0.15)  # a file is not looked at for each read
    return stream.read(begin, 10).tolist()


def change(path, action):
    """Change a file in its place, as programs do that open it for writing."""
    with path.open("r+b") as file:
        action(file)
    os.utime(path, (1, 1))  # whatever the clock's resolution is


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (lambda file: file.write(bytes(2 * COUNT)), "tokens.bin was overwritten while"),
        # A read of what is gone ends a process by a signal.
        (lambda file: file.truncate(1000), "tokens.bin was truncated to 1,000 bytes while"),
    ],
    ids=["over", "cut"],
)
def test_a_file_that_changes_under_a_run_is_told(path, action, said):
    stream = token_stream([path])
    copy = pickle.loads(pickle.dumps(stream))  # as in a loading process
    change(path, action)
    for one in (stream, copy):
        with pytest.raises(BadInputError, match=said):
            read_later(one)


@pytest.mark.parametrize("kind", ["touched", "longer", "replaced", "deleted"])
def test_a_file_whose_tokens_stay_is_read_on(path, kind):
    stream = token_stream([path])
    if kind == "touched":
        change(path, lambda file: None)
    elif kind == "longer":
        change(path, lambda file: (file.seek(0, 2), file.write(b"1234")))
    elif kind == "replaced":
        np.zeros(10, dtype="<u2").tofile(path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    else:
        path.unlink()
    for _ in range(2):
        assert read_later(stream) == [*range(COUNT - 10, COUNT)]


def test_ids_of_two_bytes_of_a_larger_vocabulary_are_told(path):
    """Those above 65,535 were written as others, which the model learns as such."""
    corpus = Corpus((token_stream([path]),), None, "key")
    (said,) = foreign_id_hints(corpus, SimpleNamespace(vocab_size=70_001))
    assert "ids of 2 bytes, up to 65,535, but the tokenizer has 70,001" in said
    assert not foreign_id_hints(corpus, SimpleNamespace(vocab_size=1 << 16))
    np.arange(COUNT, dtype="<u4").tofile(path)
    wide = Corpus((token_stream([path]),), None, "key")
    assert not foreign_id_hints(wide, SimpleNamespace(vocab_size=70_001))
    narrow = path.with_name("narrow.bin")
    np.arange(COUNT, dtype="<u2").tofile(narrow)
    both = Corpus((token_stream([path, narrow]),), None, "key")
    assert foreign_id_hints(both, SimpleNamespace(vocab_size=70_001)) == [said]


@pytest.mark.parametrize("dtype", [">u4", ">i8"])
def test_ids_with_the_most_significant_byte_first_are_refused(path, dtype):
    """They were read as twice as many ids of 16 bits, where the vocabulary has as many."""
    np.random.default_rng(0).integers(0, 128_000, 3000).astype(dtype).tofile(path)
    with pytest.raises(BadInputError, match=r"with the most significant byte first\."):
        token_stream([path])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_file_of_a_few_ids_is_read(path, count):
    np.arange(300, 300 + count, dtype="<u2").tofile(path)
    assert token_stream([path]).read(0, count).tolist() == [*range(300, 300 + count)]
