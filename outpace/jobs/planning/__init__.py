"""Planning requests: outlines, automatic plans, proposals for tuning."""
