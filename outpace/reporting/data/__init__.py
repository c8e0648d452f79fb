"""Readers of the data in reports: run folders, step logs, traces, predictions."""
