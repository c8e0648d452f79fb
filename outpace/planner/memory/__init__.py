"""Peak memory of many plans at once, in closed form."""
