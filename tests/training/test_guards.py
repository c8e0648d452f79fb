"""The same bits each time, on a GPU where that is asked for, and signals that end a run."""

import ctypes
import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from outpace.jobs.ranks.process_groups import Groups
from outpace.jobs.train.context import RunContext
from outpace.jobs.train.job import prepare_run, train
from outpace.records.errors import BadInputError, InterruptedRunError
from outpace.records.settings import TrainSettings
from outpace.training.callbacks import Callback
from outpace.training.evaluate import evaluate
from outpace.training.guards import StopSignal, deterministic_kernels

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
        pytest.raises(BadInputError, match=r"--deterministic: put_ .* Leave out --deterministic"),
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


def test_a_signal_that_comes_within_the_handler_of_another_is_the_same(monkeypatch):
    real, left = time.monotonic, [1]

    def monotonic():
        if left:
            left.pop()
            signal.raise_signal(signal.SIGTERM)
        return real()

    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"ended at once with {code}"))
    monkeypatch.setattr("outpace.training.guards.time.monotonic", monotonic)
    with StopSignal() as stop:
        stop.stepping = True
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested and not left


def test_another_thread_knows_of_a_signal_that_python_has_not_handled():
    """The main thread is in a library, as a rank that waits in a collective is."""
    known, library, lock = [], ctypes.CDLL(None), ctypes.create_string_buffer(64)
    calls = Path(f"/proc/self/task/{threading.get_native_id()}/syscall")

    def look():
        time.sleep(0.2)  # until it is in there
        while calls.exists() and f"{ctypes.addressof(lock):#x}" not in calls.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)  # the kernel delivers it in a moment
        until_s, heard = time.monotonic() + 60, False
        while not heard and time.monotonic() < until_s:
            heard = stop.ends_at_once()
            time.sleep(0.001)
        known.append((stop.requested, heard))
        library.pthread_mutex_unlock(lock)

    def work():
        thread.start()
        for _ in range(2):  # the second time until another thread unlocks it
            library.pthread_mutex_lock(lock)

    thread = threading.Thread(target=look)
    with StopSignal() as stop:
        stop.stepping = True
        with pytest.raises(InterruptedRunError, match="nothing was trained"):
            stop.unless_ended(work)
        thread.join()
        assert known == [(False, True)] and stop.ends_at_once()


def test_what_fails_after_a_signal_within_the_first_step_is_an_interruption():
    def fail_later():
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:
            raise RuntimeError("Connection closed by peer") from None

    with StopSignal() as stop:
        stop.stepping = True
        with pytest.raises(InterruptedRunError, match="nothing was trained"):
            stop.unless_ended(fail_later)
    with StopSignal() as stop, pytest.raises(ZeroDivisionError):
        stop.unless_ended(lambda: 1 // 0)


def test_a_signal_on_another_rank_ends_what_is_only_begun_after_it():
    """It was heard of between the last step and the final evaluation, where nothing is raised."""
    with StopSignal() as stop:
        stop.stepping, stop.message = True, "saved"
        assert stop.interrupt()
        with pytest.raises(InterruptedRunError, match="saved"):
            stop.unless_ended(lambda: pytest.fail("it was begun"))
        assert not stop.requested


def test_a_signal_ends_nothing_that_is_done():
    def work():
        stop.disarm()
        signal.raise_signal(signal.SIGTERM)
        return "done"

    with StopSignal(pytest.fail) as stop:
        stop.stepping = True
        assert stop.unless_ended(work) == "done"
        assert stop.requested and not stop._say.is_alive()
        assert not stop.interrupt() and not stop.ends_at_once()


def small_run(folder, lines, **more):
    """Settings of four steps on a text of so many lines."""
    (folder / "model.json").write_text(
        '{"family": "gpt2", "layers": 1, "hidden": 16, "heads": 2, "vocab": 300, '
        '"max_positions": 16}'
    )
    (folder / "text.txt").write_text("a few words of a text to learn\n" * lines)
    return {
        "model": str(folder / "model.json"), "data": [str(folder / "text.txt")], "seq_len": 8,
        "steps": 4, "global_batch": 2, "device": "cpu", "out": folder / "run", "compile": False,
        "cache_dir": folder / "cache", "sample_tokens": 0, **more,
    }  # fmt: skip


@pytest.mark.parametrize("at", ["first step", "initial evaluation", "second step"])
def test_a_run_ends_within_its_first_step_and_saves_in_later_ones(tmp_path, monkeypatch, at):
    values = small_run(tmp_path, 400)
    if at == "initial evaluation":
        monkeypatch.setattr(
            "outpace.jobs.train.build.evaluate_held_out",
            lambda *_: compile_badly() or pytest.fail(),
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
        with prepare_run(settings, RunContext()) as ready:
            ready.loop.step_context = around
            ready.run()

    with pytest.raises(InterruptedRunError) as ended:
        train()
    if at == "second step":
        assert done == [1, 2] and "saved after step 2 of 4" in str(ended.value)
    else:
        assert done == [] and "nothing was trained" in str(ended.value)
        assert not (tmp_path / "run").exists()


class Signalling(Callback):
    """Asks the run to end when its result is written."""

    def __init__(self, run):
        self.run, self.heard = run, []

    def on_end(self, measurement):
        assert (self.run / "result.json").is_file()
        signal.raise_signal(signal.SIGTERM)
        self.heard.append(measurement)


def test_a_run_whose_result_is_written_is_complete_whatever_comes(tmp_path):
    values, callback = small_run(tmp_path, 400), Signalling(tmp_path / "run")
    settings = TrainSettings.parse(values, "test")
    measurement = train(settings, RunContext(callbacks=[callback]))
    assert callback.heard == [measurement] and measurement.steps == 4


def test_the_message_of_the_end_is_set_before_ranks_wait_for_each_other(tmp_path, monkeypatch):
    """A rank that has passed that may end this one there, which has saved as well."""
    settings = TrainSettings.parse(small_run(tmp_path, 400), "test")
    said, wait = [], Groups.wait_for_all
    with prepare_run(settings, RunContext()) as ready:

        def note(groups):
            said.append(ready.loop.stop.message)
            wait(groups)

        monkeypatch.setattr(Groups, "wait_for_all", note)
        ready.run()
    assert len(said) == 1 and "saved after step 4, the last one" in said[0]


def test_a_signal_within_a_long_evaluation_is_not_left_until_its_end(tmp_path, monkeypatch):
    """A scheduler's grace is seconds; the run is saved at the step before."""
    values = small_run(tmp_path, 4000, eval_every=2, eval_batches=60)
    measured = []

    def measure(layout, steps, **more):
        def given():
            for number, batches in enumerate(steps, 1):
                if more["step"] == 2:
                    measured.append(number)
                    if number == 10:
                        signal.raise_signal(signal.SIGTERM)
                yield batches

        return evaluate(layout, given(), **more)

    monkeypatch.setattr("outpace.jobs.train.evaluation.evaluate", measure)
    with (
        pytest.raises(InterruptedRunError, match="saved after step 2 of 4"),
        prepare_run(TrainSettings.parse(values, "test"), RunContext()) as run,
    ):
        run.run()
    assert 10 <= len(measured) < 30
    assert len((tmp_path / "run" / "evals.jsonl").read_text().splitlines()) == 1  # before step 1


def test_who_waits_for_a_step_is_told_what_is_waited_for(monkeypatch):
    monkeypatch.setattr("outpace.training.guards._SAID_AFTER_S", 0.0)
    heard, told = [], threading.Event()
    with StopSignal(lambda sentence: (heard.append(sentence), told.set())) as stop:
        stop.stepping = True
        signal.raise_signal(signal.SIGTERM)
        assert told.wait(30)
        assert "Another signal, or Ctrl-C pressed again, ends the run at once" in heard[0]
    monkeypatch.setattr("outpace.training.guards._SAID_AFTER_S", 1e6)
    with StopSignal(heard.append) as stop:
        stop.stepping = True
        signal.raise_signal(signal.SIGTERM)
    assert len(heard) == 1 and stop._say.finished.is_set()
