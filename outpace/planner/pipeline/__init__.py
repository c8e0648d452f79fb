"""Pipelines: stages, schedules, and simulation of schedules."""
