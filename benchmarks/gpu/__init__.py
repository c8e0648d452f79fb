"""The parts of gpu_check.py: measurements on a GPU, section by section."""
