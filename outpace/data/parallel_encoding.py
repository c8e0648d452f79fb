"""Tokenization in parallel processes.

A helper is a plain child process with two pipes rather than a `multiprocessing` one. It never
imports the caller's main module, so a script needs no `if __name__ == "__main__"`.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np
import tokenizers

from outpace.data.tokenizer import Tokenizer
from outpace.records.errors import BadInputError
from outpace.records.interpreter import PYTHON

Tokens = np.ndarray[Any, np.dtype[Any]]

_START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from outpace.data.parallel_encoding import main; main()"
)
# For fewer characters, encoding in this process is faster than starting helpers.
ALONE_CHARACTERS = 12 << 20


class Encoders:
    """Context manager for processes that tokenize batches of texts; `submit` does not block."""

    def __init__(
        self, tokenizer: Tokenizer, processes: int, alone_characters: int = ALONE_CHARACTERS
    ) -> None:
        self._tokenizer = tokenizer
        self._processes = processes
        self._alone = alone_characters
        self._pool = ThreadPoolExecutor(max_workers=max(1, processes))
        self._helpers: dict[int, _Helper] = {}
        self.helped = 0  # number of batches that helpers have encoded

    def submit(self, texts: list[str]) -> "Future[list[Tokens]]":
        """Start encoding texts; return a future of the ids of each text."""
        self._alone -= sum(map(len, texts))
        if self._processes > 1 and self._alone < 0:
            return self._pool.submit(self._encode_with_helper, texts)
        return self._pool.submit(self._tokenizer.encode_batch, texts)

    def _encode_with_helper(self, texts: list[str]) -> list[Tokens]:
        """Encode texts in this thread's child process, or in this process if the child has died."""
        name = threading.get_ident()
        if name not in self._helpers:
            self._helpers[name] = _Helper(self._tokenizer)
        encoded = self._helpers[name].encode(texts)
        if encoded is None:
            return list(self._tokenizer.encode_batch(texts))
        self.helped += 1
        return encoded

    def __enter__(self) -> "Encoders":
        return self

    def __exit__(self, *raised: object) -> None:
        # Do not wait for results that are no longer needed: a long text may take minutes.
        failed = raised[0] is not None
        try:
            self._pool.shutdown(wait=not failed, cancel_futures=True)
        finally:
            for helper in list(self._helpers.values()):
                helper.kill() if failed else helper.end()


class _Helper:
    """A child process that tokenizes texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                [*PYTHON, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._send(sys.path)
            self._send((tokenizer.inner.to_str(), tokenizer.eos_token))
        except OSError:
            self.end()

    def encode(self, texts: list[str]) -> list[Tokens] | None:
        """Return the ids of each text, or None if the helper has died."""
        if self._process is None:
            return None
        assert self._process.stdout is not None
        try:
            self._send(texts)
            lengths, joined = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            self.end()
            return None
        ids = np.frombuffer(joined, dtype=np.uint32)
        return np.split(ids, np.cumsum(lengths)[:-1])

    def _send(self, value: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        pickle.dump(value, self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the process immediately, even if a thread is waiting for its answer."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Tell the process to exit, and wait for it.

        Closing its input may not be enough: processes forked in the meantime keep the pipe open.
        """
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            self._send(None)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # some data may not have been sent
                pipe.close()
        self._process.wait()
        self._process = None


def main() -> None:
    """Run a helper: read a tokenizer, then batches, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles this signal
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # helpers already run in parallel
    given, taken = sys.stdin.buffer, sys.stdout.buffer
    told, eos = pickle.load(given)
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(told), eos)
    try:
        while (encoded := _encode_next_batch(tokenizer, given)) is not None:
            pickle.dump(encoded, taken, protocol=pickle.HIGHEST_PROTOCOL)
            taken.flush()
    except (BrokenPipeError, BadInputError):  # the caller also refuses such a text
        os._exit(1)


def _encode_next_batch(tokenizer: Tokenizer, stream: BinaryIO) -> tuple[list[int], bytes] | None:
    try:
        texts = pickle.load(stream)
    except EOFError:
        return None
    if texts is None:
        return None
    encoded = tokenizer.encode_batch(texts)
    return [len(ids) for ids in encoded], np.concatenate(encoded).tobytes()
