"""Memory of a plan: trace it, predict it, make it fit."""
