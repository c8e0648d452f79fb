"""Optimizers by name: what a plan says, built over the parameters of a layout."""
