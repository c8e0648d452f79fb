"""Pipelines and tensor parallelism for a user's modules."""
