"""Measuring matrix products."""
