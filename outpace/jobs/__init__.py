"""The work of one rank, from settings to a result."""
