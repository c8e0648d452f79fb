"""Measuring storage."""
