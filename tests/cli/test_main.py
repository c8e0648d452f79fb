import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import outpace
import outpace.cli.version
from outpace.catalog.models import PRESETS
from outpace.cli import main as command
from outpace.launch import local
from outpace.nn.torch_versions import VERSION
from outpace.records.errors import BadInputError, DivergedError, InterruptedRunError, OutpaceError


def raising(error: BaseException) -> object:
    def run(argv: list[str], environ: object) -> int:
        raise error

    return run


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"]):
        assert command.main(argv) == 0
        shown = capsys.readouterr().out
        assert all(f"  {name}" in shown for name in ("train", "generate", "eval", "version"))


@pytest.mark.parametrize("name", list(command.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: outpace {name}" in shown
    assert "--json" in shown


def test_an_unknown_command_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["trian"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("outpace: there is no command 'trian'. Did you mean 'train'")


def test_a_name_that_is_no_text_in_the_locale_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert command.main(["runs", "r\udcc3\udcb6"]) == 2
    assert r"'r\udcc3\udcb6' is not text in this locale's enc" in capsys.readouterr().err
    folder = tmp_path / "r\udcc3"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert command.main(["--version"]) == 0  # as all commands that write no run there
    assert command.main(["train", "--model=none"]) == 2
    assert r"r\udcc3' is not text in this locale's enc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("export", "a run is a Hugging Face folder"),
        ("chat", "outpace generate --run RUN --chat"),
        ("resume", "outpace train --resume DIR"),
        ("presets", "outpace models"),
    ],
)
def test_what_others_have_a_command_for_is_found(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([name, "x"]) == 2
    error = capsys.readouterr().err
    assert said in error and "Did you mean" not in error


def test_models_are_listed_with_their_sizes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    sizes = {row["name"]: row["parameters"] for row in rows}
    assert sizes["llama-3.1-8b"] == 8_030_261_248 and sizes["gpt2"] == 124_439_808
    assert list(sizes.values()) == sorted(sizes.values())
    assert {row["name"] for row in rows if row["trained"]} >= set(PRESETS)
    monkeypatch.setenv("COLUMNS", "80")
    assert command.main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    assert "outpace-small (default)" in shown and "mixtral-8x7b †" in shown
    assert command.main(["models", "qwen3", "--near", "1B"]) == 0
    assert len(capsys.readouterr().out.strip().splitlines()) == 2 + 5


def test_version_is_a_json_document_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["version", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)
    assert versions["outpace"] == outpace.__version__
    assert versions["torch"]


# Instead of an environment without outpace: its metadata, where it has some, is not found.
_WITHOUT_METADATA = """
import importlib.metadata as metadata

found = metadata.Distribution.from_name.__func__


def from_name(kind, name):
    if name == "outpace":
        raise metadata.PackageNotFoundError(name)
    return found(kind, name)


metadata.Distribution.from_name = classmethod(from_name)
"""


def test_a_copy_of_the_package_runs_from_pythonpath_alone(
    train_flags: list[str], tmp_path: Path
) -> None:
    """Trained on two processes, whose interpreters get it from there, too, and reported on."""
    tree = tmp_path / "tree"
    shutil.copytree(Path(outpace.__file__).parent, tree / "outpace")
    (tree / "sitecustomize.py").write_text(_WITHOUT_METADATA)
    environ = {**os.environ, "PYTHONPATH": str(tree)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "outpace", *words],
            cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(run("version", "--json"))["outpace"] == outpace.__version__
    run("train", *train_flags, "--steps=2", "--nproc=2", "--strategy=ddp", "--out=run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["outpace"] == record["versions"]["outpace"] == outpace.__version__
    assert record["versions"]["torch"] == VERSION
    run("report", "run", "--out=page.html")
    assert f"outpace {outpace.__version__}" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (DivergedError("the loss is NaN at step 7"), 3, "the loss is NaN at step 7"),
        (InterruptedRunError("saved at step 7"), 75, "saved at step 7"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 2, "disk is full"),
        (OSError(errno.EFBIG, "File too large", "runs/x"), 2, "runs/x exceeds the allowed size"),
        (SystemExit(5), 5, ""),
    ],
)
def test_errors_become_exit_codes_and_sentences(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(outpace.cli.version, "run", raising(error))
    assert command.main(["version"]) == code
    output = capsys.readouterr()
    assert said in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


def test_a_full_disk_is_found_beneath_other_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RuntimeError("cannot save")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(outpace.cli.version, "run", raising(error))
    assert command.main(["version"]) == 2
    assert "the disk is full" in capsys.readouterr().err


def test_a_bug_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outpace.cli.version, "run", raising(RuntimeError("a bug")))
    assert command.main(["version"]) == 1
    assert "RuntimeError: a bug" in capsys.readouterr().err


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
)
def test_what_fails_after_a_signal_does_not_hide_it(
    signum: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A DataLoader whose worker the same signal ended raises wherever the program is then."""

    def run(argv: list[str], environ: object) -> int:
        with contextlib.suppress(OutpaceError):
            os.kill(os.getpid(), signum)
        raise RuntimeError("DataLoader worker is killed by signal: Terminated")

    monkeypatch.setattr(outpace.cli.version, "run", run)
    assert command.main(["version"]) == 128 + signum
    assert capsys.readouterr().err == f"outpace: stopped by {signum.name}\n"


def test_with_json_an_error_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["train", "--json", "--lr", "fast"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 2
    assert "--lr" in document["error"]


def test_only_rank_0_speaks_and_every_rank_leaves_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "error.json"
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": path}.items():
        monkeypatch.setenv(name, str(value))
    assert command.main(["train", "--json", "--lr", "fast"]) == 2
    assert capsys.readouterr() == ("", "")
    message = json.loads(path.read_text())["message"]
    assert "--lr" in message["message"]
    assert message["extraInfo"]["exit_code"] == 2


def test_the_launcher_adds_no_document_to_that_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a rank has printed is known from its report, not from its words."""

    def differ(argv: list[str], environ: object) -> int:
        error = OutpaceError("the numbers differ")
        error.answered = True
        raise error

    monkeypatch.setattr(outpace.cli.version, "run", differ)
    with monkeypatch.context() as rank:
        rank.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        assert command.main(["version", "--json"]) == 1
    reports = local._read_reports(tmp_path)
    with pytest.raises(local.WorkerError) as ended:
        local.conclude(local.RanksEnd({0: 1}, reports, []))
    assert ended.value.answered
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("environ", "who"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 1: "),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, "rank 3: "),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, "rank 3: "),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, "rank 2: "),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, ""),  # a batch script is no rank
    ],
)
def test_a_rank_that_refuses_alone_says_so(
    environ: dict[str, str],
    who: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert command.main(["train", "--lr", "fast"]) == 2
    assert capsys.readouterr().err.startswith(f"outpace: {who}")


def test_what_all_ranks_agreed_on_is_said_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agreed = BadInputError("other data")
    agreed.on_all_ranks = True
    monkeypatch.setattr(outpace.cli.version, "run", raising(agreed))
    monkeypatch.setenv("RANK", "1")
    assert command.main(["version"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert command.main(["version"]) == 2
    assert capsys.readouterr().err == "outpace: other data\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "outpace", "train", "--print-config", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() in (0, 141)
    assert errors == b""


def test_a_finished_command_is_not_taken_apart_beside_torchs_threads():
    """What was asked for at the exit is done, and what was printed is there."""
    program = """
import atexit, sys, threading, time
import torch
from outpace.cli.main import command

class Late:
    def __del__(self):
        print("taken apart")

kept = Late()
atexit.register(print, "at the exit")
threading.Thread(target=lambda: (time.sleep(0.3), print("a thread"))).start()
sys.argv = ["outpace", "--version"]
command()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    version, *rest = done.stdout.splitlines()
    assert version.startswith("outpace ") and rest == ["a thread", "at the exit"]


def test_the_message_of_a_full_disk_names_the_variable_of_its_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "file"))
    monkeypatch.setattr(outpace.cli.version, "run", raising(error))
    assert command.main(["version"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Free some space, or set TMPDIR (now '" in said
    assert "') to a folder on another disk; --resume continues" in said


def test_files_of_the_working_directory_are_no_libraries(tmp_path):
    """A user's rich.py or tokenizers.py, where `python -m` looks first."""
    for name in ("rich", "tokenizers", "datasets", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a library was shadowed')\n")
    root = Path(__file__).parents[2]
    for words, there in (
        (("models", "gpt2"), tmp_path),
        (("estimate", "--model", "gpt2", "--machine", "hgx-h100", "--plan", "x.json"), tmp_path),
        (("version",), root),  # a checkout of outpace
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "outpace", *words], cwd=there, capture_output=True, text=True,
            check=False, env={**os.environ, "PYTHONPATH": "" if there == root else str(root)},
        )  # fmt: skip
        assert "shadowed" not in ended.stdout + ended.stderr
        assert ended.returncode == (2 if "x.json" in words else 0), ended.stderr
