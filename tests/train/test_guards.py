"""The same bits each time, on a GPU where that is asked for, and signals that end a run."""

import signal
import threading
from contextlib import contextmanager

import pytest
import torch

from outpace.launch.job import prepared
from outpace.records.errors import BadInputError, InterruptedRunError
from outpace.records.ranks import Ranks
from outpace.records.settings import TrainSettings
from outpace.train.guards import StopSignal, deterministic_kernels

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_a_gpu_is_kept_to_kernels_that_repeat_themselves_for_as_long_as_it_trains():
    environ = {}
    with deterministic_kernels(True, GPU, environ):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    with deterministic_kernels(True, GPU, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"} | environ):
        pass


@pytest.mark.parametrize(("wanted", "device"), [(False, GPU), (True, CPU)])
def test_elsewhere_nothing_changes(wanted, device):
    environ = {}
    with deterministic_kernels(wanted, device, environ):
        assert not torch.are_deterministic_algorithms_enabled()
    assert environ == {}


def test_an_operator_without_such_a_kernel_is_named():
    with (
        pytest.raises(BadInputError, match=r"--deterministic: put_ .* Leave it out"),
        deterministic_kernels(True, GPU, {}),
    ):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
    with pytest.raises(RuntimeError, match="another"), deterministic_kernels(True, GPU, {}):
        raise RuntimeError("another")
    assert not torch.are_deterministic_algorithms_enabled()


def compile_badly():
    """As compilers do, which take what is raised within them for their own failure."""
    try:
        signal.raise_signal(signal.SIGTERM)
    except Exception:
        pytest.fail("the signal was taken for a failure")


def test_a_signal_ends_one_process_within_a_compiler():
    with StopSignal() as stop:
        stop.stepping = True
        with pytest.raises(InterruptedRunError, match="nothing was trained"):
            stop.unless_ended(compile_badly)
        assert stop.requested
    with StopSignal() as stop:
        stop.stepping = True
        assert stop.unless_ended(lambda: "done") == "done"
        signal.raise_signal(signal.SIGTERM)  # of a later step: it is finished
        assert stop.requested


@pytest.mark.parametrize("at", ["first step", "initial evaluation", "second step"])
def test_a_run_ends_within_its_first_step_and_saves_in_later_ones(tmp_path, monkeypatch, at):
    (tmp_path / "model.json").write_text(
        '{"family": "gpt2", "layers": 1, "hidden": 16, "heads": 2, "vocab": 300, '
        '"max_positions": 16}'
    )
    (tmp_path / "text.txt").write_text("a few words of a text to learn\n" * 400)
    values = {
        "model": str(tmp_path / "model.json"), "data": [str(tmp_path / "text.txt")], "seq_len": 8,
        "steps": 4, "global_batch": 2, "device": "cpu", "out": tmp_path / "run", "compile": False,
        "cache_dir": tmp_path / "cache", "sample_tokens": 0,
    }  # fmt: skip
    if at == "initial evaluation":
        monkeypatch.setattr(
            "outpace.launch.assemble._evaluate", lambda *_: compile_badly() or pytest.fail()
        )
    done = []

    @contextmanager
    def around(step, batches):
        if step == (1 if at == "first step" else 2):
            compile_badly()
        yield
        done.append(step)

    def train():
        settings = TrainSettings.parse(values, "test")
        with prepared(settings, ranks=Ranks(), origins={}, command=[]) as ready:
            ready.loop.around = around
            ready.run()

    with pytest.raises(InterruptedRunError) as ended:
        train()
    if at == "second step":
        assert done == [1, 2] and "saved after step 2 of 4" in str(ended.value)
    else:
        assert done == [] and "nothing was trained" in str(ended.value)
        assert not (tmp_path / "run").exists()


def test_who_waits_for_a_step_is_told_what_is_waited_for(monkeypatch):
    monkeypatch.setattr("outpace.train.guards._SAID_AFTER_S", 0.0)
    heard, told = [], threading.Event()
    with StopSignal(lambda sentence: (heard.append(sentence), told.set())) as stop:
        stop.stepping = True
        signal.raise_signal(signal.SIGTERM)
        assert told.wait(30)
        assert "A second signal, or Ctrl-C, ends at once" in heard[0]
    monkeypatch.setattr("outpace.train.guards._SAID_AFTER_S", 1e6)
    with StopSignal(heard.append) as stop:
        stop.stepping = True
        signal.raise_signal(signal.SIGTERM)
    assert len(heard) == 1 and stop._say.finished.is_set()
