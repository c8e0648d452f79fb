"""Measurement of this machine with all its ranks."""
