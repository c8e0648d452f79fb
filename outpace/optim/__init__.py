"""Optimizers by the names that a plan gives them, built over the parameters of a layout."""
