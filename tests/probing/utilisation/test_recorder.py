"""The recording thread: its file is whole, and its troubles are its own."""

import os
import time
from pathlib import Path

import psutil

from outpace.probing.utilisation.recorder import LoadRecorder
from outpace.probing.utilisation.sampler import Sampler
from outpace.records.utilisation import Utilisation


def spent_s() -> float:
    """Processor time of this process and its children, as the kernel counts it."""
    this = psutil.Process()
    times = [one.cpu_times() for one in (this, *this.children(recursive=True))]
    return sum(sum(one[:4]) for one in times)  # also of children that were waited for


def test_what_was_recorded_is_in_the_file_and_costs_little(tmp_path: Path):
    path, began_s = tmp_path / "utilisation" / "host-0.json", spent_s()
    recorder = LoadRecorder(Sampler([os.getpid()]), path, period_s=0.2)
    recorder.start()
    spun_s = time.process_time() + 0.6
    while time.process_time() < spun_s or recorder.latest is None:
        pass
    recorder.close()
    recorder.close()
    seen = Utilisation.load(path)
    assert seen == recorder.series
    assert len(seen.ends_s) >= 2 and seen.period_s == 0.2
    mean = seen.average()
    assert mean is not None and mean.host.run_cores is not None
    # All but the last tenth of a second, in which nothing is read again.
    assert 0.45 < mean.host.run_cores * seen.duration_s < spent_s() - began_s + 0.05
    assert 0 < seen.sampler_cpu_s < 0.02 * len(seen.ends_s)


def test_a_run_of_less_than_a_period_has_one_point(tmp_path: Path):
    recorder = LoadRecorder(Sampler(), tmp_path / "a.json", period_s=30)
    recorder.start()
    time.sleep(0.2)
    recorder.close()
    assert len(Utilisation.load(tmp_path / "a.json").ends_s) == 1


def test_a_run_of_a_moment_has_one_point_too(tmp_path: Path):
    recorder = LoadRecorder(Sampler(), tmp_path / "a.json", period_s=30)
    recorder.start()
    recorder.close()
    assert len(Utilisation.load(tmp_path / "a.json").ends_s) == 1


def test_a_sensor_that_breaks_ends_the_recording_alone(tmp_path: Path):
    class Breaking(Sampler):
        reads = 0

        def read(self):
            self.reads += 1
            if self.reads > 2:
                raise RuntimeError("lost")
            return super().read()

    sampler = Breaking()
    recorder = LoadRecorder(sampler, tmp_path / "a.json", period_s=0.15)
    recorder.start()
    while sampler.reads < 3:
        time.sleep(0.01)
    recorder.close()
    assert len(Utilisation.load(tmp_path / "a.json").ends_s) == 2


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path):
    recorder = LoadRecorder(Sampler(), tmp_path / "run" / "utilisation" / "a.json", period_s=0.15)
    recorder.start()
    time.sleep(0.4)
    recorder.close()
    assert recorder.series is not None
    assert list(tmp_path.iterdir()) == []
