"""Training: the loop, precision, checkpoints, guards and the run directory."""
