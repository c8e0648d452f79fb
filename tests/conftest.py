"""What all tests share: kinds of test that need something special are skipped without it."""

import os
import shutil

import hypothesis
import pytest

# Other work on the machine may make any example slow.
hypothesis.settings.register_profile("outpace", deadline=None)
hypothesis.settings.load_profile("outpace")


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
            ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "HOROVOD_")
        ):
            monkeypatch.delenv(name)
