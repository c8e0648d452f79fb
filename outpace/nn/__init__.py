"""The transformer, built from a ModelSpec; its loss; generation."""
