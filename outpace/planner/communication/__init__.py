"""Bytes on each link, and where ranks lie."""
