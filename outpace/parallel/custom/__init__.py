"""Pipelines and tensor parallelism for modules of the user's own."""
