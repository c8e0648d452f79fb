"""Reliable timing on shared machines."""
