"""The same bits each time, on a GPU where that is asked for."""

import pytest
import torch

from outpace.records.errors import BadInputError
from outpace.train.guards import deterministic_kernels

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
