"""Changes that make a plan fit into memory: proposals and recomputation budgets."""
