"""Read and write Hugging Face model directories."""

from outpace.interop.config import spec_from_config, spec_from_hf
from outpace.interop.config_out import hf_config
from outpace.interop.weights import read_weights
from outpace.interop.write import write_model

__all__ = ["hf_config", "read_weights", "spec_from_config", "spec_from_hf", "write_model"]
