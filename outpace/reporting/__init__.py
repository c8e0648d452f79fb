"""Presentation of records: pages, tables and figures."""
