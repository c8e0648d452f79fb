"""Training, inference, probing and planning, from settings to results."""
