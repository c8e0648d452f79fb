"""Launch of rank processes, and of jobs from their settings."""
