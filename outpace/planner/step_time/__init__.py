"""Step times of many plans at once, in closed form."""
