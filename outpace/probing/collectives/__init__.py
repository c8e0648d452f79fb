"""Measuring collectives and links."""
