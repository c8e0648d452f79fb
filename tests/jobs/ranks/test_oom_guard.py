"""Memory that does not suffice: an answer on all ranks, and a command that trains."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from outpace.jobs.memory.trace_worker import Tracer, TraceRequest
from outpace.jobs.ranks.oom_guard import fragmentation_advice
from outpace.jobs.train.oom_message import changed_command
from outpace.records.errors import BadInputError
from outpace.records.model import ModelSpec
from outpace.records.plan import Plan
from outpace.records.settings import TrainSettings

LIMITED = Path(__file__).with_name("limited.py")
# About 530 MiB of activations, and 50 MiB of states, beside the process.
MODEL = """
family = "gpt2"
layers = 16
hidden = 128
heads = 2
vocab = 512
max_positions = 256
"""
BESIDE_MIB = 358  # what a run may have beside the process as it begins


@pytest.fixture(scope="module")
def limit_mib():
    """By what a process holds that does nothing: with torch for CUDA 130 MiB more than without."""
    code = "import outpace.jobs.train.job, outpace.probing.hardware.process_memory as memory; "
    code += "print(memory.anonymous_bytes())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return round(int(done.stdout) / 2**20) + BESIDE_MIB


@pytest.fixture
def words(tmp_path, corpus, token_cache):
    model = tmp_path / "model.toml"
    model.write_text(MODEL)
    return [
        "train", "--model", str(model), "--data", str(corpus), "--cache-dir", str(token_cache),
        "--seq-len", "256", "--global-batch", "16", "--steps", "2", "--eval-batches", "1",
        "--loss", "plain", "--sample-tokens", "0", "--threads", "1", "--precision", "fp32",
        "--out", str(tmp_path / "run"),
    ]  # fmt: skip


def outpace(mode, words, **options):
    return subprocess.run(
        [sys.executable, str(LIMITED), mode, *words],
        capture_output=True, text=True, check=False, **options,
    )  # fmt: skip


def pasted(message):
    """The arguments of the first command in a message."""
    (line, *_) = re.findall(r"^ +outpace (train .*)$", message, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.timeout(550)
@pytest.mark.parametrize("account", ["stand-in", pytest.param("traced", marks=pytest.mark.slow)])
def test_a_run_out_of_memory_trains_with_the_settings_that_its_message_proposes(
    account, words, tmp_path, limit_mib
):
    plain = outpace(account, [*words, "--memory-limit", f"{limit_mib}MiB"])
    assert plain.returncode == 4, plain.stderr
    assert "Traceback" not in plain.stderr
    assert "predicted to need" in plain.stderr
    assert (
        len(re.findall(r"^\d\. .*: [0-9.]+ MiB, \d+% (?:slow|fast)er", plain.stderr, re.MULTILINE))
        == 3
    )
    assert not (tmp_path / "run").exists()
    again = outpace(account, [*pasted(plain.stderr), "--json"])
    assert again.returncode == 0, again.stderr
    measured = json.loads(again.stdout)
    assert measured["steps"] == 2
    assert measured["final_loss"] < measured["first_loss"] + 1


@pytest.fixture
def control_group():
    """A group of processes that the kernel ends beyond 560 MiB, of version 1 or 2."""
    for mounted, name in (("memory", "memory.limit_in_bytes"), (".", "memory.max")):
        group = Path("/sys/fs/cgroup", mounted, f"outpace-test-{os.getpid()}")
        try:
            group.mkdir()
            (group / name).write_text(str(560 << 20))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no control group for memory can be made here")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(550)
def test_the_proposed_plan_fits_in_the_memory_limit(control_group, words):
    """Within a control group, the tracing process's memory included."""
    enter = lambda: (control_group / "cgroup.procs").write_text(str(os.getpid()))  # noqa: E731
    plain = outpace("traced", words, preexec_fn=enter)
    assert plain.returncode == 4, plain.stderr
    assert "a step is predicted to need" in plain.stderr
    assert "of the control group's limit" in plain.stderr
    blind = outpace("blind", words, preexec_fn=enter)
    assert blind.returncode == 4, blind.stderr
    assert (
        "the control group's limit is 560.00 MiB minus 64.00 MiB for a clean shutdown"
        in blind.stderr
    )
    again = outpace("traced", [*pasted(plain.stderr), "--json"], preexec_fn=enter)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["steps"] == 2


@pytest.mark.slow
def test_a_memory_trace_ends_when_training_needs_the_memory():
    """What it took is free at once; who waits is told, and the next is traced again."""
    ask = TraceRequest(
        spec=ModelSpec.parse(tomllib.loads(MODEL), "test"), plan=Plan(), seq_len=8, accumulation=1,
        rank=0, settings=TrainSettings(), accelerator=None, ranks_per_host=1,
    )  # fmt: skip
    tracer = Tracer()
    assert not tracer.give_up()
    first = tracer(ask)
    asking = threading.Timer(0.2, tracer.give_up)
    asking.start()
    with pytest.raises(BadInputError, match="could not be traced: the tracing process ended"):
        while True:
            tracer(ask)
    assert tracer(ask) == first
    assert tracer.give_up()
    tracer.close()


def test_memory_growth_beyond_the_limit_ends_the_run_and_lists_what_holds_it(
    words, tmp_path, limit_mib
):
    done = outpace("blind", [*words, "--memory-limit", f"{limit_mib}MiB"])
    assert done.returncode == 4, done.stderr
    assert "rank 0 needs more memory than it may use" in done.stderr
    assert f"but --memory-limit is {limit_mib}.00 MiB" in done.stderr
    for kind in ("weights", "activations and buffers", "the process itself"):
        assert re.search(rf"^  {kind} +[0-9.]+ MiB$", done.stderr, re.MULTILINE), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("ours", [True, False], ids=["our launcher", "another"])
def test_all_ranks_end_when_one_is_out_of_memory(words, tmp_path, ours, hold_port):
    """Rank 0 waits in an exchange for rank 1, which is out of memory in its second step."""
    port = str(hold_port())
    more = ["--strategy", "ddp", "--save-every", "1", "--memory-limit", "700MiB"]
    began_s = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(LIMITED), "hog", *words, "--global-batch", "2", *more],
            stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                 "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                 **({"TORCHELASTIC_RUN_ID": "outpace-x"} if ours else {})},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=600)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [4, 4], said
    assert "Traceback" not in said[0] + said[1]
    if not ours:
        assert "rank 1 needs more memory than it may use" in said[0]
    assert time.monotonic() - began_s < 150
    # What was saved before is whole; nothing else is left.
    (kept,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (kept / "complete.json").is_file()


@pytest.mark.gpu
def test_out_of_memory_on_cuda_ends_with_a_message(words, tmp_path):
    done = outpace("blind", [*words, "--device", "cuda", "--memory-limit", "300MiB"])
    assert done.returncode == 4, done.stderr
    assert "rank 0's device is out of memory: tried to allocate" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_proposed_command_replaces_the_settings_that_it_changes():
    command = ["outpace", "train", "--micro-batch", "8", "--data", "a b", "--checkpointing=full"]
    origins = {"micro_batch": "command line"}
    change = {"micro_batch": 4, "checkpointing": "none"}
    assert changed_command(command, origins, change, None) == (
        "outpace train --data 'a b' --micro-batch 4 --checkpointing none"
    )
    assert changed_command(command, origins, {"micro_batch": 4}, Path("runs/x")) == (
        "outpace train --data 'a b' --checkpointing=full --micro-batch 4 --out runs/x --resume"
    )
    assert changed_command(["x.py"], {"out": "python"}, {"loss": "plain"}, None) == (
        "outpace.train(…, loss='plain')"
    )


def test_memory_fragmentation_is_named_if_it_is_the_cause():
    gib = 2**30
    assert fragmentation_advice(60 * gib, 62 * gib, False) == ""
    assert fragmentation_advice(50 * gib, 62 * gib, True) == ""
    said = fragmentation_advice(50 * gib, 62 * gib, False)
    assert "12.00 GiB" in said and "PYTORCH_ALLOC_CONF=expandable_segments:True" in said
