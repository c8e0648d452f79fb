"""Sections of documents."""
