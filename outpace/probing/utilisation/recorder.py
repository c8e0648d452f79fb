"""Recorder of host and device load in a background thread."""

import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from outpace.probing.utilisation.sampler import Sampler
from outpace.records.utilisation import Load, ThinnedLoads, Utilisation, series

PERIOD_S = 1.0
_SAVE_EVERY_S = 60.0
# Large files are written less often: writing may take 1/1000 of a core's time.
_SAVE_SHARE = 1 / 1000
# Shorter periods mean little, since the kernel counts processor time in hundredths of a second.
_LEAST_S = 0.1
# A driver that hangs must not keep a run from finishing.
_PATIENCE_S = 10.0


class Samples:
    """Time series of a host's load, to which each call of `read_new` adds a point."""

    def __init__(self, sampler: Sampler, period_s: float) -> None:
        self.sampler = sampler
        self.cpu_s = 0.0
        self._kept = ThinnedLoads(period_s)
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._last_s = time.monotonic()

    def read_new(self) -> Load | None:
        """Record and return the load since the last reading.

        Return None if that was less than 0.1 s ago.
        """
        now_s = time.monotonic()
        if now_s - self._last_s < _LEAST_S:
            return None
        self._last_s, before_s = now_s, time.thread_time()
        load = self.sampler.read()
        self._kept.add(load)
        self.cpu_s += time.thread_time() - before_s
        return load

    @property
    def series(self) -> Utilisation | None:
        """All samples so far, or None before the first."""
        loads = self._kept.loads
        if not loads:
            return None
        return series(
            loads, started=self._started, period_s=self._kept.period_s, sampler_cpu_s=self.cpu_s
        )


class LoadRecorder:
    """Recorder of a host's load, which runs from `start` to `close`.

    It saves its file at most once a minute. If the file cannot be written or a sensor fails, only
    the recording stops.
    """

    def __init__(self, sampler: Sampler, path: Path, period_s: float = PERIOD_S) -> None:
        self._samples = Samples(sampler, period_s)
        self._path = path
        self._period_s = period_s
        self._closed = threading.Event()
        self._latest: Load | None = None
        self._thread = threading.Thread(target=self._run, name="utilisation", daemon=True)

    @property
    def latest(self) -> Load | None:
        """The latest sample, or None before the first."""
        return self._latest

    @property
    def series(self) -> Utilisation | None:
        """All recorded samples, or None; read this only after `close`."""
        return self._samples.series

    def start(self) -> None:
        """Start recording."""
        self._thread.start()

    def close(self) -> None:
        """Record the remaining time and write the file. A second call does nothing."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        with suppress(Exception):
            began_s = time.monotonic()
            save_after_s = began_s + _SAVE_EVERY_S
            period_s, done = self._period_s, False
            while not done:
                # Follow the clock, so that the duration of samples does not accumulate.
                wait_s = period_s - (time.monotonic() - began_s) % period_s
                done = self._closed.wait(wait_s)
                if done and self.series is None:
                    # Keep a load even if the recording was short.
                    time.sleep(max(0.0, _LEAST_S - (time.monotonic() - began_s)))
                self._latest = self._samples.read_new() or self._latest
                now_s = time.monotonic()
                if now_s >= save_after_s and not done:
                    before_s = time.thread_time()
                    self._save()
                    cost_s = time.thread_time() - before_s
                    self._samples.cpu_s += cost_s
                    save_after_s = now_s + max(_SAVE_EVERY_S, cost_s / _SAVE_SHARE)
        self._save()

    def _save(self) -> None:
        found = self.series
        if found is not None:
            with suppress(OSError):  # the run's folder was deleted, or the disk fails
                self._path.parent.mkdir(exist_ok=True)
                found.save(self._path)
