"""Data of reports: run folders, step logs, traces, predictions."""
