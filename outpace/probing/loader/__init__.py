"""Measuring data loading and tokenization."""
