"""The planner: predicts time and memory of training plans, and ranks them. Imports no torch."""
