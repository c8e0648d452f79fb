"""Measurement of matrix products."""
