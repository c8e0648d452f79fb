"""Devices and links as the planner models them."""
