"""Work in a forked process, with limits: what it gives, and how each way to never end is ended."""

import os
import signal
import time

import psutil
import pytest

from outpace.data.isolation import IsolatedError, call_isolated, iterate_isolated
from outpace.records.errors import BadInputError

GIB = 1 << 30


def loop():
    while True:
        pass


def refuse():
    raise BadInputError("line 3 is no conversation")


def test_it_gives_what_the_work_gives_in_order():
    here = os.getpid()
    assert list(iterate_isolated(lambda: iter(range(1000)), 5, GIB)) == list(range(1000))
    assert call_isolated(os.getpid, 5, GIB) != here == os.getpid()


def test_it_raises_what_the_work_raises():
    with pytest.raises(BadInputError, match="line 3 is no conversation"):
        call_isolated(refuse, 5, GIB)
    with pytest.raises(ZeroDivisionError):
        call_isolated(lambda: 1 / 0, 5, GIB)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (loop, "not finished after 1 s of CPU time"),
        (lambda: "a" * (8 * GIB), "needs more than 1.00 GiB of memory"),
        (os.abort, "ended with SIGABRT"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended with SIGKILL"),
    ],
)
def test_it_ends_what_takes_too_much(work, said):
    with pytest.raises(IsolatedError, match=said):
        call_isolated(work, 1, GIB)


def test_waiting_is_not_computing_and_nothing_is_left():
    before = set(psutil.Process().children())  # of libraries that other tests loaded
    assert call_isolated(lambda: time.sleep(1.2), 1, GIB) is None
    first = iterate_isolated(lambda: iter([os.getpid(), loop()]), 1, GIB)
    with pytest.raises(IsolatedError):
        next(first)
    assert set(psutil.Process().children()) <= before
