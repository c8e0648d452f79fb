"""Bytes sent over each link, and placement of ranks on nodes."""
