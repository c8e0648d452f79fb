"""The transformer built from a ModelSpec, its loss, and generation."""
