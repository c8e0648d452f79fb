"""The parts of gpu_check.py: what is measured on a GPU, section by section."""
