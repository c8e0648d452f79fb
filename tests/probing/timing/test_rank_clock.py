"""Waiting for a device ends, though a collective never does. The events are no device's here."""

import time

import pytest
import torch.distributed as dist

from outpace.probing.timing.rank_clock import await_event


class Event:
    """Comes after so many seconds, or never."""

    def __init__(self, after_s):
        self.comes_s = time.monotonic() + after_s

    def query(self):
        return time.monotonic() >= self.comes_s


class Group:
    """Says whether it was aborted. A real one needs a second GPU."""

    def __init__(self):
        self.aborted = False

    def abort(self):
        self.aborted = True


def test_an_event_that_comes_is_waited_for():
    group, begin_s = Group(), time.monotonic()
    await_event(Event(0.1), 240.0, group)
    assert time.monotonic() - begin_s >= 0.1
    assert not group.aborted


def test_one_that_never_comes_aborts_the_group_and_is_an_error_of_communication():
    group, begin_s = Group(), time.monotonic()
    with pytest.raises(dist.DistError, match="did not finish within"):
        await_event(Event(float("inf")), 0.2, group)
    assert time.monotonic() - begin_s >= 0.2
    assert group.aborted
