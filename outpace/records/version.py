"""The version of outpace, available even where its package metadata is not installed."""

__version__ = "0.1.0"
