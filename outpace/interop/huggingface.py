"""Read and write Hugging Face model directories."""

from outpace.interop.config import spec_from_config, spec_from_hf
from outpace.interop.config_writer import hf_config
from outpace.interop.model_writer import write_model
from outpace.interop.weights import read_weights

__all__ = ["hf_config", "read_weights", "spec_from_config", "spec_from_hf", "write_model"]
