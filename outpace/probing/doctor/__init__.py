"""Examination of a machine for faults that cost speed."""
