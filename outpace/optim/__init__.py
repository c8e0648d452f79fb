"""Optimizers by the names that plans use, built over a layout's parameters."""
