"""Which signals that ask to end are outpace's to handle."""

import os
import signal
import threading

import pytest

from outpace.records.signals import ENDING, defer_signals, may_handle
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


class EndingError(Exception):
    """What a handler raises."""


def end(number, frame):
    raise EndingError(number)


def test_a_signal_during_a_fork_ends_the_process_after_it(handled):
    """Python prints and forgets what a handler raises in what is run around a fork."""
    handled(signal.SIGTERM, end)
    forked = []

    def receive():
        """Receive it in this thread, as a library's may, whatever the main thread blocks."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    with pytest.raises(EndingError), defer_signals():
        receiver = threading.Thread(target=receive)
        receiver.start()
        receiver.join()
        forked.append(os.fork())
        if forked == [0]:
            os._exit(0)
    assert os.waitpid(forked[0], 0)[1] == 0
    assert signal.getsignal(signal.SIGTERM) is end


def test_deferred_handlers_are_as_before_without_a_signal(handled):
    handled(signal.SIGTERM, end)
    handled(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in ENDING]
    with defer_signals():
        assert signal.getsignal(signal.SIGTERM) is not end
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert [signal.getsignal(number) for number in ENDING] == before
