"""Recording of utilisation of a run's hosts and devices, with one thread per host."""

import os
import socket
from collections.abc import Sequence

from outpace.jobs.train.context import Job
from outpace.parallel.rank_objects import gather_objects
from outpace.probing.utilisation.recorder import LoadRecorder
from outpace.probing.utilisation.sampler import Sampler, open_nvml
from outpace.records.measurement import StepRecord
from outpace.records.utilisation import Load
from outpace.training.callbacks import Callback, notify
from outpace.training.run_dir import UTILISATION_FOLDER


class Recording:
    """Records utilisation during a run; the first rank of each host records for the whole host."""

    def __init__(self, job: Job, start_step: int) -> None:
        self._job = job
        self._resumed = f"-from-step-{start_step}" if start_step else ""
        self._recorder: LoadRecorder | None = None

    def start(self) -> None:
        """Start recording. Collective."""
        job = self._job
        places = gather_objects((socket.gethostname(), os.getpid()), job.groups.control)
        hosts = list(dict.fromkeys(host for host, _ in places))
        mine, _ = places[job.ranks.rank]
        pids = [pid for host, pid in places if host == mine]
        if pids[0] != os.getpid():
            return
        node = hosts.index(mine)
        path = job.run_dir.path / UTILISATION_FOLDER / f"host-{node}{self._resumed}.json"
        self._recorder = LoadRecorder(Sampler(pids, nvml=open_nvml(), node=node), path)
        job.callbacks.append(_LoadNotifier(job.callbacks, self._recorder))
        self._recorder.start()

    @property
    def latest(self) -> Load | None:
        """Return this host's latest utilisation; None except on the host's first rank."""
        return None if self._recorder is None else self._recorder.latest

    def close(self) -> None:
        """Write the recording, however the run ended."""
        if self._recorder is not None:
            self._recorder.close()

    def averages(self) -> tuple[Load, ...]:
        """Return each host's mean utilisation, on all ranks. Collective; call it after `close`."""
        found = self._recorder.series if self._recorder is not None else None
        mine = None if found is None else found.average()
        said = gather_objects(mine, self._job.groups.control)
        return tuple(load for load in said if load is not None)


class _LoadNotifier(Callback):
    """Passes each new measurement of utilisation to callbacks, in the training thread."""

    def __init__(self, callbacks: Sequence[Callback], recorder: LoadRecorder) -> None:
        self._callbacks = callbacks  # not the job: a reference cycle would keep threads
        self._recorder = recorder
        self._told: Load | None = None

    def on_step(self, record: StepRecord) -> None:
        load = self._recorder.latest
        if load is not None and load is not self._told:
            self._told = load
            notify(self._callbacks, "on_load", load, record.step)
