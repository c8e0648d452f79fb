"""What is recorded of a torch and a Python, and how it is shown."""

import json
from pathlib import Path

import pytest

ABOUT = {
    "torch": "2.11.0+cu130", "python": "3.12.1", "versions": {"transformers": "5.17.0"},
    "machine": {"cpu": "some cores"}, "date": "2026-11-27T10:00:00", "commit": "abc",
    "uncommitted_changes": False, "command": ["scripts/test-torch", "2.11.0"],
}  # fmt: skip
IMPORTS = {"modules": 4, "failures": ["outpace.x: ImportError: no y"], "passed": False}
TESTS = {"nn": {"run": 7, "skipped": 1, "failures": [], "passed": True}}


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import torch_versions

    return torch_versions


def test_parts_are_recorded_one_by_one_for_each_torch_and_python(module, tmp_path):
    path = tmp_path / "found.json"
    module.record("imports", IMPORTS, ABOUT, path)
    module.record("tests/nn", TESTS["nn"], {**ABOUT, "commit": "def"}, path)
    module.record("tests/nn", TESTS["nn"], {**ABOUT, "torch": "2.9.1+cpu"}, path)
    older, entry = json.loads(path.read_text())["entries"]
    assert older["torch"] == "2.9.1+cpu" and older["imports"] is None  # 2.9 is before 2.11
    assert (entry["imports"], entry["tests"], entry["verify"]) == (IMPORTS, TESTS, None)
    assert [one["commit"] for one in entry["recorded"].values()] == ["abc", "def"]

    module.record("tests/optim", TESTS["nn"], ABOUT, path)
    entry = json.loads(path.read_text())["entries"][1]
    assert entry["tests"] == {**TESTS, "optim": TESTS["nn"]}
    assert list(entry["recorded"]) == ["imports", "tests/nn", "tests/optim"]

    module.record("verify", {"passed": True}, {**ABOUT, "versions": {"transformers": "6"}}, path)
    entry = json.loads(path.read_text())["entries"][1]
    assert entry["imports"] is None and list(entry["recorded"]) == ["verify"]


def test_the_results_of_one_part_are_no_uncommitted_change_of_the_next(
    module, monkeypatch, tmp_path
):
    path = tmp_path / "found.json"

    def circumstances():  # as git says it: changed as soon as a result is written
        return {**ABOUT, "uncommitted_changes": path.exists()}

    monkeypatch.setattr(module, "circumstances", circumstances)
    monkeypatch.setattr(module, "PARTS", {
        "imports": lambda: IMPORTS, "verify": lambda: {}, "tests/nn": lambda: TESTS["nn"]
    })  # fmt: skip
    monkeypatch.setattr("sys.argv", ["torch_versions.py", f"--out={path}", "--only=imports,tests"])
    assert module.main() == 1  # a module could not be imported
    (entry,) = json.loads(path.read_text())["entries"]
    assert [one["uncommitted_changes"] for one in entry["recorded"].values()] == [False, False]
    assert all(one["date"] > ABOUT["date"] for one in entry["recorded"].values())


def test_what_failed_is_found_in_every_part(module):
    assert module.failed(IMPORTS) == IMPORTS["failures"]
    assert module.failed(TESTS) == [] == module.failed(None)
    assert module.failed({"nn": {"passed": False, "failures": ["t: x"]}}) == ["nn: t: x"]


def test_the_table_says_what_did_not_run_and_what_failed(module, tmp_path):
    from figures_versions import torch_versions

    path = tmp_path / "found.json"
    module.record("imports", IMPORTS, ABOUT, path)
    module.record("tests/nn", TESTS["nn"], ABOUT, path)
    shown = torch_versions(json.loads(path.read_text()))
    row = "| 2.11.0+cu130 | 3.12.1 | 5.17.0 | 3 of 4 | not run | not run | 7 of 7 (nn) |"
    assert row in shown
    assert "- torch 2.11.0+cu130, Python 3.12.1: outpace.x: ImportError: no y\n" in shown


def test_junit_files_are_counted(module, tmp_path):
    told = tmp_path / "junit.xml"
    told.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><skipped/></testcase>"
        "<testcase name='c'><failure message='AssertionError: 1 is not 2&#10;more'/></testcase>"
        "</testsuite></testsuites>"
    )
    counted = {"run": 2, "skipped": 1, "failures": ["c: AssertionError: 1 is not 2"]}
    assert module.counted(told) == counted


def test_one_kind_of_training_is_tried_as_it_is_recorded(module, tmp_path):
    options = module.kinds(tmp_path)
    found = module.train([*options["labels"], "--steps=3"])
    assert found["passed"], found
    assert found["final_loss"] < found["initial_loss"]
    assert not module.train(["--model=no-such-model"])["passed"]
