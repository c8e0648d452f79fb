"""Rates and intervals from measured steps."""
