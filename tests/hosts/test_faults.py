"""Hosts and networks that fail under a training: it goes on, or all end in time and say who it was.

host-a is where commands are typed, and host-b is the one that fails.
"""

import json
import re
import time

import pytest

# Large enough to last while links are cut, small enough for two cores.
TINY = ("train", "--model", "outpace-tiny", "--seq-len", 32, "--global-batch", 4, "--sample-tokens",
        0, "--eval-batches", 1, "--precision", "fp32")  # fmt: skip
BOTH = "host-a:1,host-b:1"


def steps(run):
    try:
        return len((run / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def at_step(process, run, step, limit_s=120):
    until_s = time.monotonic() + limit_s
    while steps(run) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s, f"{steps(run)} steps of {step}"
        time.sleep(0.05)


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def alone(cluster, tmp_path):
    """What the training comes to when nothing happens."""

    def train(count):
        code, _, errors = cluster.run(
            *TINY, "--steps", count, "--nproc", 2, "--out", "alone", cwd=tmp_path
        )
        assert code == 0, errors
        return losses(tmp_path / "alone")

    return train


@pytest.mark.slow
def test_a_network_cut_of_four_seconds_costs_no_step(cluster, tmp_path, alone):
    process = cluster.start(*TINY, "--steps", 120, "--hosts", BOTH, "--out", "run", cwd=tmp_path)
    at_step(process, tmp_path / "run", 10)
    cluster.cut("host-b")
    before = steps(tmp_path / "run")
    time.sleep(4)
    assert steps(tmp_path / "run") <= before + 1, "it went on without its other rank"
    cluster.mend("host-b")
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert losses(tmp_path / "run") == alone(120)


@pytest.mark.slow
def test_a_permanent_network_cut_ends_every_rank_within_the_timeout(cluster, tmp_path):
    process = cluster.start(
        *TINY, "--steps", 5000, "--hosts", BOTH, "--comm-timeout-s", 10, "--out", "run",
        cwd=tmp_path,
    )  # fmt: skip
    at_step(process, tmp_path / "run", 5)
    cluster.cut("host-b")
    try:
        _, errors = process.communicate(timeout=600)
    finally:
        cluster.mend("host-b")
    assert process.returncode == 1
    assert "host-b was lost" in errors
    deadline_s = time.monotonic() + 60
    while cluster.left(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert not cluster.left(tmp_path), "ranks are left where nobody reaches them"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_continues_without_a_lost_host_and_readmits_it(cluster, tmp_path, alone):
    count = 6000  # some that are left when it is asked, every 30 s, whether the host is back
    process = cluster.start(
        *TINY, "--steps", count, "--save-every", 20, "--hosts", BOTH, "--min-nodes", 1,
        "--comm-timeout-s", 10, "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    at_step(process, tmp_path / "run", 25)
    cluster.cut("host-b")
    errors = ""
    try:
        while "resumes with 1" not in errors:
            line = process.stderr.readline()
            assert line, errors
            errors += line
        went_on = steps(tmp_path / "run")
        at_step(process, tmp_path / "run", went_on + 5)
    finally:
        cluster.mend("host-b")
    while "resumes with 2" not in errors:
        line = process.stderr.readline()
        assert line, errors
        errors += line
    _, rest = process.communicate(timeout=600)
    errors += rest
    assert process.returncode == 0, errors
    assert "host-b was lost" in errors and "host-b is back and rejoins" in errors
    assert "(restart 1 of 3)" in errors
    found = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in found] == list(range(1, count + 1))
    assert [one["samples"] for one in found] == [4 * step for step in range(1, count + 1)]
    # Another number of ranks adds in another order: as near as sums of floats stay for a while.
    assert losses(tmp_path / "run")[:200] == pytest.approx(alone(count)[:200], abs=5e-3)


@pytest.mark.slow
def test_training_survives_the_loss_of_the_rendezvous_host(cluster, tmp_path):
    process = cluster.start(
        *TINY, "--steps", 400, "--save-every", 20, "--hosts", "host-b:1,host-a:1", "--min-nodes",
        1, "--comm-timeout-s", 10, "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    at_step(process, tmp_path / "run", 25)
    cluster.cut("host-b")
    try:
        _, errors = process.communicate(timeout=600)
    finally:
        cluster.mend("host-b")
    assert process.returncode == 0, errors
    assert "host-b was lost" in errors
    assert steps(tmp_path / "run") == 400


@pytest.mark.slow
def test_a_slow_network_link_is_reported(cluster, tmp_path):
    spec = {"family": "gpt2", "layers": 1, "hidden": 256, "heads": 4, "vocab": 8192,
            "max_positions": 64}  # fmt: skip
    (tmp_path / "model.json").write_text(json.dumps(spec))  # 12 MiB of gradients a step
    cluster.limit("200mbit")
    try:
        code, _, errors = cluster.run(
            "train", "--model", "model.json", *TINY[3:], "--steps", 20, "--hosts", BOTH, "--out",
            "run", cwd=tmp_path,
        )  # fmt: skip
    finally:
        cluster.limit(None)
    assert code == 0, errors
    assert re.search(r"network \d+ %", errors), errors


@pytest.mark.slow
def test_training_starts_with_fewer_hosts_if_min_nodes_allows_it(cluster, tmp_path):
    code, _, errors = cluster.run(
        *TINY, "--steps", 3, "--hosts", "host-a:1,host-c:1", "--min-nodes", 1, "--out", "run",
        cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, errors
    assert "host-c: cannot be reached" in errors and "Starting without it" in errors
    assert steps(tmp_path / "run") == 3


def test_elastic_training_refuses_an_output_folder_that_a_host_does_not_see(cluster, tmp_path):
    out = cluster.folder / "unseen" / "run"
    code, _, errors = cluster.run(
        *TINY, "--hosts", BOTH, "--min-nodes", 1, "--out", out, cwd=tmp_path
    )
    assert code == 2 and f"host-b: it does not see {out}" in errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--hosts", BOTH, "--min-nodes", 3, "--out", "x"), "--min-nodes 3"),
        (("--hosts", BOTH, "--min-nodes", 1), "so name its directory with --out"),
        (("--min-nodes", 1, "--out", "x"), "applies to several hosts"),
    ],
)
def test_contradictory_host_options_are_refused(cluster, tmp_path, words, said):
    code, _, errors = cluster.run("train", *words, cwd=tmp_path)
    assert code == 2 and said in errors


@pytest.mark.slow
def test_a_host_whose_clock_is_a_minute_off_is_refused(cluster, tmp_path):
    if not cluster.shift("host-b", "+60s"):
        pytest.skip("needs libfaketime (Debian: faketime)")
    try:
        code, _, errors = cluster.run(*TINY, "--hosts", BOTH, "--out", "run", cwd=tmp_path)
    finally:
        cluster.shift("host-b", None)
    assert code == 2 and re.search(
        r"host-b: its clock is off by (5\d|6\d) s. Synchronise it by NTP", errors
    )
