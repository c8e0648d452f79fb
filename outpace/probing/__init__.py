"""Measurements and inventory of this machine."""
