"""Measurement of storage."""
