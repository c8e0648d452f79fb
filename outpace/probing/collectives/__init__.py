"""Measurement of collectives and links."""
