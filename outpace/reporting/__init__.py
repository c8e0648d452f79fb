"""Records as a reader sees them: pages, tables and figures."""
