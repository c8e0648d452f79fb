"""Sampling the use of devices and hosts."""
