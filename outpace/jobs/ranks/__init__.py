"""Coordination of ranks: process groups, watchdogs, shared file systems."""
