"""Ways to make a plan fit: proposals and recomputation budgets."""
