"""The planner: predicts the time and memory of training plans and ranks them. Imports no torch."""
