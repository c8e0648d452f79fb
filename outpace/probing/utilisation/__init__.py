"""Sampling of the load of devices and hosts."""
