"""The space of plans, and the search of it."""
