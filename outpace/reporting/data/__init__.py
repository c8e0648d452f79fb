"""Readers of what reports show: run folders, step logs, traces, predictions."""
