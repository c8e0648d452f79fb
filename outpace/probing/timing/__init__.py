"""Timing on a machine that others also use."""
