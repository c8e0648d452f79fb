"""Measurement of memory bandwidth."""
