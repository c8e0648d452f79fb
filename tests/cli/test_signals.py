"""A signal ends a command while a library works in one long call, and leaves nothing half-written.

What the library is given takes it longer than the test waits.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outpace.data.parallel_encoding import Encoders
from outpace.data.tokenizer_training import train_tokenizer

LIMIT_S = 40
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def one_word(length: int) -> str:
    return "".join(random.Random(1).choices(LETTERS, k=length))


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_learning_of_a_tokenizer(signum: signal.Signals, tmp_path: Path) -> None:
    model, text, log = (tmp_path / name for name in ("model.toml", "letters.txt", "log"))
    model.write_text('family = "gpt2"\nlayers = 1\nhidden = 32\nheads = 2\nvocab = 30000\n'
                     "max_positions = 64\n")  # fmt: skip
    text.write_text(one_word(12_000_000))
    cache, run = tmp_path / "cache", tmp_path / "run"
    words = [f"--model={model}", f"--data={text}", "--device=cpu", "--seq-len=32", "--steps=1",
             "--global-batch=2", "--threads=1", f"--cache-dir={cache}", f"--out={run}"]  # fmt: skip
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "outpace", "train", *words], stdout=file, stderr=file,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        until_s = time.monotonic() + LIMIT_S
        while not list(cache.glob("tokenizers/*.lock")) and time.monotonic() < until_s:
            time.sleep(0.05)
        time.sleep(2)  # the text is read and cut in less
        assert process.poll() is None, log.read_text()
        process.send_signal(signum)
        code = process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert code == 75 and "nothing was trained" in log.read_text(), log.read_text()
    assert "Traceback" not in log.read_text()
    assert [path for path in cache.glob("tokenizers/*") if path.suffix != ".lock"] == []
    assert not run.exists()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nobody_waits_for_what_is_encoded_in_vain(processes: int) -> None:
    tokenizer = train_tokenizer(["a few words of text, and a few more words"], 300)
    with (
        pytest.raises(KeyboardInterrupt),
        Encoders(tokenizer, processes, alone_characters=0) as encoders,
    ):
        future = encoders.submit([one_word(4_000_000)])
        time.sleep(0.5)
        raise KeyboardInterrupt
    assert not future.done()
