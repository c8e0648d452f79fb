"""One file per strategy; apply(objective, plan, ranks, device)."""
