"""Frozen, validated values that packages pass to each other, saved as JSON. Imports no torch."""
