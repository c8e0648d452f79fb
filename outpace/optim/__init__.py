"""Optimizers by name: those that a plan names, built over the parameters of a layout."""
