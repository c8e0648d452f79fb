"""Devices and links as the planner sees them."""
