"""The work of a job's ranks, from settings to a result."""
