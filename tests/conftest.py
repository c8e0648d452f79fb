"""What all tests share: kinds of test that need something special are skipped without it."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

FORKED = Path(__file__).parent / "parallel" / "forked.py"

# Other work on the machine may make any example slow. What fails is made small but not explained:
# that traces every line, for minutes, and takes pytest's time limit for one more way to fail.
hypothesis.settings.register_profile(
    "outpace",
    deadline=None,
    phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
)
hypothesis.settings.load_profile("outpace")


def pytest_configure() -> None:
    """Signals reach what tests start, also where a shell has put all this into the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


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


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., Any]:
    """`on_ranks(2, "outpace", "verify", "--json")`: the document that a command prints.

    Instead of "outpace" also the path of a script. As torchrun would start it, in less time.
    """

    def run(size: int, *words: object) -> Any:
        command = [sys.executable, str(FORKED), str(size), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

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
