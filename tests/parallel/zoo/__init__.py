"""Modules that nobody of the project wrote, for every strategy."""
