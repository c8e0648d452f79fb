"""Inventory of a machine: CPUs, GPUs, topology and versions."""
