"""What holds of all tests: none depends on how busy the machine is, or on what ran before it."""

import ast
import random
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

TESTS = Path(__file__).parent
_CLOCKS = {"monotonic", "perf_counter", "time"}
_HANG_LIMIT_S = 120  # a shorter time may pass while other work has the cores


def _short_limits(tree: ast.Module) -> Iterator[int]:
    """Lines that assert less than the hang limit of a difference of clock readings."""
    for one in (one.test for one in ast.walk(tree) if isinstance(one, ast.Assert)):
        for compared in (node for node in ast.walk(one) if isinstance(node, ast.Compare)):
            sides = [compared.left, *compared.comparators]
            for operator, less, more in zip(compared.ops, sides, sides[1:], strict=False):
                is_less = isinstance(operator, ast.Lt | ast.LtE) and _reads_clock(less)
                limit_s = more.value if isinstance(more, ast.Constant) else None
                if is_less and isinstance(limit_s, int | float) and limit_s < _HANG_LIMIT_S:
                    yield one.lineno


def _reads_clock(side: ast.expr) -> bool:
    """Whether this is the time since something, by a clock on the wall."""
    now = side.left if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Sub) else None
    return (
        isinstance(now, ast.Call)
        and isinstance(now.func, ast.Attribute)
        and now.func.attr in _CLOCKS
    )


def test_no_test_asserts_that_little_time_has_passed():
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        if any(f"{clock}() - " in path.read_text() for clock in _CLOCKS)
        for line in _short_limits(ast.parse(path.read_text()))
    ]
    assert not found, f"drop these limits, or use the time of a hang: {', '.join(found)}"
    planted = ast.parse("assert 0.1 <= time.monotonic() - began_s < 5")
    assert list(_short_limits(planted)) == [1]


def _short_waits(tree: ast.Module) -> Iterator[int]:
    """Lines of calls that end a process, or give it up, sooner than one that hangs."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if getattr(call.func, "attr", "") in ("run", "communicate", "wait", "join", "check_output"):
            limits = [one.value for one in call.keywords if one.arg == "timeout"]
            limits += call.args if call.func.attr in ("communicate", "wait") else []  # type: ignore[attr-defined]
            for one in limits:
                limit_s = one.value if isinstance(one, ast.Constant) else None
                if isinstance(limit_s, int | float) and limit_s < _HANG_LIMIT_S:
                    yield call.lineno


def test_no_process_is_given_up_soon():
    """A busy machine takes a minute for what takes a second: pytest's own limit ends what hangs."""
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("test_*.py"))
        if "subprocess" in path.read_text()
        for line in _short_waits(ast.parse(path.read_text()))
    ]
    assert not found, f"drop these limits, or use 600: {', '.join(found)}"
    assert list(_short_waits(ast.parse("done = subprocess.run(words, timeout=60)"))) == [1]
    assert list(_short_waits(ast.parse("process.wait(2)"))) == [1]


def test_no_test_lets_go_of_a_port_that_it_uses_later():
    word = "free_" + "port"
    found = [
        str(path.relative_to(TESTS))
        for path in sorted(TESTS.rglob("*.py"))
        if word in path.read_text()
    ]
    assert not found, f"use the fixture `hold_port`: {found}"


def test_examples_are_those_of_every_run(request):
    if request.config.getoption("--hypothesis-profile") != "explore":
        assert hypothesis.settings.default.derandomize


@pytest.mark.parametrize("_", range(2))
def test_numbers_are_those_of_every_order(_):
    found = random.random(), np.random.rand(), torch.rand(()).item()
    assert found == pytest.approx((0.8444218515, 0.5488135039, 0.4962565899))


def test_no_test_profiles_the_process_that_it_is_in():
    """Python 3.11 never left such a step where torch's compiler had run: the suite hung."""
    words = ("sys.set" + "profile", "sys.set" + "trace")
    found = [
        str(path.relative_to(TESTS))
        for path in sorted(TESTS.rglob("test_*.py"))
        if any(word in path.read_text() for word in words)
    ]
    assert not found, f"count in a process of its own, as optim/count_calls.py does: {found}"


def test_the_fork_server_has_the_environment_of_no_test(command):
    """pytest notes there at what it is: a fixture's beginning, or a test that may change it."""
    server = forkserver._forkserver._forkserver_pid
    command_line = Path(f"/proc/{server}/cmdline")
    while b"forkserver" not in command_line.read_bytes():  # a copy of this process until then
        time.sleep(0.01)
    environment = Path(f"/proc/{server}/environ").read_text().split("\0")
    [at] = [one for one in environment if one.startswith("PYTEST_CURRENT_TEST=")]
    assert at.endswith("(setup)")
