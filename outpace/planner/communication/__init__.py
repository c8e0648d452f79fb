"""Bytes sent over each link, and the placement of ranks."""
