"""Models of which only the dimensions are known: for planning, not for training.

A ModelSpec cannot describe BLOOM's ALiBi positions or the norm after its embedding; both have
almost no parameters.
"""

from collections.abc import Mapping
from types import MappingProxyType

from outpace.catalog.models import Preset
from outpace.records.model import ModelSpec

_BLOOM = ModelSpec.parse(
    {
        "family": "gpt2",
        "layers": 70,
        "hidden": 14336,
        "heads": 112,
        "vocab": 250880,
        "max_positions": 2048,
        "dropout": 0.1,
        "positions": "rotary",  # stands for ALiBi: no parameters
    },
    "bloom-176b",
)

DIMENSIONS: Mapping[str, Preset] = MappingProxyType(
    {
        "bloom-176b": Preset(
            spec=_BLOOM,
            source="BigScience, arXiv 2211.05100, table 3; vocabulary as padded, and dropout: "
            "train/tr11-176B-ml/README.md of github.com/bigscience-workshop/bigscience",
        )
    }
)
