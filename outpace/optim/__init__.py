"""The optimizers that plans name, built over a layout's parameters."""
