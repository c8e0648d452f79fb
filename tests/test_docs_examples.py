"""Commands and programs of README and guides, run as they stand, on tiny things of the same names.

Blocks of `sh` and `python` are run. What a reader has to complete stands in blocks without a
language or of `console`.
"""

import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from outpace.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "getting-started.md"]
PAGES += sorted((ROOT / "docs" / "guides").glob("*.md"))
# What a reader has of their own, or would wait long for.
STAND_INS = {
    "hf:NAME:CONFIG:SPLIT": "hf:saved",
    "gpt2": "outpace-tiny",
}
# Of commands that take half a minute, or what these leave: other tests try what they do.
LONG = {"compare", "comparisons/first", "tune", "tunings/first/plan.json", "--pp", "--profile"}
SHORT = ["--steps=2", "--seq-len=16", "--eval-batches=1", "--sample-tokens=2"]
SPEC = """
family = "llama"
layers = 1
hidden = 32
heads = 2
vocab = 512
max_positions = 64
"""
MINE = """
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(512, 16), nn.Linear(16, 512))
"""


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands():
    """Each command once, in the order of the pages, with the first page that has it."""
    lines = [(line, page) for page in PAGES for block in blocks(page, "sh")
             for line in block.splitlines() if line.startswith("outpace ")]  # fmt: skip
    found = {}
    for line, page in lines:
        found.setdefault(line.partition("#")[0].strip(), page.stem)
    return found


def programs():
    return [pytest.param(program, id=f"{page.stem}-{at}") for page in PAGES
            for at, program in enumerate(blocks(page, "python"))]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with what the pages speak of."""
    import datasets

    from outpace.jobs.train.context import RunContext
    from outpace.jobs.train.job import train
    from outpace.records.settings import TrainSettings

    folder = tmp_path_factory.mktemp("docs")
    text = (ROOT / "outpace" / "data" / "stream.py").read_text()
    for name in ("corpus", "code", "prose"):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(text)
        (folder / name / "b.txt").write_text(text[::-1])
    lines = "".join(f'{{"content": {json_text(text)}}}\n' for _ in range(4))
    (folder / "talk.jsonl").write_text(lines)
    chat = {"messages": [{"role": "assistant", "content": "a"}]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 4)
    (folder / "MRPC").mkdir()
    for name in ("train", "dev"):
        rows = "".join(f"{n % 2}\t{n}\t{n}\ta\tb\n" for n in range(4))
        header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        (folder / "MRPC" / f"{name}.tsv").write_text(header + rows)
    (folder / "held-out.txt").write_text(text)
    (folder / "spec.toml").write_text(SPEC)
    (folder / "mine.py").write_text(MINE)
    (folder / "run.toml").write_text('model = "outpace-tiny"\ndata = ["corpus"]\n')
    datasets.Dataset.from_dict({"text": [text] * 4}).save_to_disk(folder / "saved")
    settings = TrainSettings(
        model="outpace-tiny", data=(str(folder / "corpus"),), steps=1, seq_len=16, eval_batches=1,
        out=folder / "runs" / "earlier", cache_dir=folder / "cache", sample_tokens=0,
    )  # fmt: skip
    train(settings, RunContext())
    for name in ("first", "second"):
        shutil.copytree(folder / "runs" / "earlier", folder / "runs" / name)
    longer = settings.model_copy(update={"steps": 12, "out": folder / "runs" / "longer"})
    train(longer, RunContext())  # a comparison needs steps after warm-up
    shutil.copytree(folder / "runs" / "longer", folder / "runs" / "as-long")
    shutil.copytree(folder / "runs" / "earlier" / "model", folder / "path" / "to" / "hf-model")
    return folder


def json_text(text):
    import json

    return json.dumps(text)


def test_the_pages_have_commands_and_programs():
    assert len(commands()) >= 50
    assert sum(page == "README" for page in commands().values()) >= 7
    assert len(programs()) >= 6


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150, f"README.md has {len(lines)} lines of 150: move some to docs/guides"


@pytest.mark.usefixtures("small_arrays", "short_trials")
@pytest.mark.filterwarnings("default")  # Inductor warns of its own doings
@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=pytest.mark.slow if LONG & set(line.split()) else ())
             for line in commands()]
)  # fmt: skip
def test_command(line, home, monkeypatch, capfd):
    monkeypatch.chdir(home)
    words = [STAND_INS.get(word, word) for word in shlex.split(line)[1:]]
    if "--epochs" in words:
        at = words.index("--epochs")
        words[at : at + 2] = []  # the length is the short one
    if words[0] == "train":
        words += ["--cache-dir=cache"]
        words += ["--steps=3"] if "--resume" in words else SHORT
    if words[0] == "tune":
        words += ["--cache-dir=cache", "--trials=1", *SHORT]  # several: tests/cli/test_tune.py
    if words[:2] == ["compare", "runs/first"]:
        words = ["compare", "runs/longer", "runs/as-long"]
    elif words[0] == "compare":
        words += ["--model=outpace-tiny", "--data=corpus", "--cache-dir=cache", "--rounds=1",
                  "--steps=4", "--seq-len=16"]  # fmt: skip
    if words[0] == "verify":
        words += ["--strategy=ddp,gpipe"]  # all of them are proved by tests/experiment
    if words[0] == "probe":
        words += ["memory", "--quick", "--budget=2"]  # all sections: tests/cli/test_probe.py
    if words[0] == "eval":
        words += ["--batches=1"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who are you?\n"))  # of a conversation
    assert main(words) == 0, capfd.readouterr().err


@pytest.mark.parametrize("program", programs())
def test_program(program, home, tmp_path, command):
    short = ", seq_len=16, eval_batches=1, sample_tokens=0, cache_dir='cache'"
    program = program.replace("steps=200", f"steps=2{short}").replace('"gpt2"', '"outpace-tiny"')
    strict = "import warnings; warnings.filterwarnings('error', '', DeprecationWarning, '__main__')"
    (tmp_path / "program.py").write_text(f"{strict}\n{program}")
    command(tmp_path / "program.py", cwd=home, check=True)
