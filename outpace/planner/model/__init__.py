"""Shapes and FLOPs of a model."""
