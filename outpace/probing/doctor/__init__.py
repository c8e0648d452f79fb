"""Checks of a machine for problems that hurt performance."""
