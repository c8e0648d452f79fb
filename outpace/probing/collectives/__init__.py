"""Measurements of collectives and links."""
