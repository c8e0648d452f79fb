"""Memory of a plan: traced, predicted, made to fit."""
