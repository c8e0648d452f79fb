"""Measurement of matmuls."""
