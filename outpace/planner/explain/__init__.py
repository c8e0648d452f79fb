"""Reasons, hints and titles of plans."""
