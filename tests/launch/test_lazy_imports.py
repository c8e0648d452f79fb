"""Garbage is not looked for while modules load, and is again after."""

import gc
import sys

import pytest

from outpace.launch.lazy_imports import import_quickly


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    gc.unfreeze()
    gc.enable()


def test_what_was_loaded_is_never_looked_through(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = gc.get_freeze_count()
    with import_quickly():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)


def test_where_torch_was_there_nothing_is_kept():
    import torch  # noqa: F401

    before = gc.get_freeze_count()
    with import_quickly():
        pass
    assert gc.isenabled() and gc.get_freeze_count() == before


def test_garbage_is_looked_for_again_after_a_failure_and_only_if_it_was():
    with pytest.raises(ImportError), import_quickly():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with import_quickly():
        pass
    assert not gc.isenabled()
