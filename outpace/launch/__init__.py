"""Starts processes and puts a job together from its settings."""
