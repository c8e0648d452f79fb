"""Examination of a machine for faults that hurt performance."""
