"""Asking hosts whether a training can be started: this one is asked, through its own agent."""

from pathlib import Path

import pytest

from outpace.launch.preflight import HostCheck, check_hosts, remote
from outpace.records.errors import BadInputError
from outpace.records.hosts import Host, HostFacts, HostQuery

HERE = Host(name="localhost", slots=2)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> HostCheck:
    """What this host says when nothing stands against it."""
    out = tmp_path_factory.mktemp("shared") / "run"
    (found,) = check_hosts([HERE], HostQuery(folder=str(Path.cwd())), out)
    assert not list(out.parent.iterdir())  # the token is gone
    return found


def test_a_host_that_can_train_says_what_it_has(answer):
    assert answer.ready and answer.problems == []
    assert (
        answer.facts is not None and {"python", "outpace", "torch"} <= answer.facts.versions.keys()
    )


@pytest.mark.parametrize("name", ["python", "outpace", "torch"])
def test_another_version_stands_against_it(answer, name, tmp_path):
    facts: HostFacts = answer.facts
    other = facts.model_copy(update={"versions": {**facts.versions, name: "0.1"}})
    like = HostCheck(Host(name="other", slots=2), other)
    (found,) = check_hosts([HERE], HostQuery(folder=str(Path.cwd())), tmp_path / "run", like)
    (problem,) = found.problems
    assert not found.ready
    assert problem == (
        f"localhost: it has {name} {facts.versions[name]}, but other has 0.1. "
        "Install the same version"
    )


def test_a_path_that_is_not_there_is_named(tmp_path):
    missing = str(tmp_path / "no-such-corpus")
    asked = HostQuery(folder=str(Path.cwd()), seen=(missing, str(tmp_path)))
    (found,) = check_hosts([HERE], asked, tmp_path / "run")
    assert found.problems == [f"localhost: there is no {missing}"]


def test_where_nothing_can_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="cannot write there"):
        check_hosts([HERE], HostQuery(folder=str(Path.cwd())), tmp_path / "file" / "run")


def test_a_host_looks_for_outpace_where_this_one_has_it(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/shared/out pace")
    other = remote(Host(name="other", slots=2), Path("/shared/work"), "check")[-1]
    assert other.startswith("cd /shared/work && exec env 'PYTHONPATH=/shared/out pace' ")
    monkeypatch.delenv("PYTHONPATH")
    assert "env" not in remote(Host(name="other", slots=2), Path("/shared"), "check")[-1].split()
