"""The space of plans, and search within it."""
