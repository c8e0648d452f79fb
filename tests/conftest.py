"""What all tests share: kinds of test that need something special are skipped without it."""

import gc
import json
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

FORKED = Path(__file__).parent / "parallel" / "forked.py"
SERVED = str(Path(__file__).with_name("served.py"))
# What commands and ranks import, or would at their first use.
IMPORTED = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.launcher.api",
    "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
    "transformers.generation.configuration_utils", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.models.llama.configuration_llama",
    "outpace.cli.main", "outpace.cli.train", "outpace.experiment.verify",
    "outpace.jobs.train.job", "outpace.parallel.sharded", "outpace.reporting.terminal.progress",
    "outpace.training.states",
)  # fmt: skip

# Other work on the machine may make any example slow. What fails is made small but not explained:
# that traces every line, for minutes, and takes pytest's time limit for one more way to fail.
# The examples are the same in every run; `--hypothesis-profile=explore` draws others.
_DRAWN = hypothesis.settings(
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
)
hypothesis.settings.register_profile("explore", _DRAWN)
hypothesis.settings.register_profile("outpace", _DRAWN, derandomize=True, database=None)
hypothesis.settings.load_profile("outpace")


def pytest_configure(config: pytest.Config) -> None:
    """Let signals reach what tests start, also in the background, and collect less often."""
    if config.getoption("--hypothesis-profile") != "explore":
        # Examples also have numbers and words of the modules that happen to be imported: of the
        # tests before them in the same process.
        assert hasattr(providers, "is_local_module_file")  # a private name of hypothesis
        providers.is_local_module_file = lambda path: False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # A worker comes to have millions of objects, and each full collection looks at all of them.
    gc.set_threshold(5000, 10, 20)
    gc.disable()  # until all is imported and collected, of which hardly anything is freed


def pytest_collection_finish() -> None:
    gc.enable()


def _seed() -> None:
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Draw the same numbers in a fixture, whichever tests came before it."""
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Draw the same numbers in a test, whichever tests came before it."""
    _seed()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    as_root = os.geteuid() == 0
    for item in items:
        # The driver's tool tells without importing torch, which would slow down every run.
        if item.get_closest_marker("gpu") and shutil.which("nvidia-smi") is None:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA driver"))
        if item.get_closest_marker("root") and not as_root:
            item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests started by a launcher of any kind are not its ranks."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") or name.startswith(
            (
                "TORCHELASTIC_",
                "OMPI_COMM_WORLD_",
                "HOROVOD_",
                "SLURM_",
                "PMI_",
                "PMIX_",
                "MPI_LOCAL",
            )
        ):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    """Let what commands froze for the rest of their process be collected: groups have threads."""
    yield
    gc.unfreeze()


class Running:
    """A process of the tests' fork server, with what tests use of `subprocess.Popen`."""

    def __init__(self, process: Any, words: list[str], out: Path, err: Path) -> None:
        self._process, self.args, self._texts = process, words, (out, err)
        self.returncode: int | None = None
        process.start()
        self.pid: int = process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and self._process.exitcode is not None:
            self.returncode = self._process.exitcode
            self._process.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0, self._texts[0].read_text())
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (path.read_text() for path in self._texts)
        return out, err

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Running]:
    """`started("outpace", "train", "--steps=1")`: what `subprocess.Popen` returns, in less time.

    In the place of "outpace" also the path of a script. The process is forked from one that has
    imported torch, so that what torch reads of the environment when it is imported is not seen.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    forkserver.ensure_running()  # before a test that asks for it changes the environment

    def start(
        *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Running:
        folder = tmp_path_factory.mktemp("said")
        out, err = folder / "out", folder / "err"
        out.write_text("")
        err.write_text("")
        asked = {
            "words": [str(word) for word in words],
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
            "out": str(out),
            "err": str(err),
        }
        process = context.Process(target=runpy.run_path, args=(SERVED, {"request": asked}))
        return Running(process, [str(word) for word in words], out, err)

    return start


@pytest.fixture(scope="session")
def command(started: Callable[..., Running]) -> Callable[..., Any]:
    """`command("outpace", "train", "--steps=1")`: what `subprocess.run` returns, as `started`."""

    def run(
        *words: object, timeout: float = 550.0, cwd: Path | None = None,
        env: Mapping[str, str] | None = None, check: bool = False,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        process = started(*words, cwd=cwd, env=env)
        try:
            out, err = process.communicate(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        done = subprocess.CompletedProcess(process.args, process.wait(), out, err)
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def on_ranks(command: Callable[..., Any]) -> Callable[..., Any]:
    """`on_ranks(2, "outpace", "verify", "--json")`: the document that a command prints.

    Instead of "outpace" also the path of a script. As torchrun would start it, in less time.
    """

    def run(size: int, *words: object) -> Any:
        return json.loads(command(FORKED, size, *words, check=True).stdout)

    return run


@pytest.fixture(scope="session")
def runnable() -> Callable[[Iterable[str]], list[str]]:
    """`runnable(["mlp:zb", "1f1b@2→zbv@2"])`: the cases that this torch can run on a CPU.

    Zero-bubble schedules need torch 2.13. Where no case is left, the test is skipped, and says why.
    """

    def keep(cases: Iterable[str]) -> list[str]:
        import torch

        from outpace.parallel import why_not
        from outpace.records.ranks import Ranks

        def lacking(case: str) -> str | None:
            words = set(re.split("[:@→+]", case)) - {"horovod"}
            found = (why_not(word, Ranks(), torch.device("cpu")) for word in words)  # type: ignore[arg-type]
            return next(filter(None, found), None)

        reasons = {case: lacking(case) for case in cases}
        if all(reasons.values()):
            pytest.skip("; ".join(sorted({why for why in reasons.values() if why})))
        return [case for case, why in reasons.items() if why is None]

    return keep


@pytest.fixture
def hold_port() -> Iterator[Callable[[], int]]:
    """`hold_port()`: a port that the kernel gives to no other program until the test ends.

    Servers with SO_REUSEADDR, as torch's have it, may listen there.
    """
    with ExitStack() as held:

        def hold() -> int:
            one = held.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            return port

        yield hold


@pytest.fixture
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure memory on arrays of 4 MiB: those beyond a large cache take seconds to fill."""
    monkeypatch.setattr("outpace.probing.memory.bandwidth.large_elements", lambda device: 1 << 20)


@pytest.fixture(scope="module")
def short_trials() -> Iterator[None]:
    """Let trials of tunings measure the fewest steps; of small models they would have sixty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outpace.experiment.trials._MOST", 8)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with a few files of the standard library, about 200 kB."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "base64", "bisect", "calendar", "cmd", "code", "copy", "csv", "dis",
             "glob", "heapq", "inspect", "shlex", "textwrap", "token", "uuid", "wave")  # fmt: skip
    for name in names:
        text = (library / f"{name}.py").read_text(encoding="utf-8")[:12_000]
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")
