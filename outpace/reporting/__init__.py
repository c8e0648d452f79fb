"""Presentation of records as pages, tables and figures."""
