"""Bytes on each link, and the placement of ranks."""
