"""The loop, precision, optimizers, checkpoints, guards, the run's directory."""
