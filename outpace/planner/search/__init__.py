"""The space of plans, and the search in it."""
