"""Under torch's own elastic agents: processes end and begin again beside a store that stays."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
LIMIT_S = 900
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TRAINING = ("--model", "outpace-tiny", "--seq-len", 32, "--global-batch", 8, "--eval-batches", 0,
            "--sample-tokens", 0, "--precision", "fp32", "--threads", 1, "--device",
            "cpu")  # fmt: skip


def start(cwd, said, *words):
    """A process that writes what it says into the file `said`."""
    with said.open("w") as file:
        return subprocess.Popen(
            list(map(str, words)), cwd=cwd, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def end(processes):
    """End them, and what they started, in so far as it is there."""
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(one.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)  # also those of an agent that has ended
        one.wait()


def test_ranks_of_several_agents_find_each_other_after_a_restart(
    tmp_path, corpus, token_cache, hold_port
):
    """An agent counts no restart that another one's rank was the cause of."""
    metrics, port = tmp_path / "run" / "metrics.jsonl", hold_port()

    def steps():
        return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0

    def wait_for_steps(count):
        until_s = time.monotonic() + LIMIT_S
        while steps() < count:
            ended = [one for one in agents if one.poll() is not None]
            assert not ended and time.monotonic() < until_s, (
                steps(), [path.read_text()[-10_000:] for path in said],
            )  # fmt: skip
            time.sleep(0.05)

    said = [tmp_path / f"agent-{number}.txt" for number in range(2)]
    agents = [
        start(tmp_path, path, *TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1,
              "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}",
              "--rdzv-id", "job", "--max-restarts", 1,
              "-m", "outpace", "train", *TRAINING, "--data", corpus, "--cache-dir", token_cache,
              "--steps", 100_000, "--save-every", 4, "--comm-timeout-s", 20, "--out", "run",
              "--auto-resume")
        for path in said
    ]  # fmt: skip
    try:
        wait_for_steps(8)
        (victim,) = (child for one in agents for child in psutil.Process(one.pid).children()
                     if child.environ().get("RANK") == "1")  # fmt: skip
        victim.send_signal(signal.SIGKILL)
        victim.wait(LIMIT_S)
        wait_for_steps(steps() + 20)  # more than were on their way
    finally:
        end(agents)


TWICE = """
import sys
import outpace

if __name__ == "__main__":
    data, cache = sys.argv[1:]
    for out in ("first", "second"):
        outpace.train(
            model="outpace-tiny", data=data, cache_dir=cache, seq_len=32, global_batch=8, steps=2,
            eval_batches=0, sample_tokens=0, precision="fp32", threads=1, device="cpu", out=out,
            comm_timeout_s=20,
        )
"""


def test_a_script_trains_twice_in_one_job(tmp_path, corpus, token_cache, hold_port):
    (tmp_path / "twice.py").write_text(TWICE)
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(hold_port()), "twice.py",
         str(corpus), str(token_cache)],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / out / "result.json").is_file() for out in ("first", "second"))
