"""Exports as transformers 4 reads them, which knows other rotary keys than 5.

With TRANSFORMERS_4 set to a folder that holds it (pip install --no-deps --target FOLDER
transformers==4.57.1 huggingface_hub==0.36.0 tokenizers==0.22.1), its own models compute from the
exports; without, its reading of the keys is repeated here.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.interop.huggingface import write_model
from outpace.nn.transformer import Transformer
from tests.interop.conftest import VARIANTS

_FOLDER = os.environ.get("TRANSFORMERS_4")
_COMPUTE = """
import sys
import torch, transformers
assert transformers.__version__.startswith("4."), transformers.__version__
tokens = torch.load("tokens.pt")
logits = {}
for name in sys.argv[1:]:
    kind = "MaskedLM" if name.startswith("bert") else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(name).eval()
    with torch.no_grad():
        logits[name] = model(input_ids=tokens).logits
torch.save(logits, "logits.pt")
"""


def exported(variant: str, make_theirs: Callable[..., Any], folder: Path) -> Transformer:
    """A variant's export by outpace, and outpace's model."""
    from outpace.interop.huggingface import read_weights, spec_from_hf

    make_theirs(variant).save_pretrained(folder / "source")
    spec = spec_from_hf(folder / "source")
    model = Transformer(spec).eval()
    model.load_state_dict(read_weights(folder / "source", spec))
    write_model(folder / variant, spec, model.state_dict(), None)
    return model


def test_rotary_settings_as_transformers_4_reads_them(
    variant: str, make_theirs: Callable[..., Any], tmp_path: Path
) -> None:
    """`config.rope_theta` and `config.rope_scaling`, defaults 10,000 and None."""
    spec = exported(variant, make_theirs, tmp_path).spec
    values = json.loads((tmp_path / variant / "config.json").read_text())
    if spec.positions == "learned":
        assert "rope_theta" not in values and "rope_scaling" not in values
        return
    assert values.get("rope_theta", 10_000.0) == spec.rope_theta
    scaling = values.get("rope_scaling")
    assert (scaling is None) == (spec.rope_scaling is None)
    if spec.rope_scaling is not None:
        assert scaling == {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }


@pytest.mark.skipif(_FOLDER is None, reason="TRANSFORMERS_4 names no folder with transformers 4")
def test_transformers_4_computes_the_same(
    make_theirs: Callable[..., Any], tokens: Tensor, tmp_path: Path
) -> None:
    ours = {variant: exported(variant, make_theirs, tmp_path) for variant in VARIANTS}
    torch.save(tokens, tmp_path / "tokens.pt")
    environment = {**os.environ, "PYTHONPATH": str(_FOLDER)}
    subprocess.run([sys.executable, "-c", _COMPUTE, *VARIANTS], cwd=tmp_path, env=environment,
                   check=True)  # fmt: skip
    theirs = torch.load(tmp_path / "logits.pt")
    for variant, model in ours.items():
        with torch.no_grad():
            mine = model.logits(model(tokens))
        assert (mine - theirs[variant]).abs().max() <= 1e-4, variant
