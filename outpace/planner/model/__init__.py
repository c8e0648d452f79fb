"""A model's shapes and FLOPs."""
