"""Training: the loop, precision, optimizers, checkpoints, guards, the run directory."""
