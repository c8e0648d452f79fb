"""Examining a machine for faults that cost speed."""
