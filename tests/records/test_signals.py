"""Which signals that ask to end are outpace's to handle."""

import signal

import pytest

from outpace.records.signals import ENDING, may_handle
from outpace.training.guards import StopSignal


@pytest.fixture
def handled():
    """Sets handlers, and puts back those of before."""
    before = {}

    def handle(number, handler):
        before.setdefault(number, signal.signal(number, handler))

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_the_parent_has_ignored_stays_ignored(handled):
    for number in ENDING:
        handled(number, signal.SIG_IGN)
        assert not may_handle(number), number


def test_a_users_own_handler_of_an_announcement_stays(handled):
    """submitit puts its job back into the queue by SIGUSR2."""
    heard = []

    def requeue(number, frame):
        heard.append(number)

    handled(signal.SIGUSR2, requeue)
    handled(signal.SIGUSR1, signal.SIG_DFL)
    with StopSignal() as stop:
        stop.stepping = True
        signal.raise_signal(signal.SIGUSR2)
        assert heard == [signal.SIGUSR2]
        assert not stop.requested
        signal.raise_signal(signal.SIGUSR1)
        assert stop.requested
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR2) is requeue
