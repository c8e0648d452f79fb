"""Measuring this machine with all its ranks."""
