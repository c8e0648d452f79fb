"""Sampling of device and host load."""
