"""Measurement of data loading and tokenization."""
