"""Check before the first step: a custom module under a strategy, compared with one process."""
