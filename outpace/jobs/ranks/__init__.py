"""Ranks among each other: process groups, watchdogs, shared file systems."""
