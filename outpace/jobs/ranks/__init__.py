"""Ranks in relation to each other: process groups, watchdogs, shared file systems."""
