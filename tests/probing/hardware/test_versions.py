"""Versions of what has to be the same for a result to be the same."""

import pytest
import torch
import torch.distributed as dist

from outpace.probing.hardware import versions as module
from outpace.probing.hardware.versions import variables, versions


def test_the_driver_and_what_carries_collectives_are_named(monkeypatch, tmp_path):
    driver = tmp_path / "version"
    driver.write_text("570.86.15\n")
    monkeypatch.setattr(module, "_DRIVER", driver)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    found = versions()
    assert found["nvidia driver"] == "570.86.15" and found["nccl"] == "2.27.5"
    assert found["torch"] in found["gloo"]


@pytest.mark.parametrize("nccl", [True, False])
def test_without_them_they_are_left_out(monkeypatch, tmp_path, nccl):
    monkeypatch.setattr(module, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl and torch.cuda.is_available())
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert not {"nvidia driver", "gloo"} & set(versions())


def test_secrets_are_not_among_the_variables_that_are_kept():
    kept = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "0,1"}
    secret = {
        "NCCL_PASSPHRASE": "a", "GLOO_PW": "b", "TORCH_CRED": "c", "NVIDIA_BEARER": "d",
        "UCX_SIGNATURE": "e", "NCCL_PLUGIN_URL": "https://f@host/x",
        "TORCH_SECRET": "x", "NCCL_X_PASSWORD": "y", "CUDA_SECRET": "z", "NVIDIA_API_KEY": "k",
        "TORCH_HUB_TOKEN": "t", "MKL_LICENSE_KEY": "l", "UCX_AUTH": "a", "FI_CREDENTIALS": "c",
        "NCCL_NET_PASS": "p", "TORCH_PROXY": "http://user:word@host:80",
    }  # fmt: skip
    assert variables({**kept, **secret, "HOME": "/root", "TORCHELASTIC_RUN_ID": "1"}) == kept
