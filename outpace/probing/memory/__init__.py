"""Measuring memory bandwidth."""
