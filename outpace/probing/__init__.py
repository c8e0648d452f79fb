"""Measurements and an inventory of this machine."""
