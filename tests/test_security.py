"""What a file, a name or a neighbour may try on whoever uses outpace: each is tried for real."""

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import xxhash

from outpace.cli.main import main
from outpace.interop.custom_model import write_custom_model
from outpace.records.base import temporary_name
from outpace.records.errors import BadInputError
from outpace.training.checkpoint import (
    MARKER,
    Checkpointer,
    Progress,
    clear_partial,
    newest_intact,
    put_later_aside,
    whole_checkpoints,
)

SHORT = ("--model=outpace-tiny", "--seq-len=32", "--global-batch=4", "--sample-tokens=0",
         "--eval-batches=1", "--precision=fp32", "--device=cpu")  # fmt: skip
SLOW = pytest.mark.slow
OWN = """
from pathlib import Path
Path({hacked!r}).touch()
from torch import nn
build = lambda: nn.Linear(4, 3)
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("security") / "text.txt"
    path.write_text("".join(f"a line of text, number {number}\n" for number in range(2000)))
    return path


@pytest.fixture(scope="module")
def words(text):
    """A tiny training, without its --out."""
    return ["train", *SHORT, f"--data={text}", f"--cache-dir={text.parent / 'cache'}"]


@pytest.fixture
def run(words, tmp_path):
    """A run that goes on from its second step."""
    out = tmp_path / "run"
    assert main([*words, f"--out={out}", "--steps=2", "--save-every=1", "--keep=2"]) == 0
    return out


@pytest.fixture
def hacked(tmp_path):
    """What code of others makes, where it is run."""
    return tmp_path / "hacked"


@pytest.fixture
def refused(capsys):
    """What a command that is refused says to a person."""

    def refuse(*arguments):
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return refuse


class Evil(float):
    """A number, until it is unpickled."""

    def __new__(cls, place):
        return super().__new__(cls, 0.1)

    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return os.mkdir, (self.place,)


def signed(folder):
    """Make a checkpoint's marker fit its files, as whoever changed them would."""
    entries = {
        path.name: {"bytes": path.stat().st_size,
                    "xxh3_128": xxhash.xxh3_128_hexdigest(path.read_bytes())}
        for path in folder.iterdir() if path.name != MARKER
    }  # fmt: skip
    (folder / MARKER).write_text(json.dumps(entries))


def further(words, run):
    return [*words, "--resume", f"--out={run}", "--steps=4"]


def test_a_checkpoints_metadata_run_nothing(words, run, hacked, refused):
    folder = run / "checkpoints" / "step-2"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(hacked)))
    signed(folder)
    said = refused(*further(words, run))
    assert ".metadata cannot be read (no code in it was run): it refers to posix.mkdir" in said
    assert not hacked.exists()


def test_a_checkpoints_metadata_change_nothing(words, run, hacked, refused):
    """Every path of this process would be `hacked`, and what is written lie there."""
    folder = run / "checkpoints" / "step-2"
    there = pickle.dumps({"_str": str(hacked)}, protocol=2)[2:-1]
    genuine = (folder / ".metadata").read_bytes()
    change = b"\x80\x02cpathlib\nPosixPath\nN" + there + b"\x86b0"
    (folder / ".metadata").write_bytes(change + genuine)
    signed(folder)
    assert "it would modify <class 'pathlib" in refused(*further(words, run))
    assert str(Path("elsewhere")) == "elsewhere" and not hacked.exists()


def test_a_checkpoints_files_are_its_own(words, run, refused):
    folder = run / "checkpoints" / "step-2"
    found = pickle.loads((folder / ".metadata").read_bytes())
    for info in found.storage_data.values():
        info.relative_path = "../../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    signed(folder)
    assert "refers to files outside its folder" in refused(*further(words, run))


@pytest.fixture
def saver(tmp_path):
    """Writes and reads checkpoints of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # It does not copy what it saves: to copy a number that is none runs it, too.
        made = Checkpointer(tmp_path / "checkpoints", 2, 0, dist.new_group(), print, print, False)
        yield made
        made.close()
    finally:
        dist.destroy_process_group()


def step(saver, number, lr=0.1):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = lr
    saver.save(model, optimizer, Progress(
        step=number, tokens=None, samples=1, loss_sum=1.0, skipped_steps=0, scaler=None,
        first_loss=None, world_size=1))  # fmt: skip
    assert saver.wait()
    return model, optimizer


def test_a_checkpoints_values_run_nothing(saver, hacked):
    model, optimizer = step(saver, 1, Evil(hacked))
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(BadInputError, match="lr is not a plain value"):
        saver.load(saver.directory / "step-1", model, optimizer)
    assert not hacked.exists()


def test_what_removes_checkpoints_follows_no_link(saver, tmp_path, capsys):
    for number in (8, 9):
        step(saver, number)
    outside = tmp_path / "outside"
    saver.directory.rename(outside)
    saver.directory.mkdir()
    for number in (1, 8, 9):
        (saver.directory / f"step-{number}").symlink_to(outside / f"step-{max(8, number)}")
    kept = sorted(path.name for path in outside.rglob("*"))
    said = []
    with pytest.raises(BadInputError, match="every checkpoint"):
        newest_intact(saver.directory, said.append)
    assert all("it is a link" in one for one in said) and len(said) == 3
    step(saver, 10)  # prunes step-1 and step-8
    assert [one.name for one in whole_checkpoints(saver.directory)] == ["step-10", "step-9"]
    put_later_aside(saver.directory, 2, said.append)
    (outside / "step-9" / MARKER).rename(outside / "step-9" / "marker")
    (saver.directory / "step-3").symlink_to(outside / "step-9")
    clear_partial(saver.directory)
    (outside / "step-9" / "marker").rename(outside / "step-9" / MARKER)
    assert sorted(path.name for path in outside.rglob("*")) == kept


@pytest.mark.parametrize(
    "name", ["checkpoints", "metrics.jsonl", "checkpoints/step-2/.metadata", "wandb"]
)
def test_a_link_out_of_a_run_is_not_gone_on_through(words, run, tmp_path, refused, name):
    outside = tmp_path / "outside"
    if name == "wandb":
        (run / name).mkdir()
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    before = {path: path.stat().st_size for path in (outside, *outside.rglob("*"))}
    said = refused(*further(words, run))
    assert f"{run / name} is a link that leads out of the run" in said
    assert {path: path.stat().st_size for path in (outside, *outside.rglob("*"))} == before


def test_a_run_that_is_a_link_as_a_whole_goes_on(words, run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    logs = run / "wandb" / "run-1" / "logs"  # wandb links to logs in its own cache
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(tmp_path / "wandb's-cache.log")
    assert main(further(words, tmp_path / "link")) == 0


def test_reports_and_lists_write_through_no_link(run, tmp_path, capsys):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("report.html", temporary_name(Path("report.html"))):
        (run / name).symlink_to(precious)
    (run.parent / "again").symlink_to(run)
    assert main(["report", str(run)]) == 0
    assert main(["runs", str(run.parent), "--json"]) == 0
    assert '"path"' in capsys.readouterr().out
    assert precious.read_text() == "mine"


def test_code_that_a_run_names_is_not_run_unless_it_is_named(
    run, words, tmp_path, hacked, refused, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "evil.py").write_text(OWN.format(hacked=str(hacked)))
    evil = f"{tmp_path / 'evil.py'}:build"
    document = json.loads((run / "run.json").read_text())
    document["settings"]["model"] = evil
    (run / "run.json").write_text(json.dumps(document))
    shutil.rmtree(run / "model")
    write_custom_model(run / "model", torch.nn.Linear(4, 3), evil)
    for arguments in (
        ["train", "--resume", "--out", run, "--steps=4"], ["eval", "--run", run],
        ["generate", "x", "--run", run],
        ["train", "--model", run, "--out", tmp_path / "x"],
        ["train", "--model", run / "model", "--out", tmp_path / "x"],
    ):  # fmt: skip
        said = refused(*arguments)
        assert "would run code" in said and f"--model {evil}" in said, arguments
    assert not hacked.exists()
    with suppress(BadInputError):  # it has no loss; but it is named, and run
        main(["train", "--model", evil, f"--out={tmp_path / 'y'}"])
    assert hacked.exists()
    assert "would run code" not in refused("generate", "x", "--run", run)


@pytest.mark.parametrize("how", [{"command": "touch {}"}, {"environment": {"LD_PRELOAD": "{}"}}])
def test_a_comparison_runs_nothing_that_was_not_trusted(tmp_path, hacked, refused, capsys, how):
    filled = json.loads(json.dumps(how).replace("{}", str(hacked)))
    own = "command" in how
    arms = [{"name": name, **(filled if own or name == "b" else {})} for name in "ab"]
    metric = {"metric": "(1)"} if own else {"common": {"steps": 1}}
    (tmp_path / "e.toml").write_text("")
    fake = ["--command", "echo 1", "--command", "echo 1 ", "--metric", "(1)", "--rounds=1"]
    assert main(["compare", *fake, f"--out={tmp_path / 'c'}", "--json"]) == 0
    stored = json.loads((tmp_path / "c" / "comparison.json").read_text())
    del stored["xxh3_128"]  # changed on purpose
    stored["experiment"] = {"arms": arms, "rounds": 1, "budget_s": 1, **metric}
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps(stored))
    said = refused("compare", path, f"--out={tmp_path / 'd'}")
    assert str(hacked) in said and "add --trusted" in said
    assert not hacked.exists() and not (tmp_path / "d").exists()
    if own:
        main(["compare", str(path), "--trusted", f"--out={tmp_path / 'd'}", "--json"])
        assert hacked.exists()


def test_a_tokenizers_own_code_is_not_run_even_if_someone_answers_yes(tmp_path, words, hacked):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "evil.py").write_text(OWN.format(hacked=str(hacked)))
    told = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    command = [sys.executable, "-m", "outpace", *words, f"--tokenizer={folder}"]
    command.append(f"--out={tmp_path / 'run'}")
    done = subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "uses its own code (auto_map), which outpace does not run" in done.stderr
    assert not hacked.exists()


def test_what_is_no_host_s_name_reaches_no_shell(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a;touch hacked", "$(touch hacked)", "-oProxyCommand=touch hacked", "a\nb"):
        assert "is not the name of a host" in refused("train", f"--hosts={name}:2")
        Path("hosts").write_text(f"{name.replace(' ', '')} slots=2\n")
        refused("train", "--hostfile=hosts")
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


def listening(processes):
    """Addresses on which these listen."""
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    found.add(one.laddr.ip)
    return found


def known_elsewhere():
    """What starts a program where this host's own name leads to an address that others reach.

    That is where gloo would listen. Nothing where that cannot be made.
    """
    every = [one for found in psutil.net_if_addrs().values() for one in found]
    four = [one.address for one in every if one.family == socket.AF_INET]
    address = next((one for one in four if not one.startswith("127.")), None)
    words = ["unshare", "-u", "sh", "-c", 'hostname "$0" && exec "$@"', str(address)]
    with suppress(OSError):
        if address and subprocess.run([*words, "true"], check=False).returncode == 0:
            return words
    return []


def stop(processes):
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(600)
        process.kill()
        process.communicate()


@pytest.mark.gloo
@pytest.mark.parametrize(
    "how", [pytest.param("alone", marks=SLOW), "nproc", pytest.param("as srun does", marks=SLOW)]
)
def test_a_training_listens_on_the_loopback_interface_alone(words, tmp_path, how, hold_port):
    run = tmp_path / "run"
    command = [*known_elsewhere(), sys.executable, "-m", "outpace", *words, f"--out={run}"]
    command += ["--steps=100000"]
    command += ["--nproc=2"] if how == "nproc" else []
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
             "MASTER_PORT": str(hold_port())}  # fmt: skip
    given = [{**place, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    started = [
        subprocess.Popen(command, env={**os.environ, **more}, stderr=subprocess.PIPE, text=True)
        for more in (given if how == "as srun does" else [{}])
    ]
    try:
        seen = set()
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
            assert all(one.poll() is None for one in started), started[0].communicate()[1]
            seen |= listening(_all(started))
            time.sleep(0.05)
        seen |= listening(_all(started))
    finally:
        stop(started)
    assert seen and seen <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def _all(started):
    roots = [psutil.Process(one.pid) for one in started]
    return [*roots, *(child for root in roots for child in root.children(recursive=True))]


# A process of its own between: a peak counts what the one that forked had, and tests have much.
_MEASURING = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(done.returncode)
"""


@pytest.mark.parametrize("task", ["pretrain", pytest.param("chat", marks=SLOW)])
def test_a_line_without_end_is_refused_before_memory_is_full(words, tmp_path, task):
    path = tmp_path / "bomb.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n')
        file.truncate(3 << 29)  # zeros, which take no place on the disk
    others = [word for word in words if not word.startswith("--data")]  # text, no conversations
    command = [sys.executable, "-m", "outpace", *others, f"--data={path}", f"--task={task}"]
    command.append(f"--out={tmp_path / 'run'}")
    done = subprocess.run(
        [sys.executable, "-c", _MEASURING, *command], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "bomb.jsonl, line 2 is longer than 64 MiB" in done.stderr
    assert "Traceback" not in done.stderr
    assert int(done.stdout.split()[-1]) < (5 << 18)  # KiB: 1.25 GiB, most of them torch's


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_json_without_end_is_said_to_be_that(tmp_path, refused, content):
    path = tmp_path / "machine.json"
    path.write_text(content)
    (tmp_path / "run.json").write_text(content)
    assert "nested too deep" in refused("report", path)
    assert "nested too deep" in refused("plan", "--model=gpt2", f"--machine={path}")
    endless = tmp_path / "endless.json"
    endless.symlink_to("/dev/zero")
    assert "is larger than 64 MiB" in refused("report", endless)


def test_names_send_nothing_to_the_terminal(run, capsys, refused):
    document = json.loads((run / "run.json").read_text())
    document["settings"]["model"] = "\x1b]0;hacked\x07\x9b2J name"
    (run / "run.json").write_text(json.dumps(document))
    (run / "failure.json").write_text(json.dumps({"reason": "\x1b[2J why", "ended": "now"}))
    (run / "result.json").unlink()
    capsys.readouterr()
    for arguments in (["runs", run.parent], ["runs", run]):
        assert main([*map(str, arguments)]) == 0
        shown = capsys.readouterr().out
        assert "name" in shown and not {"\x1b", "\x07", "\x9b"} & set(shown)
    assert "\x1b" not in refused("report", run.parent / "\x1b[2J.json")


@pytest.mark.gloo
@pytest.mark.slow
def test_modules_in_the_current_folder_are_not_imported(words, tmp_path, hacked):
    for name in ("json", "pickle", "numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(hacked)!r}, 'w')\n")
    # As the command `outpace` does, which has its own folder in the path and not this one.
    command = [sys.executable, "-P", "-m", "outpace", *words, "--nproc=2", "--steps=1", "--out=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not hacked.exists()


def test_a_chat_template_reaches_nothing_but_its_text(tmp_path, words, hacked, refused):
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats.write_text((json.dumps({"messages": turns}) + "\n") * 50)
    assert main([*words, f"--out={tmp_path / 'a'}", "--steps=1"]) == 0
    tokenizer = tmp_path / "a" / "model"
    told = json.loads((tokenizer / "tokenizer_config.json").read_text())
    call = f"{{{{ cycler.__init__.__globals__.os.mkdir({str(hacked)!r}) }}}}"
    told["chat_template"] = call + "{% generation %}{{ messages }}{% endgeneration %}"
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(told))
    (tokenizer / "checksums.json").unlink()  # as of a model that somebody else wrote
    others = [word for word in words if not word.startswith("--data=")]
    said = refused(*others, "--task=chat", f"--data={chats}", f"--tokenizer={tokenizer}",
                   f"--out={tmp_path / 'b'}")  # fmt: skip
    assert "unsafe" in said
    assert not hacked.exists()
