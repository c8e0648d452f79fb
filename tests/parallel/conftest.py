"""What all tests of parallel layouts need."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _forks_that_compute_gradients():
    """Let forks compute gradients after tests that compile, as `outpace.trace.fake` explains."""
    if not torch.accelerator.is_available():
        torch.zeros((), requires_grad=True).backward()
