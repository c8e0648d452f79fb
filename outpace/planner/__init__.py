"""Closed forms without torch: what a model costs."""
