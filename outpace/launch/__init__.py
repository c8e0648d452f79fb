"""Launch of processes, and of a job from its settings."""
