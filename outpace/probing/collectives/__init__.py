"""Measurements of collectives and of links between ranks."""
