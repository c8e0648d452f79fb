"""One file per command; the only place that reads argv and the environment."""
