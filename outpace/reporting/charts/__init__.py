"""Figures and their colours."""
