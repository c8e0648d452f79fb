"""Runs of two processes over gloo, started as people start them; runs that are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.gloo

FLAGS = ["--model=outpace-tiny", "--seq-len=32", "--global-batch=8", "--eval-batches=1",
         "--sample-tokens=0", "--precision=fp32", "--dropout=0"]  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture
def words(corpus, token_cache):
    """The words of a tiny run, with its --out."""

    def make(out: Path, *flags: str):
        folders = [f"--data={corpus}", f"--cache-dir={token_cache}", f"--out={out}"]
        return ["train", *folders, *FLAGS, *flags]

    return make


def line(words, launcher=()):
    return [sys.executable, *launcher, "-m", "outpace", *words]


def do(words, launcher=()):
    return subprocess.run(
        line(words, launcher), capture_output=True, text=True, timeout=900, check=False
    )


def losses(run: Path):
    text = (run / "metrics.jsonl").read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()  # one may be half written
    return {json.loads(line)["step"]: json.loads(line)["loss"] for line in lines}


def weights(run: Path):
    return load_file(run / "model" / "model.safetensors")


def start(words):
    return subprocess.Popen(
        line(words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def wait_for_step(run: Path, step: int, process) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        metrics = run / "metrics.jsonl"
        if metrics.is_file() and len(metrics.read_text().splitlines()) >= step:
            return
        if process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        time.sleep(0.02)
    raise AssertionError(f"no step {step} within ten minutes")


def wait_for_more(run: Path, process) -> None:
    """Until a run that begins anew has cut what was logged before, and does steps."""
    before = len(losses(run))

    def logged() -> int:
        with suppress(FileNotFoundError):  # put aside, and not begun anew yet
            return len(losses(run))
        return before

    while logged() >= before:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    wait_for_step(run, 3, process)


def test_two_ranks_train_like_one_and_one_process_can_resume_their_run(tmp_path, words, command):
    command("outpace", *words(tmp_path / "one", "--steps=6"), check=True)
    command(
        "outpace",
        *words(tmp_path / "two", "--steps=6", "--nproc=2", "--save-every=3", "--keep=9"),
        check=True,
    )
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    ours, theirs = weights(tmp_path / "two"), weights(tmp_path / "one")
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-5)
    # Take the two-rank run back to step 3 and finish it on one process: the same samples follow.
    for step in (6,):
        for file in (tmp_path / "two" / "checkpoints" / f"step-{step}").iterdir():
            file.unlink()
    command("outpace", *words(tmp_path / "two", "--steps=6", "--resume", "--nproc=1"), check=True)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


OPTIONS = [
    "--strategy=zero3 --offload-optimizer=cpu",
    "--strategy=3d --pp=2 --offload-parameters=cpu --precision=bf16 --eval-batches=2",
    "--strategy=zero3 --offload-activations=disk",
    "--strategy=tp --offload-activations=disk",
    "--strategy=1f1b --offload-activations=disk",
    "--strategy=zero2 --offload-optimizer=disk",
    "--strategy=zero3 --offload-parameters=cpu --offload-optimizer=disk",
    "--strategy=zero3 --offload-parameters=disk",
    "--strategy=zero1 --offload-optimizer=cpu",
    "--strategy=tp --offload-optimizer=cpu",
    "--strategy=1f1b --offload-optimizer=cpu",
    "--strategy=zero3 --precision=bf16-master",
    "--strategy=zero2 --optimizer=adamw-8bit --precision=bf16",
    "--strategy=zero3 --optimizer=muon",
    "--strategy=zero3 --lora-rank=4 --init=random",
]


@pytest.mark.parametrize(
    "options",
    OPTIONS[:3] + [pytest.param(one, marks=pytest.mark.slow) for one in OPTIONS[3:]],
)
def test_two_ranks_resume_bit_for_bit_with_all_options(tmp_path, words, command, options):
    """With an offloaded optimizer, shards went back to the weights of the start.

    In pipelines with shards, the second batch of an evaluation waited for another dtype. Offloaded
    activations were refused where the model is laid out before it has weights.
    """
    given = [*options.split(), "--nproc=2", "--micro-batch=2", "--save-every=2"]
    command("outpace", *words(tmp_path / "whole", "--steps=4", *given), check=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "step-4")
    command("outpace", "train", f"--resume={tmp_path / 'part'}", check=True)
    resumed = {file.name: load_file(file) for file in (tmp_path / "part/model").glob("*.safet*")}
    assert resumed
    for name, tensors in resumed.items():
        expected = load_file(tmp_path / "whole" / "model" / name)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in tensors.items())


@pytest.mark.slow
def test_masked_tokens_are_weighted_over_the_whole_global_batch(tmp_path, words):
    """Ranks and micro-batches have different numbers of masked tokens; none may count more."""
    (tmp_path / "bert.json").write_text(
        '{"family": "bert", "layers": 1, "hidden": 32, "heads": 2, "vocab": 512, '
        '"max_positions": 64}'
    )
    model = f"--model={tmp_path / 'bert.json'}"
    one = do([*words(tmp_path / "one", "--steps=3"), model])
    assert one.returncode == 0, one.stderr
    two = do([*words(tmp_path / "two", "--steps=3", "--nproc=2", "--micro-batch=2"), model])
    assert two.returncode == 0, two.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    ours, theirs = weights(tmp_path / "two"), weights(tmp_path / "one")
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_training_under_torchrun_prints_only_json_on_stdout(tmp_path, words):
    flags = ("--steps=3", "--json", "--micro-batch=2", "--compress-gradients=bf16")
    done = do(words(tmp_path / "run", *flags), TORCHRUN)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["world_size"] == 2
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "accumulation 2 × data-parallel 2" in record["identity"]


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_and_exits_with_75(tmp_path, words):
    whole = do(words(tmp_path / "whole", "--steps=60", "--nproc=2"))
    assert whole.returncode == 0, whole.stderr
    process = start(words(tmp_path / "cut", "--steps=60", "--nproc=2"))
    wait_for_step(tmp_path / "cut", 5, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    done = len(losses(tmp_path / "cut"))
    assert 5 <= done < 60
    resumed = do(words(tmp_path / "cut", "--steps=60", "--nproc=2", "--resume"))
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    ours, theirs = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_run_that_is_trained_is_not_gone_on_with_until_that_has_ended(tmp_path, words):
    """Two queued jobs with one --out: the second would write over the first's files."""
    first = start(words(tmp_path / "run", "--steps=5000"))
    wait_for_step(tmp_path / "run", 3, first)
    again = words(tmp_path / "run", "--steps=5000", "--auto-resume", "--comm-timeout-s=1")
    refused = do(again)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert (
        f"another process is training in {tmp_path / 'run'} (process {first.pid} on "
        in refused.stderr
    )
    assert first.poll() is None
    second = start(words(tmp_path / "run", "--steps=5000", "--auto-resume"))
    while "waiting for up to 300 s for it to end" not in (line := second.stderr.readline()):
        assert line, second.communicate()
    first.kill()
    first.communicate()
    wait_for_more(tmp_path / "run", second)
    second.send_signal(signal.SIGTERM)
    _, errors = second.communicate(timeout=600)
    assert second.returncode == 75, errors
    steps = list(losses(tmp_path / "run"))
    assert steps == list(range(1, len(steps) + 1))
    assert not list((tmp_path / "run").glob(".outpace-*"))


SLOW = """
import time
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(512, 16), nn.Linear(16, 512))

    def forward(self, tokens):
        time.sleep(1.5)
        return self.layers(tokens)

def build():
    return Slow()
"""


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path, words):
    (tmp_path / "slow.py").write_text(SLOW)
    model = f"--model={tmp_path / 'slow.py'}:build"
    process = start([*words(tmp_path / "run", "--steps=50"), model])
    wait_for_step(tmp_path / "run", 1, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.7)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_kill_9_during_a_save_keeps_the_previous_checkpoint(tmp_path, words):
    """Saves at every step, so a kill at any moment lands in or beside one."""
    flags = ("--steps=30", "--save-every=1")
    whole = do(words(tmp_path / "whole", *flags))
    assert whole.returncode == 0, whole.stderr
    for kill_at in (4, 17):
        resume = ("--resume",) if (tmp_path / "cut" / "run.json").is_file() else ()
        process = start(words(tmp_path / "cut", *flags, *resume))
        wait_for_step(tmp_path / "cut", kill_at, process)
        time.sleep(0.003 * kill_at)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=600)
    resumed = do(words(tmp_path / "cut", *flags, "--resume"))
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    ours, theirs = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    partial = [p for p in (tmp_path / "cut" / "checkpoints").iterdir()
               if not (p / "complete.json").is_file()]  # fmt: skip
    assert partial == []


def test_a_terminal_that_closes_saves_and_ends_the_run(words, tmp_path):
    """As when a window or a connection over ssh is closed: the shell's group gets SIGHUP."""
    ours, theirs = os.openpty()
    begin = (
        "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.executable, sys.argv[1:])"
    )
    started = line(words(tmp_path / "run", "--steps=100000", "--save-every=100000"))
    process = subprocess.Popen(
        [sys.executable, "-c", begin, *started], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        until_s = time.monotonic() + 600
        while not ((tmp_path / "run" / "metrics.jsonl").is_file() and losses(tmp_path / "run")):
            with suppress(OSError):  # nothing was written since
                os.read(ours, 1 << 16)
            assert process.poll() is None and time.monotonic() < until_s
            time.sleep(0.05)
        os.close(ours)  # nobody holds the terminal any more
        assert process.wait(600) == 75
    finally:
        process.kill()
        process.wait()
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (saved / "complete.json").is_file()
    assert int(saved.name.removeprefix("step-")) == max(losses(tmp_path / "run"))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 40 MiB of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = tmp_path / "disk"
    mount.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(mount)]
    made = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=False)


def fill(disk, leave):
    """Take all but so many bytes of a disk, though a run may write to it meanwhile."""
    for _ in range(10):
        free = os.statvfs(disk)
        try:
            (disk / "filler").write_bytes(b"x" * (free.f_bavail * free.f_frsize - leave))
        except OSError:
            (disk / "filler").unlink()
        else:
            return
    pytest.fail("the disk could not be filled")


@pytest.mark.root
def test_a_full_disk_is_reported_and_leaves_no_partial_files(small_disk, words, command):
    command("outpace", *words(small_disk / "run", "--steps=6"), check=True)
    fill(small_disk, leave=64 << 10)
    again = command("outpace", *words(small_disk / "again", "--steps=6"))
    assert again.returncode == 2, again.stderr
    assert "full" in again.stderr
    assert "Traceback" not in again.stderr
    assert not (small_disk / "again").exists()


@pytest.mark.root
@pytest.mark.slow
def test_a_disk_that_fills_during_a_run_keeps_the_last_checkpoint(small_disk, words):
    """Training goes on without the checkpoints that do not fit, and says so."""
    process = start(words(small_disk / "run", "--steps=400", "--save-every=20", "--keep=2"))
    wait_for_step(small_disk / "run", 45, process)
    fill(small_disk, leave=400 << 10)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 2, errors
    assert "could not be saved" in errors
    assert "Traceback" not in errors
    assert not (small_disk / "run" / "model").exists()
    checkpoints = small_disk / "run" / "checkpoints"
    assert all((folder / "complete.json").is_file() for folder in checkpoints.iterdir())
