"""Sections that documents are made of."""
