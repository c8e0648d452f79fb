"""`outpace train --hosts`: typed on one host, run on all."""

import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from outpace.cli.main import main

TINY = ("--model", "outpace-tiny", "--seq-len", 32, "--global-batch", 4, "--sample-tokens", 0,
        "--eval-batches", 1)  # fmt: skip
BOTH = "host-a:1,host-b:1"


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def begun(process, path):
    """Wait until a file is there, with something in it."""
    while not path.exists() or path.stat().st_size == 0:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def ended_everywhere(cluster, cwd):
    deadline_s = time.monotonic() + 20
    while cluster.left(cwd) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return not cluster.left(cwd)


def test_two_hosts_train_like_two_processes_on_one(cluster, tmp_path):
    words = ["train", *TINY, "--steps", 4]
    code, output, errors = cluster.run(
        *words, "--hosts", BOTH, "--out", "two", "--json", cwd=tmp_path
    )
    assert code == 0, errors
    assert json.loads(output)["steps"] == 4
    code, _, errors = cluster.run(*words, "--nproc", 2, "--out", "one", cwd=tmp_path)
    assert code == 0, errors
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    (kept,) = (tmp_path / "runs").glob("output-*")
    assert output.splitlines()[-1] in (kept / "rank-0.txt").read_text().splitlines()
    assert ended_everywhere(cluster, tmp_path)


def test_all_hosts_that_are_not_ready_are_named_before_the_start(cluster, tmp_path):
    out = cluster.folder / "unseen" / "run"
    code, _, errors = cluster.run(
        "train", *TINY, "--hosts", f"{BOTH},host-c:1", "--out", out, cwd=tmp_path
    )
    assert code == 2
    assert "the hosts are not ready, so nothing was started" in errors
    assert f"host-b: it does not see {out}" in errors
    assert "host-c: cannot be reached: ssh: Could not resolve hostname host-c" in errors
    assert "host-a" not in errors
    assert not (tmp_path / "runs").exists() and not out.exists()


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["train", "--hosts", BOTH, "--out", "file/run"]) == 2
    assert "--out file/run: cannot write there" in capsys.readouterr().err


def test_the_host_that_lacks_the_data_is_named(cluster, tmp_path):
    data = cluster.folder / "unseen" / "text.txt"
    data.write_text("a text " * 1000)
    code, _, errors = cluster.run(
        "train", *TINY, "--data", data, "--hosts", BOTH, "--out", "run", cwd=tmp_path
    )
    assert code == 2 and f"host-b: there is no {data}" in errors and "host-a" not in errors


@pytest.mark.slow
def test_a_killed_rank_is_named_with_its_host(cluster, tmp_path):
    process = cluster.start(
        "train", *TINY, "--steps", 500, "--hosts", "host-b:2", "--out", "run", cwd=tmp_path
    )
    begun(process, tmp_path / "run" / "metrics.jsonl")
    ranks = [one for one in cluster.left(tmp_path) if one.environ().get("RANK") == "1"]
    ranks[0].send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGKILL
    assert re.search(
        "rank 1 on host-b was killed by SIGKILL .*; the other ranks were stopped", errors
    )
    assert ended_everywhere(cluster, tmp_path)


@pytest.mark.slow
def test_a_host_that_cannot_reach_the_rendezvous_port_is_named(cluster, tmp_path):
    """And not the first host, which waits for it in vain and is ended."""
    with cluster.behind_a_firewall("host-b"):
        code, _, errors = cluster.run(
            "train", *TINY, "--steps", 4, "--hosts", BOTH, "--out", "run", cwd=tmp_path
        )
    assert code != 0
    assert "host-b: " in errors and "cannot reach the rendezvous at" in errors
    assert "host-a: stopped" not in errors
    assert ended_everywhere(cluster, tmp_path)


@pytest.mark.slow
def test_hosts_can_be_kept_in_reserve(cluster, tmp_path):
    code, _, errors = cluster.run(
        "train", *TINY, "--steps", 4, "--hosts", BOTH, "--max-nodes", 1, "--out", "run",
        cwd=tmp_path
    )  # fmt: skip
    assert code == 0, errors
    assert "on host-a of 2 hosts" in errors and len(losses(tmp_path / "run")) == 4


@pytest.mark.slow
def test_a_mistake_on_all_hosts_is_shown_once_without_a_traceback(cluster, tmp_path):
    code, _, errors = cluster.run(
        "train", *TINY, "--hosts", BOTH, "--out", "run", "--strategy", "tp", "--tp", 3, cwd=tmp_path
    )
    assert code == 2 and "Traceback" not in errors and "tp 3, but there are 2" in errors


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_all_hosts(cluster, tmp_path):
    process = cluster.start(
        "train", *TINY, "--steps", 5000, "--hosts", BOTH, "--out", "run", cwd=tmp_path
    )
    begun(process, tmp_path / "run" / "metrics.jsonl")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    assert "outpace train --resume run" in errors, errors[-600:]
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert ended_everywhere(cluster, tmp_path)


def listening(process):
    """Addresses on which something listens where a process is, but for ssh."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()[1:]:
            (address, port), state = line.split()[1].split(":"), line.split()[3]
            if state == "0A" and int(port, 16) != 22:
                four = address.removeprefix("0000000000000000FFFF0000")
                found.add(socket.inet_ntoa(bytes.fromhex(four)[::-1]) if len(four) == 8 else four)
    return found


@pytest.mark.slow
def test_each_host_listens_only_on_its_own_address(cluster, tmp_path):
    folder = tmp_path / "a 'b\" $(touch hacked);touch hacked"
    folder.mkdir()
    process = cluster.start(
        "train", *TINY, "--steps", 5000, "--hosts", BOTH, "--out", "run", cwd=folder
    )
    begun(process, folder / "run" / "metrics.jsonl")
    ranks = [one for one in cluster.left(folder) if "RANK" in one.environ()]
    seen = {one.environ()["RANK"]: listening(one) for one in ranks}
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    assert seen == {"0": {cluster.hosts[0].address}, "1": {cluster.hosts[1].address}}
    assert not list(tmp_path.rglob("hacked"))
    assert ended_everywhere(cluster, folder)


@pytest.mark.slow
def test_no_process_stays_behind_when_the_launcher_is_killed(cluster, tmp_path):
    process = cluster.start(
        "train", *TINY, "--steps", 5000, "--hosts", BOTH, "--out", "run", cwd=tmp_path
    )
    begun(process, tmp_path / "run" / "metrics.jsonl")
    process.kill()
    process.communicate(timeout=600)
    assert ended_everywhere(cluster, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--hosts", "a;rm -rf x:4"), "'a;rm -rf x' is not the name of a host"),
        (("--hosts=-oProxyCommand=x:4",), "is not the name of a host"),
        (("--hosts", "a"), "'a' does not give a number of ranks. Write a:4"),
        (("--hosts", "a:0"), "'0' is not a number of ranks"),
        (("--hosts", "a:1,a:1"), "names a twice"),
        (("--hosts", "a:1", "--nproc", 2), "--hosts and --nproc cannot be combined"),
        (("--hostfile", "none.txt"), "cannot be read: No such file"),
    ],
)
def test_a_bad_list_of_hosts_is_refused(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *map(str, words)]) == 2
    assert said in capsys.readouterr().err
