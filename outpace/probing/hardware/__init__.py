"""Inventory of a machine: processors, GPUs, topology, versions."""
